"""Each check of health: what it finds, what it lets pass, and its numbers against another way to compute them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rolloutmq.schemas.wire.health import LaneScores, bounded
from rolloutmq.services.rewards import health
from rolloutmq.services.rewards.health import correlation


def lane(groups: list[tuple[list[float], list[float]]]) -> LaneScores:
    """Return the sums over groups of lengths and scores, one by one."""
    found: LaneScores | None = None
    for lengths, scores in groups:
        x, y = np.array(lengths, float), np.array(scores, float)
        low, high = float(y.min()), float(y.max())
        one = LaneScores(
            env="math",
            groups=1,
            flat=int(low == high),
            sequences=len(y),
            mean=float(y.mean()),
            m2=float(((y - y.mean()) ** 2).sum()),
            low=low,
            high=high,
            at_low=int((y == low).sum()),
            at_high=int((y == high).sum()),
            tokens=int(x.sum()),
            sxx=float(((x - x.mean()) ** 2).sum()),
            syy=float(((y - y.mean()) ** 2).sum()),
            sxy=float(((x - x.mean()) * (y - y.mean())).sum()),
        )
        found = one if found is None else found.merged(one)
    assert found is not None
    return found


def scored(*groups: list[float]) -> LaneScores:
    return lane([([1.0] * len(scores), scores) for scores in groups])


SCORES = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=6)


@given(groups=SCORES)
@settings(deadline=None)
def test_merged_sums_are_those_of_all_scores(groups: list[list[float]]) -> None:
    found, everything = scored(*groups), np.concatenate([np.array(group) for group in groups])
    assert found.sequences == len(everything)
    assert found.mean == pytest.approx(everything.mean(), abs=1e-9)
    assert found.m2 == pytest.approx(((everything - everything.mean()) ** 2).sum(), abs=1e-6)
    assert (found.low, found.high) == (everything.min(), everything.max())
    assert found.at_high == (everything == everything.max()).sum()
    assert found.at_low == (everything == everything.min()).sum()
    assert found.flat == sum(len(set(group)) == 1 for group in groups)


def test_sums_of_the_largest_floats_stay_finite() -> None:
    most = 1.7976931348623157e308
    high = replace(scored([1.0]), mean=most, low=most, high=most)
    low = replace(scored([1.0]), mean=-most, low=-most, high=-most)
    merged = high.merged(low)
    assert (merged.mean, merged.m2) == (0.0, most)
    assert (merged.low, merged.at_low, merged.high, merged.at_high) == (-most, 1, most, 1)
    assert replace(high, syy=most, sxy=-most).merged(replace(low, syy=most, sxy=most)).sxy == 0.0
    assert bounded(float("nan")) == 0.0


@pytest.mark.parametrize("count", range(2, 60))
def test_equal_scores_have_no_deviation_however_many_are_merged(count: int) -> None:
    found = scored(*[[0.3] * 16] * count)
    assert (found.mean, found.m2) == (0.3, 0.0)
    # Windows merge sums of steps, of different sizes.
    twice = found.merged(scored(*[[0.3] * 16] * 3)).merged(found)
    assert (twice.mean, twice.m2) == (0.3, 0.0)


def test_collapse_is_of_groups_that_teach_nothing() -> None:
    flat, alive = [1.0, 1.0], [0.0, 1.0]
    found = health.collapse(scored(*[flat] * 19, alive), 0.95)
    assert found is not None
    assert found.numbers["flat"] == 0.95
    assert "within each group are equal" in found.problem
    assert health.collapse(scored(*[flat] * 18, alive, alive), 0.95) is None
    everything = health.collapse(scored(flat, flat), 0.95)
    assert everything is not None
    assert "all scores are 1" in everything.problem


def test_collapse_is_of_the_groups_that_are_not_solved() -> None:
    right, wrong = [1.0, 1.0], [0.0, 0.0]
    found = health.collapse(scored(right, right, right, wrong), 0.95, solved=3.0)
    assert found is not None
    assert found.problem.startswith("100% of the groups that are not solved teach nothing")
    assert found.numbers == {"flat": 1.0, "groups": 1.0, "mean": 0.75}
    assert health.collapse(scored(right, right), 0.95, solved=2.0) is None


def test_solved_are_tasks_whose_answers_pass() -> None:
    right, wrong, both = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]
    found = health.solved(scored(*[right] * 19, both), 0.95, passes=True)
    assert found is not None
    assert found.problem == "98% of the answers pass with the score 1: these tasks are learned"
    assert health.solved(scored(*[right] * 19, both), 0.95, passes=False) is None
    assert health.solved(scored(*[right] * 17, both, both, both), 0.95, passes=True) is None
    assert health.solved_groups(scored(right, right, wrong, both), passes=False) == 0.0
    assert health.solved_groups(scored(right, right), passes=True) == 2.0
    # Of three groups of equal scores two at most have another score than the highest, as far as the sums tell.
    assert health.solved_groups(scored(right, right, wrong), passes=True) == 2.0
    assert health.solved_groups(scored(wrong, wrong, both), passes=True) == 0.0


@given(
    groups=st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=9
    )
)
@settings(deadline=None)
def test_no_group_is_called_solved_that_is_not(groups: list[list[float]]) -> None:
    found = scored(*groups)
    right = sum(set(scores) == {found.high} for scores in groups)
    assert health.solved_groups(found, passes=True) <= right + 1e-9


def test_saturation_is_at_either_end() -> None:
    top = health.saturation(scored([1.0] * 19 + [0.5]), 0.95)
    assert top is not None
    assert "95% of the scores are the highest, 1" in top.problem
    bottom = health.saturation(scored([0.0] * 19 + [0.5]), 0.95)
    assert bottom is not None
    assert "lowest" in bottom.problem
    assert health.saturation(scored([1.0] * 18 + [0.5, 0.5]), 0.95) is None
    assert health.saturation(scored([1.0] * 20), 0.95) is None  # a collapse


def test_explosion_is_growth() -> None:
    before = scored([0.0, 1.0])
    found = health.explosion(scored([0.0, 10.0]), before, 10.0)
    assert found is not None
    assert found.numbers == {"before": 0.5, "now": 5.0, "factor": 10.0}
    assert health.explosion(scored([0.0, 9.0]), before, 10.0) is None
    shifted = health.explosion(scored([50.0, 50.5]), before, 10.0)
    assert shifted is not None
    assert "magnitude" in shifted.problem
    assert health.explosion(scored([0.0, 9.0]), scored([0.0, 0.0]), 10.0) is None  # from nothing


def test_rounding_is_neither_a_deviation_nor_a_fall() -> None:
    score = float(np.float32(0.3))
    rounded = scored([score, float(np.nextafter(np.float32(0.3), np.float32(1)))])
    assert rounded.m2 > 0
    assert health.explosion(scored([score, 0.2]), rounded, 10.0) is None
    assert health.explosion(scored([score, 0.2]), scored([score, score + 1e-3]), 10.0) is not None
    assert health.drift(scored([score] * 4), scored([score + 1e-8] * 4), 1.0) is None
    assert health.drift(scored([score] * 4), scored([score + 1e-3] * 4), 1.0) is not None


def test_drift_is_a_fall_beyond_the_noise() -> None:
    rng = np.random.default_rng(1)

    def around(mean: float, groups: int = 40) -> LaneScores:
        return scored(*(rng.normal(mean, 0.1, (groups, 8)).tolist()))

    found = health.drift(around(0.5), around(0.7), 1.0)
    assert found is not None
    assert found.numbers["deviations"] == pytest.approx(2.0, rel=0.2)
    assert health.drift(around(0.7), around(0.5), 1.0) is None  # it learns
    assert health.drift(around(0.65), around(0.7), 1.0) is None
    assert health.drift(around(0.55, groups=2), around(0.7, groups=2), 0.5) is None  # of so few it is noise
    sharp = health.drift(scored([0.0] * 4), scored([1.0] * 4), 1.0)
    assert sharp is not None
    assert np.isfinite(sharp.numbers["deviations"])


def test_the_correlation_is_pearsons_within_groups() -> None:
    rng = np.random.default_rng(2)
    groups = []
    for _ in range(30):
        lengths = rng.normal(100, 10, 8)
        groups.append((lengths.tolist(), (lengths / 20 + rng.normal(0, 0.5, 8) - rng.random() * 50).tolist()))
    found = correlation(lane(groups))
    assert found is not None
    x = np.concatenate([np.array(lengths) - np.mean(lengths) for lengths, _ in groups])
    y = np.concatenate([np.array(scores) - np.mean(scores) for _, scores in groups])
    assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)
    assert found.low < found.value < found.high
    # Fisher's interval is symmetric in atanh, with 240 - 30 - 1 degrees of freedom
    assert np.arctanh(found.high) - np.arctanh(found.low) == pytest.approx(
        2 * 1.959964 / np.sqrt(208), abs=1e-6
    )


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, truth, hits, trials = np.random.default_rng(3), 0.6, 0, 400
    for _ in range(trials):
        groups = []
        for _ in range(10):
            x = rng.normal(0, 1, 6)
            y = truth * x + np.sqrt(1 - truth**2) * rng.normal(0, 1, 6)
            groups.append(((x + rng.normal(0, 9)).tolist(), (y + rng.normal(0, 9)).tolist()))
        found = correlation(lane(groups))
        assert found is not None
        hits += found.low <= truth <= found.high
    assert 0.92 < hits / trials < 0.98


def test_length_bias_needs_the_whole_interval() -> None:
    rng = np.random.default_rng(4)

    def of(strength: float, groups: int) -> LaneScores:
        rows = []
        for _ in range(groups):
            x = rng.normal(100, 10, 8)
            rows.append((x.tolist(), (strength * x + rng.normal(0, 10, 8)).tolist()))
        return lane(rows)

    found = health.length_bias(of(-2.0, 40), 0.5)
    assert found is not None
    assert found.problem.startswith("shorter answers score higher")
    assert health.length_bias(of(2.0, 40), 0.5) is not None
    assert health.length_bias(of(0.3, 40), 0.5) is None
    few = lane([([1.0, 2.0, 3.0, 5.0], [1.0, 3.0, 2.0, 4.0])])
    assert health.length_bias(few, 0.0) is None  # of four answers the interval is wide
    assert health.length_bias(scored([0.0, 1.0, 0.0, 1.0]), 0.5) is None  # all of one length
    exact = health.length_bias(lane([([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])]), 0.5)
    assert exact is not None
    assert exact.numbers["correlation"] == pytest.approx(1.0)


def steps(count: int = 4, **figures: float) -> list[dict[str, Any]]:
    return [figures] * count


def test_figures_of_the_trainer() -> None:
    assert health.clipping(steps(clipped=0.5, ratio=1.2), 0.5) is not None
    assert health.clipping(steps(clipped=0.4), 0.5) is None
    assert health.clipping(steps(loss=1.0), 0.5) is None  # a loss without a clip
    assert health.precision(steps(kl=0.06, staleness_max=0.0), 0.05) is not None
    assert health.precision(steps(kl=0.06, staleness_max=1.0), 0.05) is None  # stale groups may differ
    assert health.precision(steps(kl=0.05, staleness_max=0.0), 0.05) is None


def test_rejection_is_of_groups_that_the_trainer_cannot_use() -> None:
    found = health.rejection(40, 4.0, 0.1)
    assert found is not None
    assert found.numbers == {"rejected": 4.0, "groups": 40.0}
    assert health.rejection(40, 3.6, 0.1) is None
    assert health.rejection(0, 0.0, 0.0) is None
