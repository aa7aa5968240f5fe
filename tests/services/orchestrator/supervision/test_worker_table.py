"""Names, counts and who goes first."""

from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import WorkerState, WorkerStatus
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView
from rolloutmq.services.orchestrator.supervision.worker_table import WorkerTable, env_of


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
    crew = WorkerTable("a").crew(seen, ready)
    assert crew == WorkerCounts(ready=1, starting=2, draining=1, failed=1)
    assert crew.current == 4


def test_who_is_being_ended_for_good_keeps_its_place() -> None:
    """Or another would be started into the same failure."""
    failing = ProcessView("a-0", Role.WORKER, Phase.STOPPING, 0.0, 0.0, 0, 0, "why", failing=True)
    assert WorkerTable("a").crew({"a-0": failing}, {}) == WorkerCounts(failed=1)


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
    assert roster.surplus(seen, ready, 5) == ["a-10", "a-3", "a-1", "a-2", "a-0"]
    assert roster.surplus(seen, ready, 1) == ["a-10"]
    assert roster.surplus(seen, ready, -1) == []


def test_who_fails_and_goes_already_is_not_replaced_by_a_good_one() -> None:
    roster = WorkerTable("a")
    going = ProcessView("a-0", Role.WORKER, Phase.STOPPING, 0.0, 0.0, 0, 0, "it fails", True)
    seen = {"a-0": going, **views(a_1=Phase.RUNNING, a_2=Phase.RUNNING)}
    ready = heard(WorkerState.READY, "a-1", "a-2")
    assert roster.crew(seen, ready).current == 3
    assert roster.surplus(seen, ready, 1) == []
    assert roster.surplus(seen, ready, 2) == ["a-2"]
