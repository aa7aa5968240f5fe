"""Every loss against the second oracle, on random tokens: values and gradients, in any cut of the step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from tests.trainer.losses.oracle import Answer, step_loss
from tests.trainer.losses.tokens import compute, part_of, some_inputs

from rolloutmq.schemas.config.losses import LossConfig, LossSection
from rolloutmq.trainer.losses.inputs import LossInputs
from rolloutmq.trainer.losses.registry import LOSSES

ROUNDS = 8
FAR = (-30.0, -25.0, -20.5, 20.5, 25.0, 60.0)
"""Distances from the reference, in nats, that a clamp would change."""


def some_section(name: str, chance: np.random.Generator) -> LossSection:
    """A section with everything that the loss has drawn at random."""

    def one_of(*choices: Any) -> Any:
        return choices[chance.integers(len(choices))]

    low = float(one_of(0.0, 0.5, 0.9))
    place = one_of("loss", "reward")
    told: dict[str, Any] = {
        "name": name,
        "advantage": one_of("dr_grpo", "grpo", "rloo"),
        "std_ddof": one_of(0, 1),
        "std_floor": one_of(1e-4, 0.5),
        "mean": one_of("tokens", "sequences", "constant"),
        "length": one_of(1, 7),
        "entropy": one_of(0.0, 0.03),
        "kl": one_of(0.0, 0.1),
        "kl_in": place,
        "kl_estimator": one_of("k2", "k3") if place == "loss" else one_of("k1", "k3"),
        "correction": {
            "level": one_of("token", "sequence", *(["none"] if name != "decoupled_ppo" else [])),
            "how": one_of("truncate", "mask"),
            "low": low,
            "high": low + one_of(0.3, 1.0, 4.0),
            "from_staleness": one_of(0, 1),
            "max_staleness": one_of(None, 2),
        },
    }
    if name == "cispo":
        told["ratio_max"] = one_of(1.1, 2.0, 5.0)
    elif name not in ("reinforce", "rloo"):
        narrow = 0.1 if name == "gspo" else 1.0
        told |= {"clip_low": narrow * one_of(0.1, 0.3), "clip_high": narrow * one_of(0.1, 0.4)}
    return TypeAdapter[LossSection](LossConfig).validate_python(told)


def some_tokens(seed: int, chance: np.random.Generator) -> LossInputs:
    """Sequences of any length, none included, some of whose tokens are far from their reference."""
    lengths = [int(one) for one in chance.integers(0, 7, chance.integers(2, 7))]
    made = some_inputs([*lengths, 3], seed, spread=float(chance.choice([0.05, 0.3, 1.5])))
    drawn = torch.from_numpy(chance.choice(FAR, len(made.logprobs)))
    assert made.ref_logprobs is not None
    close = torch.from_numpy(chance.random(len(drawn)) < 0.7)
    reference = torch.where(close, made.ref_logprobs, made.logprobs.detach() - drawn)
    made = replace(made, ref_logprobs=reference)
    if chance.random() < 0.5:  # an environment may give each token its own
        made = replace(made, advantages=torch.from_numpy(chance.standard_normal(len(drawn))))
    return replace(made, proximal_logprobs=None) if chance.random() < 0.3 else made


def answers_of(given: LossInputs) -> list[Answer]:
    made = []
    assert given.ref_logprobs is not None
    old = given.logprobs.detach() if given.proximal_logprobs is None else given.proximal_logprobs
    for number in range(given.sequence_count):
        mine = [at for at, sequence in enumerate(given.sequences.tolist()) if sequence == number]
        ages = {int(given.staleness[at]) for at in mine}
        made.append(
            Answer(
                pi=given.logprobs[mine],
                entropy=given.entropy[mine],
                mu=given.behaviour_logprobs[mine],
                old=old[mine],
                ref=given.ref_logprobs[mine],
                advantages=given.advantages[mine],
                staleness=max(ages, default=0),
            )
        )
    return made


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_oracle(name: str, seed: int) -> None:
    agree(name, seed)


@pytest.mark.extended
@pytest.mark.parametrize("name", LOSSES)
def test_many_losses_and_gradients_are_those_of_the_oracle(name: str) -> None:
    for seed in range(ROUNDS, 300):
        agree(name, seed)


def agree(name: str, seed: int) -> None:
    chance = np.random.default_rng([seed, *name.encode()])
    config, given = some_section(name, chance), some_tokens(seed, chance)
    leaves = (given.logprobs, given.entropy)
    expected = step_loss(answers_of(given), config)
    slopes = torch.autograd.grad(expected, leaves, allow_unused=True, materialize_grads=True)

    order = chance.permutation(given.sequence_count).tolist()
    edge = int(chance.integers(len(order) + 1))
    passes = [part_of(given, part) for part in (order[:edge], order[edge:])]
    found = torch.stack([compute(one, config).loss for one in passes if one.logprobs.numel()]).sum()
    told = f"{seed=} {config!r}"
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13, msg=lambda text: f"{text}\n{told}")
    gradients = torch.autograd.grad(found, leaves, allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13, msg=lambda text: f"{text}\n{told}")
