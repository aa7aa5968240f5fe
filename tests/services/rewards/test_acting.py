"""What a low agreement causes: marks, outliers and the weights in force."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rolloutmq.schemas.config.rewards import AgreementConfig
from rolloutmq.services.rewards.acting import LOW, judge, low_problem, numbers_of, release, weights_in_force
from rolloutmq.services.rewards.agreement import alpha

TRUTH = np.random.default_rng(1).random(100)
AGREED = np.stack([TRUTH, TRUTH, TRUTH], axis=1)
ADVERSARY = np.stack([TRUTH, TRUTH, -3 * TRUTH], axis=1)
DOWN = AgreementConfig(act="down_weight", low=0.5)


def test_agreement_marks_nothing_and_clears_marks() -> None:
    found = judge(AGREED, LOW | 4, DOWN)
    assert (found.marks, found.before, found.is_low) == (0, LOW | 4, False)
    assert found.changes(LOW)
    assert found.changes(4)
    assert not found.changes(1)
    assert found.without == ()


def near_chance() -> NDArray[np.float64]:
    """Return two raters whose alpha is a little above 0, as that of unrelated ones often is."""
    rng = np.random.default_rng(0)
    while not 0 < alpha(found := rng.random((64, 2))).value < 0.04:
        pass
    return found


def test_a_low_agreement_ends_only_clearly_above_its_limit() -> None:
    """At the default limit of 0 a part of the limit is no margin."""
    config, window = AgreementConfig(), near_chance()
    assert not judge(window, 0, config).is_low
    lasting = judge(window, LOW, config)
    assert lasting.is_low
    assert "of the raters was below 0, and has not come back to 0.05" in low_problem(lasting, config)
    assert not judge(AGREED, LOW, config).is_low


@pytest.mark.parametrize(
    ("low", "ends"), [(0.0, 0.05), (0.8, 0.88), (-0.9, -0.81), (0.98, 0.99), (1.0, 1.0), (-1.0, -0.9)]
)
def test_the_margin_is_never_nothing_and_stays_in_reach(low: float, ends: float) -> None:
    assert release(low) == pytest.approx(ends)


def test_the_outlier_is_marked_by_down_weighting_only() -> None:
    assert judge(ADVERSARY, 0, DOWN).marks == LOW | 1 << 2
    assert judge(ADVERSARY, 0, AgreementConfig(low=0.5)).marks == LOW
    assert judge(ADVERSARY, 0, AgreementConfig(low=0.5, act="hold")).marks == LOW


def test_noise_is_low_without_an_outlier() -> None:
    found = judge(np.random.default_rng(2).random((100, 3)), 0, DOWN)
    assert (found.marks, found.is_low) == (LOW, True)


@pytest.mark.parametrize("before", [0, LOW | 4])
def test_too_few_or_equal_ratings_change_nothing(before: int) -> None:
    assert judge(ADVERSARY[:63], before, DOWN).marks == before
    assert judge(np.ones((100, 3)), before, DOWN).marks == before
    assert judge(np.empty((0, 3)), before, DOWN).marks == before
    assert judge(ADVERSARY[:64], before, DOWN).marks == LOW | 4


def test_few_answers_make_no_outlier() -> None:
    """`min_items` also holds for the answers that are left without a rater."""
    rare = np.full(100, np.nan)
    rare[:2] = (1 - TRUTH)[:2]
    window = np.stack([TRUTH, 1 - TRUTH, rare], axis=1)
    found = judge(window, 0, DOWN)
    assert found.marks == LOW
    assert np.isnan(found.without).tolist() == [True, True, False]
    assert judge(window, 0, AgreementConfig(act="down_weight", low=0.5, min_items=2)).marks == LOW | 1


def test_weights_come_from_the_configured_ones() -> None:
    weights = np.array([1.0, 2.0, 4.0])
    assert weights_in_force(weights, LOW | 4, 0.25).tolist() == [1.0, 2.0, 1.0]
    assert weights_in_force(weights, LOW, 0.0).tolist() == [1.0, 2.0, 4.0]
    only = np.array([0.0, 0.0, 4.0])
    assert weights_in_force(only, 4, 0.0).tolist() == [0.0, 0.0, 4.0]  # nothing would be left


def test_numbers_name_each_rater_and_leave_out_what_is_undefined() -> None:
    numbers = numbers_of(judge(ADVERSARY, 0, DOWN), ("a", "b", "c"), DOWN)
    assert numbers["alpha"] < 0.5 == numbers["low"]
    assert numbers["alpha_without.c"] == pytest.approx(1.0)
    assert numbers["items"] == 100
    assert "alpha" not in numbers_of(judge(np.ones((3, 3)), 0, DOWN), ("a", "b", "c"), DOWN)
