"""Sums over the groups of each environment, as the health checks get them."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from tests.trainer.support.toy import MemoryBatch, some_group

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.step.advantages import BatchAdvantages
from rolloutmq.trainer.step.lane_scores import lane_scores, merged
from rolloutmq.trainer.step.report import StepPart, StepReport

MOST = 1.7976931348623157e308


def of(env: str, name: str, scores: list[float]) -> Group:
    return replace(some_group(name, scores), env=env)


def test_sums_are_those_of_numpy_by_environment() -> None:
    groups = [of("b", "one", [0.0, 1.0, 1.0]), of("a", "two", [2.0, 2.0]), of("b", "three", [0.5, -1.0])]
    a, b = lane_scores(groups)
    assert (a.env, a.groups, a.flat, a.sequences, a.mean, a.m2) == ("a", 1, 1, 2, 2.0, 0.0)
    scores = np.array([0.0, 1.0, 1.0, 0.5, -1.0])
    assert (b.env, b.groups, b.flat, b.sequences) == ("b", 2, 0, 5)
    assert b.mean == pytest.approx(scores.mean())
    assert b.m2 == pytest.approx(((scores - scores.mean()) ** 2).sum())
    assert (b.low, b.at_low, b.high, b.at_high) == (-1.0, 1, 1.0, 2)
    assert b.tokens == sum(len(row) for group in (groups[0], groups[2]) for row in group["tokens"])
    x = [np.array([len(row) for row in group["tokens"]], float) for group in (groups[0], groups[2])]
    y = [np.array(group.scores, float) for group in (groups[0], groups[2])]
    assert b.sxx == pytest.approx(sum(((one - one.mean()) ** 2).sum() for one in x))
    assert b.sxy == pytest.approx(
        sum(((p - p.mean()) * (q - q.mean())).sum() for p, q in zip(x, y, strict=True))
    )


def test_groups_without_an_environment_are_left_out() -> None:
    assert lane_scores([some_group("g", [0.0, 1.0])]) == ()
    assert merged([]) == ()


def test_the_largest_scores_overflow_nothing() -> None:
    (found,) = lane_scores([of("a", "g", [MOST, -MOST, MOST]), of("a", "h", [MOST, MOST])])
    assert np.isfinite([found.mean, found.m2, found.sxx, found.syy, found.sxy]).all()


def test_the_event_of_several_ranks_has_the_sums_of_all() -> None:
    groups = [of("a", "one", [0.0, 1.0]), of("a", "two", [0.5, 1.0]), of("b", "three", [1.0, 3.0])]
    parts = [
        structs.replace(StepPart.of(MemoryBatch(1, own), BatchAdvantages()), staleness=(0,))
        for own in (groups[:1], groups[1:])
    ]
    event = StepReport(parts, PolicyVersion(0, 1), {"loss": 0.0}).event("r", 0.0, 0.0, 0.0)
    assert event.scores == lane_scores(groups)
