"""Scores from ratings: each combination, missing ratings, weights, and scales."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.services.rewards.combine import Combination, Scale, combined, scaled

NO = float("nan")
ALL: tuple[Combination, ...] = ("mean", "median", "trimmed_mean", "minimum", "majority")


def score(row: list[float], weights: list[float], how: Combination, **settings: float) -> float:
    return float(combined(np.array([row]), np.array(weights), how, **settings)[0])


@pytest.mark.parametrize(
    ("row", "weights", "how", "expected"),
    [
        ([1.0, 2.0, 6.0], [1, 1, 1], "mean", 3.0),
        ([1.0, 2.0, 6.0], [2, 1, 1], "mean", 2.5),
        ([1.0, NO, 6.0], [1, 5, 1], "mean", 3.5),
        ([1.0, 2.0, 6.0], [1, 1, 1], "median", 2.0),
        ([6.0, 1.0, 2.0, 3.0], [1, 1, 1, 1], "median", 2.5),
        ([1.0, NO, 6.0], [1, 1, 1], "median", 3.5),
        ([1.0, 2.0, 6.0], [1, 1, 4], "median", 6.0),
        ([1.0, 2.0, 6.0], [1, 1, 2], "median", 4.0),
        ([1.0, 2.0, 6.0], [1, 0, 0], "median", 1.0),
        ([0.0, 1.0, 2.0, 100.0], [1, 1, 1, 1], "trimmed_mean", 1.5),
        ([0.0, 1.0, 2.0, 100.0], [1, 3, 1, 1], "trimmed_mean", 1.25),
        ([NO, 1.0, 2.0, 100.0], [1, 1, 1, 1], "trimmed_mean", 103 / 3),
        ([3.0, -2.0, NO], [1, 1, 1], "minimum", -2.0),
        ([3.0, -2.0, NO], [1, 0, 1], "minimum", 3.0),
        ([1.0, 1.0, 0.0], [1, 1, 1], "majority", 1.0),
        ([1.0, 1.0, 0.0], [1, 1, 3], "majority", 0.0),
        ([1.0, NO, 0.0], [1, 1, 1], "majority", 0.5),
        ([1.0, 0.1, 0.0], [0.3, 0.1, 0.2], "majority", 0.5),
    ],
)
def test_scores(row: list[float], weights: list[float], how: Combination, expected: float) -> None:
    assert score(row, weights, how) == pytest.approx(expected)


@pytest.mark.parametrize("how", ALL)
def test_no_rating_is_no_score(how: Combination) -> None:
    assert np.isnan(score([NO, NO], [1, 1], how))
    assert np.isnan(score([NO, 3.0], [1, 0], how))
    assert combined(np.empty((0, 2)), np.ones(2), how).shape == (0,)


def test_votes_count_from_the_given_rating() -> None:
    assert score([0.4, 0.4, -1.0], [1, 1, 1], "majority", pass_at=0.4) == 1.0
    assert score([0.4, 0.4, -1.0], [1, 1, 1], "majority", pass_at=0.5) == 0.0


@pytest.mark.parametrize("how", ["mean", "median", "trimmed_mean", "minimum"])
@given(
    row=st.lists(st.floats(-1e308, 1e308), min_size=1, max_size=6),
    weights=st.lists(st.floats(1e-6, 1e300), min_size=6, max_size=6),
)
@settings(deadline=None)
def test_a_score_lies_between_its_ratings(how: Combination, row: list[float], weights: list[float]) -> None:
    assert min(row) <= score(row, weights[: len(row)], how) <= max(row)


def test_an_adversary_moves_the_mean_and_not_the_median() -> None:
    truth = np.linspace(0, 1, 9)
    ratings = np.stack([truth, truth, -3 * truth], axis=1)
    assert np.corrcoef(combined(ratings, np.ones(3), "mean"), truth)[0, 1] == pytest.approx(-1)
    assert np.corrcoef(combined(ratings, np.ones(3), "median"), truth)[0, 1] == pytest.approx(1)
    ratings[:, 2] = -truth  # two honest raters outweigh one that subtracts as much as each of them adds
    assert np.corrcoef(combined(ratings, np.ones(3), "mean"), truth)[0, 1] == pytest.approx(1)


def test_ranks_are_parts_of_the_window_below() -> None:
    window = np.array([[1.0], [2.0], [2.0], [NO], [5.0]])
    found = scaled(np.array([[0.0], [1.0], [2.0], [3.0], [9.0], [NO]]), window, "rank")[:, 0]
    assert found.tolist()[:5] == [0.0, 0.125, 0.5, 0.75, 1.0]
    assert np.isnan(found[5])


def test_zscores_are_those_of_the_window() -> None:
    window = np.random.default_rng(1).normal(5, 3, (100, 2))
    found = scaled(window, window, "zscore")
    assert found.mean(axis=0) == pytest.approx([0, 0], abs=1e-12)
    assert found.std(axis=0) == pytest.approx([1, 1])


@pytest.mark.parametrize("scale", ["rank", "zscore"])
def test_scales_without_information_are_defined(scale: Scale) -> None:
    same = np.full((5, 1), 0.1)
    middle = {"rank": 0.5, "zscore": 0.0}[scale]
    assert scaled(same, same, scale)[:, 0].tolist() == [middle] * 5
    nothing = np.full((3, 1), NO)
    assert np.isnan(scaled(nothing, nothing, scale)).all()
    assert np.isfinite(scaled(np.array([[1e308], [-1e308]]), np.array([[1e308], [-1e308]]), scale)).all()
    assert scaled(np.empty((0, 2)), np.empty((0, 2)), scale).shape == (0, 2)


@pytest.mark.parametrize(("scale", "middle"), [("rank", 0.5), ("zscore", 0.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_is_no_difference(scale: Scale, middle: float, sign: int) -> None:
    noise = np.full((64, 1), 0.3)
    noise[::2] = 0.1 + 0.2
    assert 0 < np.ptp(noise) < 1e-16
    assert np.unique(scaled(sign * noise, sign * noise, scale)).tolist() == [middle]
    apart = noise * np.linspace(1, 1.01, 64)[:, None]  # a thousandth is no rounding
    assert len(np.unique(scaled(apart, apart, scale))) > 60


def test_a_rank_does_not_depend_on_how_far_an_extreme_rating_is() -> None:
    window = np.array([[0.1], [0.2], [0.3], [1e12]])
    assert scaled(window, window, "rank")[:, 0].tolist() == [0.125, 0.375, 0.625, 0.875]


def test_without_a_scale_ratings_stay_as_they_are() -> None:
    ratings = np.array([[1.0, NO]])
    assert scaled(ratings, ratings, "none") is ratings
