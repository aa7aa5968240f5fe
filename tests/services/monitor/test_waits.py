"""Every reason has its sentence."""

from collections.abc import Callable

import pytest

from rolloutmq.schemas.control import LaneStatus, Pressure, WorkerStatus
from rolloutmq.schemas.delivery import Wait
from rolloutmq.services.monitor import waits

MakePressure = Callable[..., Pressure]
MakeLane = Callable[..., LaneStatus]


def test_each_reason_of_the_protocol_is_explained() -> None:
    assert waits.TRAINER_WAITS.keys() | waits.WORKER_WAITS.keys() == set(Wait) - {Wait.NONE}


@pytest.mark.parametrize("reason", ["", "none"])
def test_nobody_waits(
    reason: str, make_pressure: MakePressure, make_worker: Callable[..., WorkerStatus]
) -> None:
    assert waits.explain(make_pressure(trainer_wait=reason, workers=(make_worker("w"),))) == "nobody waits"


def test_no_worker_is_said_where_nobody_waits(make_pressure: MakePressure) -> None:
    assert waits.explain(make_pressure()) == "no worker is ready"


def test_trainer_is_told_with_its_numbers(make_pressure: MakePressure) -> None:
    pressure = make_pressure(trainer_wait="no_batch", queued_sequences=120)

    assert "trainer waits: 120 of 256 sequences are queued" in waits.explain(pressure)


def test_several_environments_are_told_apart(make_pressure: MakePressure, make_lane: MakeLane) -> None:
    lanes = (make_lane("a", wait="stale_guard"), make_lane("b"))

    text = waits.explain(make_pressure(lanes=lanes))

    assert text.startswith("a workers wait: ")
    assert "b workers" not in text


def test_unknown_reason_is_shown_as_it_came(make_pressure: MakePressure, make_lane: MakeLane) -> None:
    text = waits.explain(make_pressure(trainer_wait="journal_slow", lanes=(make_lane(wait="arena_full"),)))

    assert text == "trainer waits: journal_slow; workers wait: arena_full"
