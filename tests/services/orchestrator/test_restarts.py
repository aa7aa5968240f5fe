"""An operator's restart ends one process, once."""

from collections.abc import Mapping

import pytest

from rolloutmq.schemas.files import RestartOutcome
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.schemas.wire.control import RestartWorker
from rolloutmq.services.orchestrator.restarts import KEPT_S, Restarts
from rolloutmq.services.orchestrator.supervision.core import (
    KILL_LADDER,
    Ladder,
    Phase,
    ProcessView,
    drain_ladder,
)

ME = ProcessIdentity(name="w-0", role=Role.WORKER, pid=7, start_ticks=1, boot_id="b", marker="t/w-0")
DRAIN = drain_ladder(1.0, 30.0, 5.0)
LIVES = frozenset({Phase.RUNNING, Phase.STOPPING})


class FakeProcesses:
    """One process in a phase."""

    def __init__(self, phase: Phase, name: str = "w-0") -> None:
        self.phase = phase
        self.name = name
        self.done: list[tuple[str, Ladder | str]] = []

    def views(self) -> Mapping[str, ProcessView]:
        return {self.name: ProcessView(self.name, Role.WORKER, self.phase, 0.0, 0.0, 0, 0, "")}

    def identity(self, name: str) -> ProcessIdentity | None:
        return ME if name == self.name and self.phase in LIVES else None

    def retire(self, name: str, ladder: Ladder, reason: str) -> None:
        assert reason.endswith("by an operator")
        self.done.append((name, ladder))

    def forget(self, name: str) -> None:
        self.done.append((name, "forgotten"))


def order(pid: int = 0, *, at_once: bool = False, worker: str = "w-0", name: str = "o1") -> RestartWorker:
    return RestartWorker(worker=worker, order=name, pid=pid, at_once=at_once)


def restarts(*fleets: FakeProcesses) -> Restarts:
    return Restarts([(one, lambda _: DRAIN) for one in fleets])


@pytest.mark.parametrize(
    ("phase", "at_once", "done", "text"),
    [
        (Phase.RUNNING, False, DRAIN, "draining"),
        (Phase.STOPPING, False, DRAIN, "draining"),
        (Phase.RUNNING, True, KILL_LADDER, "killed"),
        (Phase.STOPPING, True, KILL_LADDER, "killed"),
        (Phase.WAITING, False, KILL_LADDER, "waited for its next start"),
        (Phase.FATAL, False, "forgotten", "was given up"),
    ],
)
def test_each_phase_is_ended_in_its_way_and_once(
    phase: Phase, at_once: bool, done: Ladder | str, text: str
) -> None:
    processes = FakeProcesses(phase)
    made = restarts(FakeProcesses(Phase.RUNNING, "other"), processes)
    asked = order(ME.pid if phase in LIVES else 0, at_once=at_once)
    for now in (0.0, 1.0):
        assert made.look([asked], now) == {
            "o1": RestartOutcome(done=True, text=f"{text}; another takes its place")
        }
    assert processes.done == [("w-0", done)]


@pytest.mark.parametrize(
    ("phase", "asked", "text"),
    [
        (Phase.RUNNING, order(ME.pid + 1), f"is process {ME.pid} by now, not {ME.pid + 1}; try again"),
        (Phase.RUNNING, order(), f"is process {ME.pid} by now, not 0; try again"),
        (Phase.ENDED, order(), "no such worker or engine; `rolloutmq workers` lists the workers"),
        (Phase.RUNNING, order(worker="x"), "no such worker or engine; `rolloutmq workers` lists the workers"),
    ],
)
def test_no_other_process_is_ended(phase: Phase, asked: RestartWorker, text: str) -> None:
    processes = FakeProcesses(phase)
    assert restarts(processes).look([asked], 0.0) == {"o1": RestartOutcome(done=False, text=text)}
    assert processes.done == []


def test_a_carried_out_order_is_passed_on_once_and_a_refused_one_never() -> None:
    told: list[str] = []
    made = Restarts([(FakeProcesses(Phase.FATAL), lambda _: DRAIN)], told.append)
    for _ in range(2):
        made.look([order(), order(ME.pid, name="o2")], 0.0)
    assert told == ["w-0"]


def test_outcomes_are_forgotten_after_a_while() -> None:
    made = restarts(FakeProcesses(Phase.FATAL))
    assert list(made.look([order()], 0.0)) == ["o1"]
    assert made.look([], KEPT_S) == {}
