"""Tokens of one step in float64, shared by the tests of the losses."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rolloutmq.schemas.config.losses import (
    CispoConfig,
    CorrectionConfig,
    DapoConfig,
    DecoupledPpoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    LossSection,
    ReinforceConfig,
    RlooConfig,
)
from rolloutmq.trainer.losses.inputs import LossInputs, LossOutputs, StepSize
from rolloutmq.trainer.losses.registry import find_loss

PER_TOKEN = (
    "logprobs",
    "entropy",
    "behaviour_logprobs",
    "advantages",
    "sequences",
    "staleness",
    "proximal_logprobs",
    "ref_logprobs",
)

CORRECTED = CorrectionConfig(level="token", high=1.3, from_staleness=1)
SECTIONS: dict[str, LossSection] = {
    "dapo": DapoConfig(entropy=0.1),
    "grpo": GrpoConfig(kl=0.2),
    "dr_grpo": DrGrpoConfig(entropy=0.1, kl=0.1, kl_estimator="k3"),
    "decoupled_ppo": DecoupledPpoConfig(),
    "gspo": GspoConfig(clip_low=0.05, clip_high=0.05),
    "cispo": CispoConfig(ratio_max=1.2),
    "reinforce": ReinforceConfig(),
    "rloo": RlooConfig(),
    "dapo_corrected": DapoConfig(correction=CORRECTED),
    "gspo_corrected": GspoConfig(
        correction=CorrectionConfig(level="sequence", how="mask", low=0.7, high=1.4)
    ),
    "cispo_corrected": CispoConfig(correction=CORRECTED),
    "reinforce_sequence": ReinforceConfig(correction=CorrectionConfig(level="sequence", high=1.5)),
    "reinforce_masked": ReinforceConfig(
        correction=CorrectionConfig(level="token", how="mask", low=0.8, high=1.2)
    ),
    "grpo_by_tokens": GrpoConfig(mean="tokens"),
    "dapo_by_sequences": DapoConfig(mean="sequences", kl=0.3),
}
"""Every loss, and what changes them."""


def inputs_of(log_ratios: list[float], advantage: float, **given: Any) -> LossInputs:
    """One sequence of tokens with those log-ratios to the policy that sampled, all with the same advantage."""
    behaviour = torch.linspace(-3, -0.1, len(log_ratios), dtype=torch.float64)
    logprobs = behaviour + torch.tensor(log_ratios, dtype=torch.float64)
    tokens = len(log_ratios)
    made: dict[str, Any] = {
        "logprobs": logprobs.requires_grad_(),
        "entropy": torch.full_like(behaviour, 0.5).requires_grad_(),
        "behaviour_logprobs": behaviour,
        "advantages": torch.full_like(behaviour, advantage),
        "sequences": torch.zeros(tokens, dtype=torch.int64),
        "sequence_count": 1,
        "step": StepSize(tokens, 1),
        "staleness": torch.zeros(tokens, dtype=torch.int64),
    }
    return LossInputs(**(made | given))


def some_inputs(lengths: list[int], seed: int = 0, spread: float = 0.3) -> LossInputs:
    """Sequences of those lengths with everything drawn by chance."""
    chance = torch.Generator().manual_seed(seed)
    tokens, count = sum(lengths), len(lengths)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=chance, dtype=torch.float64)

    behaviour = -normal(tokens).abs()
    sequences = torch.arange(count).repeat_interleave(torch.tensor(lengths))
    return LossInputs(
        logprobs=(behaviour + spread * normal(tokens)).requires_grad_(),
        entropy=normal(tokens).abs().requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=normal(count)[sequences],
        sequences=sequences,
        sequence_count=count,
        step=StepSize(tokens, sum(n > 0 for n in lengths)),
        staleness=torch.randint(0, 4, (count,), generator=chance)[sequences],
        proximal_logprobs=behaviour + spread * normal(tokens),
        ref_logprobs=behaviour + spread * normal(tokens),
    )


def part_of(whole: LossInputs, chosen: list[int]) -> LossInputs:
    """Some of the sequences as a forward pass of their own, numbered anew, of the same step."""
    mine = torch.isin(whole.sequences, torch.tensor(chosen))
    number = torch.full((whole.sequence_count,), -1)
    number[chosen] = torch.arange(len(chosen))
    fields = {name: getattr(whole, name) for name in PER_TOKEN if getattr(whole, name) is not None}
    cut = {name: value[mine] for name, value in fields.items()}
    return replace(whole, **(cut | {"sequences": number[cut["sequences"]], "sequence_count": len(chosen)}))


def compute(given: LossInputs, config: LossSection) -> LossOutputs:
    """The loss that a section is of."""
    return find_loss(config).compute(given, config)


def gradients(given: LossInputs, config: LossSection) -> Tensor:
    """The gradient of the loss with respect to the log-probabilities."""
    (found,) = torch.autograd.grad(compute(given, config).loss, given.logprobs)
    return found
