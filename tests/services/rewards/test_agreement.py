"""Krippendorff's alpha against published values, against pairs counted one by one, and at its edges."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rolloutmq.services.rewards.agreement import (
    Metric,
    alpha,
    alphas_without,
    disagreement,
    outliers,
)

NO = float("nan")
METRICS: tuple[Metric, ...] = ("nominal", "ordinal", "interval", "ratio")
FOUR_RATERS = np.array(
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, NO, NO, NO],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NO, 3],
        [NO, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NO],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NO],
    ]
).T
THREE_RATERS = np.array(
    [
        [NO, NO, NO, NO, NO, 3, 4, 1, 2, 1, 1, 3, 3, NO, 3],
        [1, NO, 2, 1, 3, 3, 4, 3, NO, NO, NO, NO, NO, NO, NO],
        [NO, NO, 2, 1, 3, 4, 4, NO, 2, 1, 1, 3, 3, NO, 4],
    ]
).T
TWO_RATERS = np.array([[0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]]).T


@pytest.mark.parametrize(
    ("table", "metric", "published"),
    [
        (FOUR_RATERS, "nominal", 0.743421),
        (FOUR_RATERS, "ordinal", 0.815388),
        (FOUR_RATERS, "interval", 0.849107),
        (FOUR_RATERS, "ratio", 0.797403),
        (THREE_RATERS, "nominal", 0.691358),
        (THREE_RATERS, "interval", 0.810845),
        (TWO_RATERS, "nominal", 0.095238),
    ],
)
def test_alpha_is_the_published_value(table: NDArray[np.float64], metric: Metric, published: float) -> None:
    found = alpha(table, metric)
    assert found.is_defined
    assert found.value == pytest.approx(published, abs=1e-6)


def test_alpha_counts_only_ratings_that_have_a_partner() -> None:
    found = alpha(FOUR_RATERS)
    assert (found.items, found.ratings) == (11, 40)  # one item of twelve has a single rating


def by_pairs(table: NDArray[np.float64], metric: Metric) -> float:
    """Alpha by the definition: every pair is looked at, one by one."""
    units = [[float(v) for v in row if not np.isnan(v)] for row in table]
    units = [unit for unit in units if len(unit) >= 2]
    pooled = sorted(value for unit in units for value in unit)

    def difference(one: float, other: float) -> float:
        low, high = min(one, other), max(one, other)
        match metric:
            case "nominal":
                return float(one != other)
            case "interval":
                return one - other
            case "ratio":
                return (one - other) / (one + other) if one + other else 0.0
            case "ordinal":
                between = sum(low <= value <= high for value in pooled)
                return between - (pooled.count(low) + pooled.count(high)) / 2 if low != high else 0.0

    observed = sum(
        difference(a, b) ** 2 / (len(unit) - 1) for unit in units for a, b in permutations(unit, 2)
    )
    expected = sum(difference(a, b) ** 2 for a, b in permutations(pooled, 2)) / (len(pooled) - 1)
    return 1 - observed / expected


TABLES = st.integers(2, 5).flatmap(
    lambda raters: st.lists(
        st.lists(
            st.one_of(st.just(NO), st.sampled_from([0.0, 0.25, 1.0, 2.0, 7.0]), st.floats(0, 100, width=16)),
            min_size=raters,
            max_size=raters,
        ),
        min_size=1,
        max_size=9,
    )
)


@pytest.mark.parametrize("metric", METRICS)
@given(rows=TABLES)
@settings(deadline=None, max_examples=150)
def test_alpha_is_that_of_its_definition(metric: Metric, rows: list[list[float]]) -> None:
    table = np.array(rows)
    found = alpha(table, metric)
    each = disagreement(table, metric)
    if not found.is_defined:
        paired = [row[~np.isnan(row)] for row in table if (~np.isnan(row)).sum() >= 2]
        assert not paired or len(set(np.concatenate(paired))) == 1
        assert np.isnan(found.value)
        assert np.isnan(each).all()
        return
    assert found.value == pytest.approx(by_pairs(table, metric), abs=1e-9)
    counts = (~np.isnan(table)).sum(axis=1)
    assert np.isnan(each[counts < 2]).all()
    weights = np.where(counts >= 2, counts, 0)
    assert 1 - np.nansum(weights * each) / weights.sum() == pytest.approx(found.value, abs=1e-9)


@given(rows=TABLES, shift=st.floats(-1e3, 1e3), scale=st.floats(0.01, 1e3))
@settings(deadline=None)
def test_interval_alpha_knows_no_unit_and_no_origin(
    rows: list[list[float]], shift: float, scale: float
) -> None:
    table = np.array(rows)
    paired = table[(~np.isnan(table)).sum(axis=1) >= 2]
    if not paired.size or np.nanmax(paired) - np.nanmin(paired) < 1e-2:
        return
    assert alpha(table * scale + shift).value == pytest.approx(alpha(table).value, abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ([[1.0, 1.0], [1.0, 1.0]], "all ratings are equal"),
        ([[0.1, 0.1, 0.1], [0.1, 0.1, NO]], "all ratings are equal"),
        ([[1.0, NO], [NO, 2.0]], "no item has two ratings"),
        (np.empty((0, 3)), "no item has two ratings"),
        (np.empty((4, 0)), "no item has two ratings"),
    ],
)
def test_alpha_without_any_difference_is_undefined(metric: Metric, table: object, problem: str) -> None:
    found = alpha(table, metric)  # type: ignore[arg-type]
    assert np.isnan(found.value)
    assert (found.is_defined, found.problem) == (False, problem)
    assert outliers(table, 0.5, metric) == ()  # type: ignore[arg-type]


def test_bad_ratings_are_refused() -> None:
    assert "at least 0" in alpha([[1.0, -1.0], [2.0, 2.0]], "ratio").problem
    with pytest.raises(ValueError, match="finite or NaN"):
        alpha([[1.0, float("inf")]])
    for one_row in (alpha, disagreement, alphas_without):
        with pytest.raises(ValueError, match=r"must be \[items\]\[raters\]"):
            one_row([1.0, 2.0])


def test_the_largest_floats_overflow_nothing() -> None:
    assert alpha([[1e308, 1e308], [-1e308, -1e308], [0.0, 1e308]]).value == pytest.approx(
        alpha([[1.0, 1.0], [-1.0, -1.0], [0.0, 1.0]]).value
    )
    assert alpha([[5e-324, 5e-324], [0.0, 0.0]]).value == pytest.approx(1.0)


def test_ratio_in_blocks_is_ratio_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.random.default_rng(1).random((200, 3))
    at_once = alpha(table, "ratio").value
    monkeypatch.setattr("rolloutmq.services.rewards.agreement._BLOCK_VALUES", 1000)
    assert alpha(table, "ratio").value == pytest.approx(at_once, abs=1e-12)
    assert at_once == pytest.approx(by_pairs(table, "ratio"), abs=1e-9)


def test_the_outlier_is_the_rater_without_whom_alpha_is_highest() -> None:
    truth = np.random.default_rng(2).random(64)
    table = np.stack([truth, truth + 0.01, -3 * truth], axis=1)
    without = alphas_without(table)
    assert int(np.nanargmax(without)) == 2
    assert without[2] > 0.99
    assert outliers(table, 0.5) == (2,)
    assert outliers(table[:, :2], 0.5) == ()  # they agree


def test_two_of_five_outliers_are_found_one_after_the_other() -> None:
    rng = np.random.default_rng(3)
    truth = rng.random(128)
    table = np.stack([truth, rng.random(128), truth, rng.random(128) + 5, truth], axis=1)
    assert set(outliers(table, 0.9)) == {1, 3}


def test_of_raters_that_all_disagree_none_is_the_outlier() -> None:
    noise = np.random.default_rng(4).random((128, 4))
    assert alpha(noise).value < 0.3
    assert outliers(noise, 0.9) == ()
    assert outliers(noise[:, :2], 0.9) == ()  # of two raters neither is


def test_a_rater_who_shares_few_items_makes_no_outlier_of_another() -> None:
    """Without the honest rater two items are left, on which the adversary and the rare rater agree by chance."""
    rng = np.random.default_rng(0)
    honest, adversary = rng.random(100), rng.random(100)
    adversary = 1 - honest + 0.1 * adversary
    rare = np.full(100, NO)
    rare[:2] = adversary[:2]
    table = np.stack([honest, adversary, rare], axis=1)
    assert alphas_without(table)[0] > 0.9
    assert np.isnan(alphas_without(table, min_items=3)).tolist() == [True, True, False]
    assert np.isfinite(alphas_without(table, min_items=2)).all()
    assert outliers(table, 0.0, min_items=64) == ()


def test_ratio_counts_pairs_of_different_values_once() -> None:
    """Raters who give few different ratings cost next to nothing, however many answers there are."""
    table = np.random.default_rng(6).integers(0, 5, (300_000, 3)).astype(float)
    # A table of all pairs of 900,000 values would need terabytes.
    assert alpha(table, "ratio").value == pytest.approx(0.0, abs=0.01)


def test_continuous_ratings_take_linear_time() -> None:
    small, large = np.random.default_rng(5).random((2, 400_000, 5))[:, :, :]
    alpha(small[:1000])
    # A table of all pairs of 2,000,000 values would need terabytes, and a loop over them hours.
    assert alpha(large).value == pytest.approx(0.0, abs=0.01)
