"""When given-up workers are replaced, with a clock of our own."""

from typing import Any

import pytest

from rolloutmq.schemas.process import Role
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView
from rolloutmq.services.orchestrator.supervision.replacement import (
    FIRST_S,
    GIVEN_UP,
    LONGEST_S,
    Replacement,
)

STABLE_S = 10.0


def view(number: int, phase: Phase, since: float = 0.0, **about: Any) -> ProcessView:
    return ProcessView(f"e-{number}", Role.WORKER, phase, since, 0.0, 0, 0, "", **about)


def fatal(number: int, since: float, born: float = 0.0) -> ProcessView:
    return view(number, Phase.FATAL, since, born=born)


def ready(number: int, at: float = 0.0, born: float = 0.0) -> ProcessView:
    return view(number, Phase.RUNNING, born, born=born, ready_at=at, was_ready=True)


@pytest.fixture
def replacement() -> Replacement:
    return Replacement(STABLE_S)


def test_beside_ready_workers_the_given_up_are_replaced_after_a_pause(replacement: Replacement) -> None:
    crew = [ready(0), fatal(1, 100.0), fatal(2, 103.0)]
    assert replacement.look(crew, 103.0, proven=True) == []
    assert replacement.due == {"e-1": 103.0 + FIRST_S, "e-2": 103.0 + FIRST_S}
    assert replacement.look(crew, 112.9, proven=True) == []
    assert replacement.look(crew, 113.0, proven=True) == ["e-1", "e-2"]
    assert replacement.room(WorkerCounts(ready=1), 103.0) is None


def test_before_any_worker_has_worked_nobody_is_replaced(replacement: Replacement) -> None:
    crew = [ready(0), fatal(1, 100.0)]
    assert replacement.look(crew, 10_000.0, proven=False) == []
    assert replacement.due == {}
    assert replacement.room(WorkerCounts(), 10_000.0) is None


def test_if_none_is_left_one_is_tried_and_the_others_follow_once_it_is_ready(
    replacement: Replacement,
) -> None:
    crew = [fatal(0, 100.0), fatal(1, 101.0), fatal(2, 102.0)]
    assert replacement.look(crew, 105.0, proven=True) == []
    room = replacement.room(WorkerCounts(failed=3), 105.0)
    assert room is not None
    assert (room.workers, room.why) == (1, GIVEN_UP)
    assert room.details == "given_up: workers were given up and none is ready; one is tried in 7 s"
    assert replacement.due == {"e-0": 112.0}
    assert replacement.pauses(111.9)
    assert not replacement.pauses(112.0)
    assert replacement.look(crew, 112.0, proven=True) == ["e-0"]
    canary = view(3, Phase.RUNNING, 112.0, born=112.0)
    assert replacement.look([*crew[1:], canary], 500.0, proven=True) == []
    room = replacement.room(WorkerCounts(starting=1, failed=2), 500.0)
    assert room is not None
    assert room.workers == 1
    assert replacement.look([*crew[1:], ready(3, 500.0, 112.0)], 500.0, proven=True) == ["e-1", "e-2"]
    assert replacement.room(WorkerCounts(ready=1), 500.0) is None


def test_the_pause_holds_although_its_workers_are_forgotten(replacement: Replacement) -> None:
    """Those beyond a smaller target are; the next one is tried no earlier for that."""
    replacement.look([fatal(0, 100.0)], 100.0, proven=True)
    replacement.look([], 101.0, proven=True)
    assert replacement.pauses(101.0)
    assert not replacement.pauses(100.0 + FIRST_S)


def test_a_worker_that_is_being_ended_and_starts_again_is_the_canary(replacement: Replacement) -> None:
    crew = [fatal(0, 100.0), view(1, Phase.STOPPING, 150.0, returns=True)]
    assert replacement.look(crew, 150.0, proven=True) == []


def test_nobody_is_sent_away_for_the_failures_of_others(replacement: Replacement) -> None:
    crew = [fatal(0, 100.0), view(1, Phase.WAITING), view(2, Phase.WAITING)]
    assert replacement.look(crew, 200.0, proven=True) == []
    room = replacement.room(WorkerCounts(starting=2, failed=1), 200.0)
    assert room is not None
    assert room.workers == 2


def test_the_pause_doubles_while_replacements_fail_and_starts_anew_after_a_stable_one(
    replacement: Replacement,
) -> None:
    now, born, pauses = 100.0, 0.0, []
    for number in range(9):
        crew = [fatal(number, now, born)]
        replacement.look(crew, now, proven=True)
        (due,) = replacement.due.values()
        pauses.append(due - now)
        assert replacement.look(crew, due, proven=True) == [f"e-{number}"]
        replacement.look([], due, proven=True)
        born = due
        now = due + 5.0
    assert pauses[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert pauses[-1] == LONGEST_S
    replacement.look([ready(9, now, born)], now + STABLE_S, proven=True)
    now += 50.0
    replacement.look([fatal(9, now, born)], now, proven=True)
    assert replacement.due == {"e-9": now + FIRST_S}


def test_those_that_fail_together_are_one_failure(replacement: Replacement) -> None:
    crew = [fatal(number, 100.0 + number) for number in range(8)]
    for seen in range(1, 9):
        replacement.look([*crew[:seen], ready(9)], 100.0 + seen, proven=True)
    assert set(replacement.due.values()) == {107.0 + FIRST_S}


def test_old_workers_that_stay_well_do_not_make_failing_replacements_look_well(
    replacement: Replacement,
) -> None:
    replacement.look([ready(0), fatal(1, 100.0)], 100.0, proven=True)
    replacement.look([ready(0), view(2, Phase.RUNNING, 110.0, born=110.0)], 111.0, proven=True)
    replacement.look([ready(0), fatal(2, 120.0, 110.0)], 120.0, proven=True)
    assert replacement.due == {"e-2": 120.0 + 2 * FIRST_S}


def test_the_next_orchestrator_continues_the_pause(replacement: Replacement) -> None:
    """Those that it adopts were there before the failure: that they are ready is no recovery."""
    replacement.look([ready(0), fatal(1, 100.0)], 100.0, proven=True)
    replacement.look([ready(0), fatal(2, 120.0, born=110.0)], 120.0, proven=True)
    assert (replacement.failed_at, replacement.pause_s) == (120.0, 2 * FIRST_S)
    resumed = Replacement(STABLE_S)
    resumed.resume(replacement.failed_at, replacement.pause_s)
    adopted = ready(0, at=121.0)
    crew = [adopted, fatal(2, 120.0, born=110.0)]
    assert resumed.look(crew, 121.0 + STABLE_S, proven=True) == []
    assert resumed.due == {"e-2": 140.0}
    assert resumed.look(crew, 140.0, proven=True) == ["e-2"]
    older = Replacement(STABLE_S)
    older.resume(120.0, 2 * FIRST_S)
    assert older.look([adopted, fatal(1, 100.0)], 121.0, proven=True) == []
    assert older.due == {"e-1": 140.0}, (
        "the pause counts from the last failure, also of one that was replaced"
    )
    new = Replacement(STABLE_S)
    new.resume(None, 0.0)
    assert (new.failed_at, new.pause_s) == (None, 0.0)


def test_an_ordered_restart_ends_the_pause_without_a_ready_worker(replacement: Replacement) -> None:
    crew = [fatal(0, 100.0), fatal(1, 101.0)]
    assert replacement.look(crew, 101.0, proven=True) == []
    assert replacement.pauses(102.0)
    replacement.retry(102.0)
    assert not replacement.pauses(102.0)
    assert replacement.look(crew[1:], 102.0, proven=True) == ["e-1"], (
        "its place is free for the one that is tried"
    )
    again = [fatal(2, 103.0, born=102.0)]
    assert replacement.look(again, 103.0, proven=True) == []
    assert replacement.due == {"e-2": 103.0 + 2 * FIRST_S}


def test_an_ordered_restart_ends_also_a_pause_that_has_grown(replacement: Replacement) -> None:
    replacement.look([fatal(0, 100.0)], 100.0, proven=True)
    replacement.look([fatal(1, 115.0, born=110.0)], 115.0, proven=True)
    assert replacement.pauses(115.0 + FIRST_S)
    replacement.retry(116.0)
    assert not replacement.pauses(116.0)


def test_an_ordered_restart_beside_ready_workers_leaves_the_others_their_pause(
    replacement: Replacement,
) -> None:
    crew = [ready(0), fatal(1, 100.0)]
    replacement.look(crew, 100.0, proven=True)
    replacement.retry(101.0)
    assert replacement.look(crew, 101.0, proven=True) == []
    assert replacement.due == {"e-1": 100.0 + FIRST_S}
