"""Waits add up over the lives of a broker, and the newest word of a life counts once."""

from collections.abc import Callable

from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.services.monitor.report.waited import LIVES_LIMIT, WaitedLives

MakePressure = Callable[..., Pressure]


def lives(*told: Pressure) -> WaitedLives:
    found = WaitedLives()
    for one in told:
        found.take(one)
    return found


def test_each_life_counts_as_it_was_last_told(make_pressure: MakePressure) -> None:
    first = [make_pressure(starved_s=at, trainer_waits_s={"no_batch": at}) for at in (1.0, 4.0)]
    second = make_pressure(epoch=2, starved_s=2.0, producer_waits_s={"stale_guard": 3.0, "no_batch": 1.0})
    found = lives(*first, second).sum()
    assert found.starved_s == 6.0
    assert found.waits_s == {"no_batch": 5.0, "stale_guard": 3.0}


def test_lives_of_a_record_are_joined_and_the_present_one_counts_once(make_pressure: MakePressure) -> None:
    recorded = lives(make_pressure(starved_s=4.0), make_pressure(epoch=2, starved_s=1.0))
    found = lives(make_pressure(epoch=2, starved_s=2.0))
    found.join(recorded)
    assert found.sum().starved_s == 6.0
    frozen = found.copy()
    found.take(make_pressure(epoch=3, starved_s=1.0))
    assert (frozen.sum().starved_s, found.sum().starved_s) == (6.0, 7.0)


def test_many_lives_are_bounded_and_none_is_lost(make_pressure: MakePressure) -> None:
    many = 3 * LIVES_LIMIT
    found = lives(*(make_pressure(epoch=epoch, starved_s=1.0) for epoch in range(1, many + 1)))
    assert len(found._lives) == LIVES_LIMIT
    assert found.sum().starved_s == many
