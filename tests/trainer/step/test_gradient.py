"""Gradient of a rank with fewer passes than the others; `test_ranks` compares whole steps."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.trainer.support.toy import run_config, some_group
from tests.trainer.test_ranks import Told

from rolloutmq.trainer.policy.model import Policy, build_policy
from rolloutmq.trainer.step.collate import Example, MicroBatch, collate
from rolloutmq.trainer.step.gradient import leave_gradient
from rolloutmq.trainer.step.logprobs import LogprobScorer

CONFIG = run_config()


def passes() -> list[MicroBatch]:
    group = some_group("g", [0.0, 1.0])
    return collate([Example(group, np.ones(group.tokens, np.float32))], 1000)


def gradient(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("own", [[], passes()])
def test_a_rank_that_waits_for_the_others_shows_that_it_is_at_work(own: Sequence[MicroBatch]) -> None:
    """Its lease would end before a long step of another rank does."""
    policy = build_policy(CONFIG.model, 0)
    scorer, calls = LogprobScorer(policy, 1 << 20), []
    leave_gradient(own, 1, CONFIG.trainer, scorer, Told(fellow=3), lambda: calls.append(gradient(policy)))
    assert len(calls) == 3
    for name, tensor in calls[-1].items():
        assert torch.equal(tensor, calls[0][name] if own else torch.zeros_like(tensor)), name
