"""The offset of two clocks by round trips: within its bound, however long each way takes."""

import random

import pytest

from rolloutmq.services.process.clock_offset import KEPT, ClockOffset


def test_before_an_answer_nothing_is_known() -> None:
    clock = ClockOffset()
    assert clock.best is None
    clock.answered(10.0, 0.0, 0.1)  # a broker that does not say
    assert clock.best is None


@pytest.mark.parametrize("offset_s", [-86400.0, 0.0, 0.25, 3600.0])
def test_the_offset_is_within_its_bound(offset_s: float) -> None:
    rng, clock = random.Random(1), ClockOffset()
    for at in range(50):
        there_s, back_s = rng.expovariate(100), rng.expovariate(100)
        clock.answered(1e9 + at, 1e9 + at + there_s + offset_s, there_s + back_s)
        best = clock.best
        assert best is not None
        assert abs(best.offset_s - offset_s) <= best.error_s + 1e-6


def test_the_shortest_of_the_last_round_trips_counts() -> None:
    clock = ClockOffset()
    clock.answered(0.0, 5.0, 0.001)
    clock.answered(1.0, 6.5, 0.4)
    best = clock.best
    assert best is not None
    assert best.error_s == 0.0005
    for at in range(KEPT):  # the clocks drift: an old measurement is forgotten
        clock.answered(100.0 + at, 200.0 + at, 0.01)
    best = clock.best
    assert best is not None
    assert best.offset_s == pytest.approx(99.995)
