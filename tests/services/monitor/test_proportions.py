"""Shares that differ are told from shares that do not, and few groups from both."""

import math
import random

import pytest

from rolloutmq.services.monitor.proportions import ALPHA, SMALL_H, Verdict, chi2_tail, compare


@pytest.mark.parametrize(
    ("df", "at"), [(1, 10.828), (2, 13.816), (3, 16.266), (4, 18.467), (5, 20.515), (9, 27.877), (30, 59.703)]
)
def test_tail_of_chi_square_is_that_of_the_tables(df: int, at: float) -> None:
    assert chi2_tail(at, df) == pytest.approx(0.001, rel=1e-3)
    assert chi2_tail(0.0, df) == 1.0
    assert 0.0 <= chi2_tail(1e6, df) < 1e-300


def test_small_difference_is_the_published_one() -> None:
    found = compare([500, 600], [1000, 1000])
    assert found.h == pytest.approx(2 * math.asin(math.sqrt(0.6)) - 2 * math.asin(math.sqrt(0.5)))
    assert (found.verdict, found.h > SMALL_H) == (Verdict.BIASED, True)
    # The pooled two-proportion test: z**2 is chi-square with one degree of freedom.
    z = 0.1 / math.sqrt(0.55 * 0.45 * 2 / 1000)
    assert found.p == pytest.approx(math.erfc(z / math.sqrt(2)))


@pytest.mark.parametrize(
    ("hits", "totals", "verdict"),
    [
        ([], [], Verdict.TOO_FEW),
        ([0, 0], [0, 0], Verdict.TOO_FEW),
        ([7], [9], Verdict.ONE_PART),
        ([7, 0], [9, 0], Verdict.ONE_PART),
        ([10, 0], [10, 10], Verdict.BIASED),
        ([9, 0], [9, 9], Verdict.TOO_FEW),
        ([10_000, 9_996], [10_000, 10_000], Verdict.TOO_FEW),
        ([900, 100, 900], [1000, 1000, 1000], Verdict.BIASED),
        ([400, 1], [1000, 2], Verdict.TOO_FEW),
        ([50, 50], [50, 50], Verdict.NONE_SHOWS),
        ([0, 0], [50, 50], Verdict.NONE_SHOWS),
        ([50_000, 52_000], [100_000, 100_000], Verdict.NONE_SHOWS),
    ],
)
def test_verdicts(hits: list[int], totals: list[int], verdict: Verdict) -> None:
    assert compare(hits, totals).verdict is verdict


def test_more_than_chance_alone_is_no_bias_where_it_is_tiny() -> None:
    found = compare([50_000, 52_000], [100_000, 100_000])
    assert found.p is not None
    assert found.p < ALPHA
    assert found.h < SMALL_H


def test_false_alarms_are_as_rare_as_they_are_said_to_be() -> None:
    dice = random.Random(20)
    tests, alarms, tight = 4000, 0, 0
    for _ in range(tests):
        share = dice.uniform(0.2, 0.8)
        found = compare([sum(dice.random() < share for _ in range(40)) for _ in range(4)], [40] * 4)
        alarms += found.verdict is Verdict.BIASED
        tight += found.p is not None and found.p < 0.05
    assert alarms <= 3 * ALPHA * tests
    # The test is no formality: at 5 % it is wrong about one time in twenty.
    assert 0.035 * tests < tight < 0.065 * tests
