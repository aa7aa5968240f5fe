"""Names, counts and who goes first."""

from typing import Any

from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import WorkerState, WorkerStatus
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView
from rolloutmq.services.orchestrator.supervision.worker_table import WorkerTable, env_of, with_joined


def views(**phases: Phase) -> dict[str, ProcessView]:
    names = {key.replace("_", "-"): phase for key, phase in phases.items()}
    return {
        name: ProcessView(name, Role.WORKER, phase, 0.0, 0.0, 0, 0, "why", phase is Phase.FATAL)
        for name, phase in names.items()
    }


def heard(state: WorkerState, *names: str) -> dict[str, WorkerStatus]:
    return {
        name: WorkerStatus(
            worker=name,
            env="a",
            state=state,
            pid=1,
            host="",
            in_hand=0,
            produced=0,
            abandoned=0,
            blocked_s=0.0,
            silent_s=0.0,
            draining=False,
            error="",
        )
        for name in names
    }


def test_a_name_is_never_given_twice() -> None:
    roster = WorkerTable("a")
    assert [roster.take() for _ in range(3)] == ["a-0", "a-1", "a-2"]


def test_names_of_an_earlier_life_are_taken() -> None:
    assert WorkerTable("a", ["broker", "a-3", "a-11", "b-99", "a-b-70"]).take() == "a-12"


def test_an_environment_may_have_dashes() -> None:
    assert env_of("a-b-3") == "a-b"
    assert env_of("broker") == ""
    assert env_of("a-b") == ""


def test_everybody_is_counted_once_and_the_ended_not_at_all() -> None:
    seen = views(
        a_0=Phase.RUNNING,
        a_1=Phase.RUNNING,
        a_2=Phase.WAITING,
        a_3=Phase.STOPPING,
        a_4=Phase.ENDED,
        a_5=Phase.FATAL,
        b_0=Phase.RUNNING,
    )
    ready = {**heard(WorkerState.READY, "a-0"), **heard(WorkerState.STARTING, "a-1")}
    crew = WorkerTable("a").crew(seen, ready, 1.0)
    assert crew == WorkerCounts(ready=1, starting=2, draining=1, failed=1)
    assert crew.current == 3, "one that was given up is no capacity"


def test_who_is_being_ended_for_good_holds_its_process_until_it_has_ended() -> None:
    failing = ProcessView("a-0", Role.WORKER, Phase.STOPPING, 0.0, 0.0, 0, 0, "why", failing=True)
    assert WorkerTable("a").crew({"a-0": failing}, {}, 1.0) == WorkerCounts(draining=1, failed=1)


def test_who_is_being_ended_and_starts_again_keeps_its_place() -> None:
    """Or another would be started, and one of the two sent away again."""
    back = view("a-0", Phase.STOPPING, was_ready=True, ready_at=0.5, returns=True)
    assert WorkerTable("a").crew({"a-0": back}, {}, 1.0) == WorkerCounts(starting=1, restarting=1)
    assert WorkerTable("a").surplus({"a-0": back}, {}, 1) == []
    assert WorkerTable("a").surplus({"a-0": back}, {}, 0) == ["a-0"]


def view(name: str, phase: Phase = Phase.RUNNING, since: float = 0.0, **about: Any) -> ProcessView:
    return ProcessView(name, Role.WORKER, phase, since, 0.0, 0, 0, "", **about)


def test_those_that_were_ready_and_start_again_are_counted_apart() -> None:
    seen = {
        "a-0": view("a-0", Phase.WAITING, was_ready=True),
        "a-1": view("a-1", was_ready=True),
        "a-2": view("a-2"),
        "a-3": view("a-3", was_ready=True, ready_at=1.0),  # the broker was restarted and has not heard of it
        "a-4": view("a-4", Phase.FATAL, was_ready=True),
    }
    crew = WorkerTable("a").crew(seen, {}, 1.0)
    assert (crew.starting, crew.restarting, crew.failed) == (4, 2, 1)


def test_the_start_time_is_the_median_of_the_last_starts() -> None:
    table = WorkerTable("a")
    assert table.crew({"a-0": view("a-0", since=0.0)}, {}, 5.0).start_s == 0.0, "unknown"
    for number, took_s in enumerate([4.0, 60.0, 5.0, 6.0, 5.0]):
        name = f"a-{number}"
        seen = {name: view(name, since=100.0 * number, ready_at=100.0 * number + took_s, was_ready=True)}
        for _ in range(2):  # each start counts once
            crew = table.crew(seen, {}, 100.0 * number + 70.0)
    assert crew.start_s == 5.0
    assert WorkerTable("a", (), table.starts).crew({}, {}, 0.0).start_s == 5.0, "the next orchestrator knows"
    adopted = {"a-9": view("a-9", since=0.0, ready_at=0.1, adopted=True)}
    table.crew(adopted, {}, 1.0)
    assert table.starts[-1] == 5.0, "the start of an adopted process was not seen"


def test_starts_that_take_longer_now_count_at_once() -> None:
    table = WorkerTable("a", (), [5.0] * 9)
    hangs, young = view("a-0", since=0.0), view("a-1", since=58.0)
    assert table.crew({"a-0": hangs}, {}, 60.0).start_s == 60.0
    assert table.crew({"a-0": hangs, "a-1": young}, {}, 60.0).start_s == 5.0, "one hangs"


def test_the_useless_go_first_then_the_youngest() -> None:
    seen = views(
        a_0=Phase.RUNNING,
        a_1=Phase.RUNNING,
        a_2=Phase.RUNNING,
        a_3=Phase.WAITING,
        a_4=Phase.STOPPING,
        a_10=Phase.FATAL,
    )
    ready = heard(WorkerState.READY, "a-0", "a-2")
    roster = WorkerTable("a")
    assert roster.surplus(seen, ready, 0) == ["a-10", "a-3", "a-1", "a-2", "a-0"]
    assert roster.surplus(seen, ready, 3) == ["a-10", "a-3"]
    assert roster.surplus(seen, ready, 4) == ["a-10"], "nobody is missing in its place"
    assert roster.surplus(seen, ready, 5) == []


def test_of_the_given_up_as_many_stay_as_are_missing() -> None:
    seen = {f"a-{n}": view(f"a-{n}", Phase.FATAL, since=10.0 - n) for n in range(3)}
    assert WorkerTable("a").surplus(seen, {}, 1) == ["a-2", "a-1"]


def test_who_fails_and_goes_already_is_not_replaced_by_a_good_one() -> None:
    roster = WorkerTable("a")
    going = ProcessView("a-0", Role.WORKER, Phase.STOPPING, 0.0, 0.0, 0, 0, "it fails", True)
    seen = {"a-0": going, **views(a_1=Phase.RUNNING, a_2=Phase.RUNNING)}
    ready = heard(WorkerState.READY, "a-1", "a-2")
    assert roster.crew(seen, ready, 1.0).current == 2
    assert roster.surplus(seen, ready, 2) == []
    assert roster.surplus(seen, ready, 1) == ["a-2"]


def test_workers_that_joined_count_beside_the_others_until_they_drain() -> None:
    own = WorkerCounts(ready=2, starting=1)
    joined = {
        **heard(WorkerState.READY, "a-far.0"),
        **heard(WorkerState.STARTING, "a-far.1"),
        **heard(WorkerState.DRAINING, "a-far.2"),
    }
    assert with_joined(own, joined.values()) == WorkerCounts(ready=3, starting=2, joined=2)
