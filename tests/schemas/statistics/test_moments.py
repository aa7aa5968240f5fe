"""Moments: equal to numpy's in any order, decayed by their definition, and never spoiled by a group."""

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import GroupHeader, PolicyVersion, RewardSummary

Scores = NDArray[np.float64]


def summary(scores: Scores) -> RewardSummary:
    mean = float(scores.mean())
    return RewardSummary(mean, float(scores.min()), float(scores.max()), float(((scores - mean) ** 2).sum()))


def of(groups: list[Scores], half_life: float | None = None) -> Moments:
    found = Moments()
    for group in groups:
        found = found.after(summary(group), len(group), half_life)
    return found


def merged_in_pairs(parts: list[Moments]) -> Moments:
    """Merge neighbours until one is left: another tree than one after the other."""
    while len(parts) > 1:
        last = parts[-1:] if len(parts) % 2 else []
        parts = [one.merged(other) for one, other in zip(parts[::2], parts[1::2], strict=False)] + last
    return parts[0]


def assert_those_of(found: Moments, scores: Scores) -> None:
    scale = float(np.abs(scores).max()) or 1.0
    assert found.weight == len(scores)
    assert (found.low, found.high) == (scores.min(), scores.max())
    assert abs(found.mean - scores.mean()) <= 1e-9 * scale
    assert found.deviation == pytest.approx(scores.std(), rel=1e-9, abs=1e-12 * scale)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_a_million_scores_have_the_moments_of_numpy_in_any_order(offset: float) -> None:
    rng = np.random.default_rng(7)
    scores = rng.exponential(3.0, 1_000_000) + offset
    cuts = np.sort(rng.choice(np.arange(1, len(scores)), 60_000, replace=False))
    groups = np.split(scores, cuts)
    assert len({len(group) for group in groups}) > 50
    in_order = of(groups)
    shuffled = of([groups[i] for i in rng.permutation(len(groups))])
    tree = merged_in_pairs([of([group]) for group in groups])
    workers = [of(groups[i::7]) for i in rng.permutation(7)]
    for found in (in_order, shuffled, tree, merged_in_pairs(workers)):
        assert_those_of(found, scores)
        assert (found.groups, found.left_out) == (len(groups), 0)


def test_a_large_mean_costs_no_digits() -> None:
    """The classic example of cancellation: the sample variance is 30 exactly."""
    scores = [1e9 + each for each in (4.0, 7.0, 13.0, 16.0)]
    found = of([np.array([each]) for each in scores])
    assert found.m2 / (found.weight - 1) == 30.0


NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)
GROUPS = st.lists(st.lists(NUMBERS, min_size=1, max_size=8).map(np.array), min_size=1, max_size=12)


@given(GROUPS, st.randoms(use_true_random=False))
def test_neither_the_order_nor_the_tree_matters(groups: list[Scores], rng: random.Random) -> None:
    scores = np.concatenate(groups)
    other = list(groups)
    rng.shuffle(other)
    cut = len(other) // 2
    for found in (
        of(groups),
        of(other),
        merged_in_pairs([of([group]) for group in other]),
        of(other[:cut]).merged(of(other[cut:])),
    ):
        scale = float(np.abs(scores).max()) or 1.0
        assert abs(found.mean - scores.mean()) <= 1e-9 * scale
        assert abs(found.m2 - ((scores - scores.mean()) ** 2).sum()) <= 1e-9 * scale * scale * len(scores)
        assert (found.groups, found.weight) == (len(groups), len(scores))
        assert found.low <= found.mean <= found.high


def test_nothing_is_invented_before_the_first_group() -> None:
    none = Moments()
    one = of([np.array([3.0, 5.0])])
    assert none.merged(one) == one.merged(none) == one
    assert (one.mean, one.deviation, none.deviation, none.spread) == (4.0, 1.0, 0.0, False)


@given(GROUPS, st.floats(1.0, 50.0))
def test_a_sequence_loses_half_its_weight_in_a_half_life(groups: list[Scores], half_life: float) -> None:
    """By the definition: a sequence accepted k groups ago weighs 2^(-k/h)."""
    found = of(groups, half_life)
    ages = np.concatenate([np.full(len(g), len(groups) - 1 - k) for k, g in enumerate(groups)])
    scores, weights = np.concatenate(groups), 0.5 ** (ages / half_life)
    mean = np.average(scores, weights=weights)
    scale = float(np.abs(scores).max()) or 1.0
    assert found.weight == pytest.approx(weights.sum(), rel=1e-9)
    assert abs(found.mean - mean) <= 1e-9 * scale
    assert abs(found.m2 - (weights * (scores - mean) ** 2).sum()) <= 1e-9 * scale * scale * len(scores)
    assert found.groups == len(groups)


def test_with_a_half_life_the_order_counts() -> None:
    early, late = np.array([0.0, 1.0]), np.array([10.0, 11.0])
    assert of([early, late], 1).mean == pytest.approx((0.5 * 1 + 1.0 * 21) / 3)
    assert of([late, early], 1).mean == pytest.approx((0.5 * 21 + 1.0 * 1) / 3)


def test_an_extreme_value_has_half_its_distance_left_after_a_half_life() -> None:
    """Groups at the mean leave the mean where it is, so that only the decay moves the range."""
    around = [np.array([-8.0, 8.0])] + [np.array([0.0])] * 3
    highs = [of(around[: count + 1], 1).high for count in range(4)]
    assert highs == [8.0, 4.0, 2.0, 1.0]


def test_drift_is_followed_and_without_a_half_life_it_is_not() -> None:
    rng = np.random.default_rng(3)
    groups = [rng.normal(0, 1, 8) for _ in range(300)] + [rng.normal(50, 5, 8) for _ in range(300)]
    followed, kept = of(groups, 20), of(groups)
    assert followed.mean == pytest.approx(50, abs=2)
    assert followed.deviation == pytest.approx(5, rel=0.2)
    assert kept.mean == pytest.approx(25, abs=1)
    assert kept.deviation == pytest.approx(25.3, abs=1)


GOOD = summary(np.array([0.0, 1.0]))


@pytest.mark.parametrize(
    "bad",
    [
        RewardSummary(math.nan, 0.0, 1.0, 0.5),
        RewardSummary(0.5, -math.inf, 1.0, 0.5),
        RewardSummary(0.5, 0.0, math.inf, 0.5),
        RewardSummary(0.5, 0.0, 1.0, math.inf),
        RewardSummary(0.5, 0.0, 1.0, math.nan),
        RewardSummary(0.5, 0.0, 1.0, -0.5),
        RewardSummary(0.5, 1.0, 0.0, 0.5),
        RewardSummary(2.0, 0.0, 1.0, 0.5),
        RewardSummary(0.5, 0.0, 1.0, 0.6),  # two scores within 0 and 1 deviate by .5 at most
        RewardSummary(1e200, 1e200, 1e200, 0.0),  # finite, but not with the groups before
    ],
)
def test_a_group_that_would_spoil_the_moments_is_left_out_and_counted(bad: RewardSummary) -> None:
    before = Moments().after(GOOD, 2)
    found = before.after(bad, 2)
    assert found == msgspec.structs.replace(before, left_out=1)
    after = found.after(GOOD, 2)
    assert after == msgspec.structs.replace(before.after(GOOD, 2), left_out=1)
    assert after.finite


def test_a_group_left_out_is_no_group_of_the_decay() -> None:
    bad = RewardSummary(math.nan, 0.0, 1.0, 0.5)
    with_it = Moments().after(GOOD, 2, 3).after(bad, 2, 3).after(GOOD, 2, 3)
    assert msgspec.structs.replace(with_it, left_out=0) == Moments().after(GOOD, 2, 3).after(GOOD, 2, 3)


ANY = st.sampled_from(
    [0.0, -0.0, 0.25, 0.5, 1.0, 1.0 + 2**-52, -3.0, 1e-200, 1e154, 1e200, math.inf, math.nan]
)


@given(
    st.lists(st.tuples(st.builds(RewardSummary, ANY, ANY, ANY, ANY), st.integers(-1, 3)), max_size=9),
    st.lists(NUMBERS, min_size=1, max_size=8).map(np.array),
    st.sampled_from([None, 1, 3.5, 1e300]),
)
@settings(deadline=None)
def test_several_groups_at_once_are_merged_one_after_the_other(
    groups: list[tuple[RewardSummary, int]], honest: Scores, half_life: float | None
) -> None:
    """To the last bit: the loop of `after_all` against `faded` and `merged`."""
    groups = [*groups, (summary(honest), len(honest)), *groups, (GOOD, 2)]
    found = expected = Moments()
    for group, rows in groups:
        one = Moments().after(group, rows)
        merged = expected.faded(half_life).merged(one)
        kept = one.groups == 1 and math.isfinite(merged.m2)
        expected = merged if kept else msgspec.structs.replace(expected, left_out=expected.left_out + 1)
        found = found.after(group, rows, half_life)
        assert repr(found) == repr(expected)
    at_once = Moments().after_all([head(group, rows) for group, rows in groups], half_life)
    assert repr(at_once) == repr(expected)


def head(group: RewardSummary, rows: int) -> GroupHeader:
    version = PolicyVersion()
    return GroupHeader(1, 1, "g", "0" * 16, 1, 1, 0, rows, rows, version, version, 0.0, 0.0, group)


@given(st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=1, max_size=6), NUMBERS)
def test_any_group_of_finite_scores_is_counted_or_left_out(scores: list[float], other: float) -> None:
    rows = len(scores)
    group = Group.build("g", tokens=[[1]] * rows, mask=[[1]] * rows, scores=scores)
    start = Moments().after(RewardSummary(other, other, other, 0.0), 1)
    for half_life in (None, 1, 1000):
        found = start.after(group.rewards(), rows, half_life)
        assert found.groups + found.left_out == 2
        assert found.finite
        assert found.low <= found.mean <= found.high


@given(st.lists(st.floats(-1e9, 1e9, width=32), min_size=1, max_size=16))
def test_an_honest_group_is_always_counted(scores: list[float]) -> None:
    rows = len(scores)
    group = Group.build("g", tokens=[[1]] * rows, mask=[[1]] * rows, scores=scores)
    assert Moments().after(group.rewards(), rows).groups == 1


def test_scores_that_differ_by_rounding_have_no_spread() -> None:
    assert not of([np.array([0.3, 0.3, 0.30000001])]).spread
    assert not of([np.full(9, 0.1)]).spread
    assert of([np.array([1e-20, 3e-20])]).spread
    sparse = of([np.zeros(16)] * 5000 + [np.eye(16)[0]])
    assert sparse.spread


def test_they_travel_and_numbers_that_cannot_be_are_refused() -> None:
    found = of([np.array([3.0, 5.0])], 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Moments) == found
    for bad in ([-1], [1, -1.0], [1, 1.0, 0.0, -1.0], [1, math.nan]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Moments)


@pytest.mark.parametrize(("half_life", "groups"), [(1, 400), (4, 1600)])
def test_moments_recover_from_an_absurd_score_only_with_a_half_life(half_life: int, groups: int) -> None:
    """As `docs/guides/losses.md` says, by about 400 half-lives."""
    rng = np.random.default_rng(3)
    ordinary = [rng.random(8) for _ in range(groups)]
    spoiled = of([*ordinary[:100], np.array([0.5, 1e60])])
    faded = kept = spoiled
    for group in ordinary:
        faded = faded.after(summary(group), len(group), half_life)
        kept = kept.after(summary(group), len(group))
    assert kept.deviation > 1e50
    assert 0.1 < faded.deviation < 1.0
    assert 0.0 <= faded.low <= faded.high < 1.5
