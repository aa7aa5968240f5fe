"""Each loss against its formula, written out sequence by sequence in plain Python, and against finite differences."""

from collections.abc import Callable
from dataclasses import replace
from math import exp

import pytest
import torch
from tests.trainer.losses.tokens import SECTIONS, compute, some_inputs
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
from rolloutmq.trainer.losses.inputs import LossInputs

Rows = list[list[dict[str, float]]]
"""Tokens of each sequence."""

GIVEN = some_inputs([4, 1, 6, 2], seed=1)


def rows_of(given: LossInputs) -> Rows:
    """The same tokens as names and numbers: pi, mu (sampled), before (the step), a, h."""
    made: Rows = [[] for _ in range(given.sequence_count)]
    for n, sequence in enumerate(given.sequences.tolist()):
        made[sequence].append(
            {
                "pi": given.logprobs[n].item(),
                "mu": given.behaviour_logprobs[n].item(),
                "before": given.proximal()[n].item(),
                "a": given.advantages[n].item(),
                "h": given.entropy[n].item(),
            }
        )
    return made


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def ppo(token: dict[str, float], low: float = 0.2, high: float = 0.2) -> float:
    return clipped(exp(token["pi"] - token["mu"]), token["a"], low, high)


def grpo(rows: Rows) -> float:
    return sum(sum(map(ppo, row)) / len(row) for row in rows) / len(rows)


def dr_grpo(rows: Rows) -> float:
    return sum(ppo(token) for row in rows for token in row) / (len(rows) * 100)


def dapo(rows: Rows) -> float:
    tokens = [token for row in rows for token in row]
    return sum(ppo(token, 0.2, 0.28) for token in tokens) / len(tokens)


def entropic_dapo(rows: Rows) -> float:
    tokens = [token for row in rows for token in row]
    return dapo(rows) - 0.1 * sum(token["h"] for token in tokens) / len(tokens)


def decoupled_ppo(rows: Rows) -> float:
    def one(token: dict[str, float]) -> float:
        weight = exp(token["before"] - token["mu"])
        kept = weight if weight <= 1.2 else 0.0
        return kept * clipped(exp(token["pi"] - token["before"]), token["a"], 0.2, 0.2)

    tokens = [token for row in rows for token in row]
    return sum(map(one, tokens)) / len(tokens)


def gspo(rows: Rows) -> float:
    def one(row: list[dict[str, float]]) -> float:
        ratio = exp(sum(token["pi"] - token["mu"] for token in row) / len(row))
        return clipped(ratio, row[0]["a"], 0.05, 0.06)

    return sum(map(one, rows)) / len(rows)


def cispo(rows: Rows) -> float:
    tokens = [token for row in rows for token in row]
    terms = [-min(exp(token["pi"] - token["mu"]), 1.1) * token["a"] * token["pi"] for token in tokens]
    return sum(terms) / len(tokens)


def reinforce(rows: Rows) -> float:
    tokens = [token for row in rows for token in row]
    terms = [-min(exp(token["before"] - token["mu"]), 1.1) * token["a"] * token["pi"] for token in tokens]
    return sum(terms) / len(tokens)


def rloo(rows: Rows) -> float:
    def one(row: list[dict[str, float]]) -> float:
        weight = min(exp(sum(token["before"] - token["mu"] for token in row)), 1.1)
        return -weight * row[0]["a"] * sum(token["pi"] for token in row)

    return sum(map(one, rows)) / len(rows)


def masked_sequences(rows: Rows) -> float:
    def one(row: list[dict[str, float]]) -> float:
        weight = exp(sum(token["before"] - token["mu"] for token in row))
        kept = weight if 0.8 <= weight <= 1.5 else 0.0
        return -kept * sum(token["a"] * token["pi"] for token in row)

    return sum(map(one, rows)) / sum(map(len, rows))


FORMULAS: dict[str, tuple[Callable[[Rows], float], LossSection]] = {
    "grpo": (grpo, GrpoConfig(entropy=0)),
    "dr_grpo": (dr_grpo, DrGrpoConfig(entropy=0, length=100)),
    "dapo": (dapo, DapoConfig(entropy=0)),
    "entropy": (entropic_dapo, DapoConfig(entropy=0.1)),
    "decoupled_ppo": (
        decoupled_ppo,
        DecoupledPpoConfig(entropy=0, correction=CorrectionConfig(level="token", how="mask", high=1.2)),
    ),
    "gspo": (gspo, GspoConfig(entropy=0, clip_low=0.05, clip_high=0.06)),
    "cispo": (cispo, CispoConfig(entropy=0, ratio_max=1.1)),
    "reinforce": (
        reinforce,
        ReinforceConfig(entropy=0, correction=CorrectionConfig(level="token", high=1.1)),
    ),
    "rloo": (rloo, RlooConfig(entropy=0, correction=CorrectionConfig(level="sequence", high=1.1))),
    "masked sequences": (
        masked_sequences,
        ReinforceConfig(
            entropy=0, correction=CorrectionConfig(level="sequence", how="mask", low=0.8, high=1.5)
        ),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("proximal", [True, False])
def test_value_is_that_of_the_formula(name: str, proximal: bool) -> None:
    formula, config = FORMULAS[name]
    given = GIVEN if proximal else replace(GIVEN, proximal_logprobs=None)
    assert compute(given, config).loss.item() == pytest.approx(formula(rows_of(given)), rel=1e-12)


@pytest.mark.parametrize("name", SECTIONS)
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    """CISPO holds its ratio without gradient: there the other policies move along, so that the ratio stays."""
    given, config = some_inputs([4, 1, 6, 2], seed=2), SECTIONS[name]
    start, before = given.logprobs.detach().clone(), given.proximal()

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        moved = replace(given, logprobs=logprobs, entropy=entropy)
        if isinstance(config, CispoConfig):
            shift = (logprobs - start).detach()
            behaviour, proximal = given.behaviour_logprobs + shift, before + shift
            moved = replace(moved, behaviour_logprobs=behaviour, proximal_logprobs=proximal)
        return compute(moved, config).loss

    assert torch.autograd.gradcheck(loss, (given.logprobs, given.entropy))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_policy_before_the_step_has_no_gradient(name: str) -> None:
    given = some_inputs([4, 1, 6, 2], seed=3)
    before = given.proximal().clone().requires_grad_()
    loss = compute(replace(given, proximal_logprobs=before), SECTIONS[name]).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert before.grad is None
