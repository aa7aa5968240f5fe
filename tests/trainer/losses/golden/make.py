"""TRL's losses of some tokens, recorded in `losses.json`.

    .venv-trl/bin/python tests/trainer/losses/golden/make.py 16 tests/trainer/losses/golden/losses.json

`make .venv-trl/.installed` creates the environment. TRL's losses are methods of its trainers; they are called here
without a trainer, on a namespace with the attributes they read. TRL takes importance weights as inputs, computed
elsewhere; here they follow the rule of its documentation.

Everything is float64. Tokens are flat in the file, split into sequences by `lengths`, and so are the gradients with
respect to their log-probabilities. `ours` is the equivalent section of `[trainer.loss]`.
"""

import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

LENGTHS: Final = (5, 1, 9, 3, 7, 4)
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LONGEST: Final = 9
FAR: Final = (25.0, -25.0, 30.0, -30.0, 0.5)
"""Distances from the far reference, in nats, in turn: where a clamp of 20 nats would be felt."""


@dataclass(frozen=True)
class Case:
    """One loss as both call it.

    Attributes:
        name: Of the case.
        ours: Our section, without an entropy bonus unless it says so.
        trl: What the trainer's namespace has beside the usual.
        weights: `level_how` of importance weights, or empty.
        on_policy: The policy that learns is the one that sampled.
        far: The reference is far from the policy that learns.
    """

    name: str
    ours: dict[str, Any]
    trl: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    on_policy: bool = False
    far: bool = False


CLIPPED: Final = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
NARROW: Final = {"clip_low": 0.04, "clip_high": 0.06}
NARROW_TRL: Final = {"epsilon_low": 0.04, "epsilon_high": 0.06}
CASES: Final = (
    Case("grpo", {"name": "grpo", **CLIPPED}, {"loss_type": "grpo"}),
    Case("bnpo", {"name": "dapo", **CLIPPED}, {"loss_type": "bnpo"}),
    Case("dapo", {"name": "dapo", **CLIPPED}, {"loss_type": "dapo"}),
    Case("dr_grpo", {"name": "dr_grpo", "length": LONGEST, **CLIPPED}, {"loss_type": "dr_grpo"}),
    Case("luspo", {"name": "dr_grpo", "length": 1, **CLIPPED}, {"loss_type": "luspo"}),
    Case(
        "gspo",
        {"name": "gspo", **NARROW},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **NARROW_TRL},
    ),
    Case("cispo", {"name": "cispo", "ratio_max": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    Case(
        "grpo with k3",
        {"name": "grpo", "kl": 0.3, "kl_estimator": "k3", **CLIPPED},
        {"loss_type": "grpo", "beta": 0.3},
    ),
    Case(
        "gspo with k3",
        {"name": "gspo", "kl": 0.3, "kl_estimator": "k3", **NARROW},
        {"loss_type": "grpo", "beta": 0.3, "importance_sampling_level": "sequence", **NARROW_TRL},
    ),
    Case(
        "grpo with a far k3",
        {"name": "grpo", "kl": 0.3, "kl_estimator": "k3", **CLIPPED},
        {"loss_type": "grpo", "beta": 0.3},
        far=True,
    ),
    Case(
        "dapo with entropy",
        {"name": "dapo", "entropy": 0.1, **CLIPPED},
        {"loss_type": "dapo", "entropy_coef": 0.1, "_entropy_bonus_enabled": True},
    ),
    *(
        Case(
            f"{loss} with {level}_{how}",
            {
                "name": ours,
                "correction": {"level": level, "how": how, "low": 0.8 * (how == "mask"), "high": 1.2},
                **(CLIPPED if ours != "cispo" else {"ratio_max": 1.1}),
            },
            {"loss_type": loss} | ({"epsilon_high": 1.1} if loss == "cispo" else {}),
            weights=f"{level}_{how}",
        )
        for loss, ours in (("grpo", "grpo"), ("dapo", "decoupled_ppo"), ("cispo", "cispo"))
        for level in ("token", "sequence")
        for how in ("truncate", "mask")
    ),
    Case("rloo", {"name": "rloo"}, on_policy=True),
)


def main(seed: int, out: Path) -> None:
    """Write the file of a seed."""
    tokens = some_tokens(seed)
    cases = []
    for case in CASES:
        loss, gradient = rloo(tokens) if case.name == "rloo" else grpo(tokens, case)
        cases.append(asdict(case) | {"loss": loss, "gradient": gradient})
    found = {name: flat(value) for name, value in tokens.items()}
    known = {"made_by": f"trl {version('trl')}", "seed": seed, "lengths": LENGTHS, "longest": LONGEST}
    text = json.dumps(known | {"tokens": found, "cases": cases}, indent=1)
    out.write_text(text + "\n", encoding="utf-8")


def some_tokens(seed: int) -> dict[str, Tensor]:
    """Make rows `(B, T)` of log-probabilities and the like, right padded; padding is zero."""
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64)

    shape = (len(LENGTHS), LONGEST)
    behaviour = -normal(*shape).abs() - 0.1
    rows = {
        "behaviour_logprobs": behaviour,
        "proximal_logprobs": behaviour + 0.2 * normal(*shape),
        "logprobs": behaviour + 0.3 * normal(*shape),
        "ref_logprobs": behaviour + 0.4 * normal(*shape),
        "entropy": normal(*shape).abs(),
        "advantages": normal(len(LENGTHS), 1).expand(*shape),
    }
    steps = torch.arange(len(LENGTHS) * LONGEST).view(shape) % len(FAR)
    rows["far_ref_logprobs"] = rows["logprobs"] - torch.tensor(FAR, dtype=torch.float64)[steps]
    return {name: value * mask() for name, value in rows.items()}


def mask() -> Tensor:
    """Return which `(B, T)` are tokens and no padding."""
    return (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).double()


def flat(values: Tensor) -> list[float]:
    """Return the values `(B, T)` of tokens, one sequence after the other."""
    found: list[float] = values[mask().bool()].tolist()
    return found


def grpo(tokens: dict[str, Tensor], case: Case) -> tuple[float, list[float]]:
    """Return the loss of GRPOTrainer and its gradient."""
    from trl import GRPOTrainer

    logprobs = tokens["logprobs"].clone().requires_grad_()
    old = tokens["proximal_logprobs" if case.weights else "behaviour_logprobs"]
    given = inputs(tokens) | {"old_per_token_logps": old}
    if case.far:
        given["ref_per_token_logps"] = tokens["far_ref_logprobs"]
    if case.weights:
        given["importance_sampling_ratio"] = weights(old - tokens["behaviour_logprobs"], case)
    trainer = namespace(logprobs, tokens["entropy"], use_vllm=bool(case.weights), **case.trl)
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, given)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), flat(gradient)


def rloo(tokens: dict[str, Tensor]) -> tuple[float, list[float]]:
    """Return the loss of RLOOTrainer and its gradient, on policy: its clip then leaves everything alone."""
    from trl import RLOOTrainer

    logprobs = tokens["logprobs"].clone().requires_grad_()
    trainer = namespace(logprobs, tokens["entropy"])
    old = (tokens["logprobs"] * mask()).sum(1)
    given = inputs(tokens) | {"old_logps": old}
    loss = RLOOTrainer._compute_loss(trainer, trainer.model, given)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), flat(gradient)


def inputs(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what both trainers are given; nobody looks at the ids."""
    prompts = torch.ones(len(LENGTHS), 2, dtype=torch.int64)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.ones(len(LENGTHS), LONGEST, dtype=torch.int64),
        "completion_mask": mask(),
        "advantages": tokens["advantages"][:, 0].clone(),
        "ref_per_token_logps": tokens["ref_logprobs"],
        "num_items_in_batch": torch.tensor(float(sum(LENGTHS)), dtype=torch.float64),
    }


def namespace(logprobs: Tensor, entropy: Tensor, **given: Any) -> SimpleNamespace:
    """Make what stands for the trainer: its settings, and a model whose log-probabilities are these."""
    usual = {
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "accelerator": SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda value: value,
            reduce=lambda value, **_: value,
        ),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, entropy, None),
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": CLIP_LOW,
        "epsilon_high": CLIP_HIGH,
        "max_completion_length": LONGEST,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "use_adaptive_entropy": False,
        "_entropy_bonus_enabled": False,
    }
    return SimpleNamespace(**(usual | given))


def weights(log_weights: Tensor, case: Case) -> Tensor:
    """Return importance weights as TRL documents them: `(B, T)`, or `(B, 1)` of sequences."""
    low, high = case.ours["correction"]["low"], case.ours["correction"]["high"]
    summed = log_weights * mask()
    if case.weights.startswith("sequence"):
        summed = summed.sum(1, keepdim=True)
    ratio = summed.exp()
    if case.weights.endswith("truncate"):
        return ratio.clamp(max=high)
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
