"""Every loss learns: a policy over six answers finds the best one, with groups two versions stale."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.trainer.losses.tokens import SECTIONS, compute
from torch import Tensor

from rolloutmq.schemas.config.losses import LossSection
from rolloutmq.trainer.losses.inputs import LossInputs, StepSize
from rolloutmq.trainer.step.advantages import GroupVerdict, judge

ANSWERS, LENGTH, GROUP, LAG = 6, 3, 32, 2
WORTH = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 1.0])


@dataclass(frozen=True)
class Rollout:
    """A group of `GROUP` sequences of `LENGTH` answers."""

    version: int
    answers: Tensor
    logprobs: Tensor
    scores: Tensor


def roll_out(logits: Tensor, version: int, chance: torch.Generator) -> Rollout:
    spread = logits.detach().log_softmax(-1)
    answers = torch.multinomial(spread.exp(), GROUP * LENGTH, replacement=True, generator=chance)
    scores = WORTH[answers].view(GROUP, LENGTH).mean(1)
    return Rollout(version, answers, spread[answers], scores)


def inputs_of(logits: Tensor, group: Rollout, version: int, config: LossSection) -> LossInputs | None:
    judged = judge(group.scores.numpy(), config)
    if judged.verdict is not GroupVerdict.USABLE:
        return None
    spread = logits.log_softmax(-1)
    sequences = torch.arange(GROUP).repeat_interleave(LENGTH)
    return LossInputs(
        logprobs=spread[group.answers],
        entropy=-(spread.exp() * spread).sum(-1).expand(GROUP * LENGTH),
        behaviour_logprobs=group.logprobs,
        advantages=torch.from_numpy(np.repeat(judged.advantages, LENGTH)),
        sequences=sequences,
        sequence_count=GROUP,
        step=StepSize(GROUP * LENGTH, GROUP),
        staleness=torch.full_like(sequences, version - group.version),
        ref_logprobs=torch.full((GROUP * LENGTH,), -np.log(ANSWERS)),
    )


def learn(config: LossSection, steps: int = 60) -> float:
    """Return the share of the best answer after some steps of Adam."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.zeros(ANSWERS, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.1)
    late: deque[Rollout] = deque()
    for version in range(steps):
        late.append(roll_out(logits, version, chance))
        if len(late) <= LAG:
            continue
        given = inputs_of(logits, late.popleft(), version, config)
        if given is None:
            continue
        adam.zero_grad()
        compute(given, config).loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    return float(logits.detach().softmax(-1)[-1])


@pytest.mark.parametrize("name", SECTIONS)
def test_it_finds_the_best_answer(name: str) -> None:
    config = SECTIONS[name].model_copy(update={"entropy": 0.0, "kl": 0.0})
    assert learn(config) > 0.6


def test_a_kl_holds_the_policy_at_its_reference() -> None:
    free = SECTIONS["dapo"].model_copy(update={"entropy": 0.0})
    assert learn(free) > 0.6
    assert learn(free.model_copy(update={"kl": 5.0})) < 0.4
