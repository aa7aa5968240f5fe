import random
from statistics import fmean, stdev

import pytest

from rolloutmq.services.orchestrator.autoscaling.settlements import KEPT, LATE, Settlements


def eaten(settlements: Settlements, *awake_s: float, sequences: int = 64) -> Settlements:
    """Add exact settlements of one batch each."""
    for seconds in awake_s:
        settlements = settlements.added(sequences, seconds, 0.0)
    return settlements


def test_nothing_is_known_before_the_first_settlement() -> None:
    assert Settlements().pace is None
    assert Settlements().now(100.0) is None


def test_the_pace_is_sequences_over_time_without_waits() -> None:
    assert eaten(Settlements(), *[1.6] * 30).pace == pytest.approx(40.0)
    assert len(eaten(Settlements(), *[1.6] * 200).last) == KEPT


def test_a_change_shows_within_a_few_seconds_and_the_old_pace_is_forgotten() -> None:
    before = eaten(Settlements(), *[1.6] * 30)
    assert eaten(before, *[0.8] * 6).pace == pytest.approx(80.0, rel=0.1)
    assert eaten(before, *[3.2] * 3).pace == pytest.approx(20.0, rel=0.1)


def test_a_large_change_shows_after_two_settlements() -> None:
    before = eaten(Settlements(), *[1.6] * 30)
    assert eaten(before, 0.8, 0.8).pace == pytest.approx(80.0)
    assert eaten(before, 1.2, 1.2).pace == pytest.approx(40.0, rel=0.1), "two settlements vary by so much"


def test_a_step_of_long_batches_shows_at_the_next_one() -> None:
    assert eaten(Settlements(), *[30.0] * 10, 15.0, sequences=1200).pace == pytest.approx(80.0)


def test_one_long_settlement_is_a_pause_once_the_next_one_is_short() -> None:
    paused = eaten(Settlements(), *[1.6] * 30, 76.6)
    assert paused.pace == pytest.approx(64 / 76.6), "until then it may be a slower trainer"
    assert eaten(paused, 1.6).pace == pytest.approx(40.0)
    assert eaten(paused, 76.6).pace == pytest.approx(64 / 76.6)


def test_a_late_settlement_lowers_the_pace_before_it_comes() -> None:
    usual = eaten(Settlements(), *[1.6] * 30)
    assert usual.now(LATE * 1.6) == pytest.approx(40.0)
    assert usual.now(20.0) == pytest.approx(64 / (1.6 + 20.0 - LATE * 1.6))


def test_batches_of_unlike_size_are_no_change_of_pace() -> None:
    rng = random.Random(0)
    settlements = Settlements()
    paces: list[float] = []
    for place in range(400):
        settlements = settlements.added(round(480 * rng.uniform(0.65, 1.35)), 12.0, 0.0)
        if place > 20:
            paces.append(settlements.pace or 0.0)
    assert fmean(paces) == pytest.approx(40.0, rel=0.03)
    assert stdev(paces) < 2.5
    assert eaten(settlements, *[6.0] * 6, sequences=480).pace == pytest.approx(80.0, rel=0.15), "that is one"


def test_the_grain_of_the_samples_is_no_change() -> None:
    """A batch of 1.64 s is seen after one second or two."""
    settlements = Settlements()
    for place in range(60):
        seconds = 1.0 if place % 3 == 0 else 2.0
        settlements = settlements.added(64, seconds, 1.0)
        if place > 20:
            assert settlements.pace == pytest.approx(38.4, rel=0.12)


def test_the_error_of_the_pace_is_that_of_chance() -> None:
    assert eaten(Settlements(), *[1.6] * 30).error == pytest.approx(0.0, abs=1e-9)
    chance = random.Random(3)
    unlike = eaten(Settlements(), *(chance.uniform(0.8, 2.4) for _ in range(60)))
    assert 0.04 < unlike.error < 0.12
