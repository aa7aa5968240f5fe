"""The end of a run says what it waits for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.services.monitor.conftest import make_worker

from rolloutmq.launch.end_notice import cause_of, end_notice, failure_report
from rolloutmq.launch.plan import STOP_ORDER
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import WorkerStatus
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView

__all__ = ["make_worker"]

GRACE_S = {role: 20.0 for roles in STOP_ORDER for role in roles}


def view(role: Role, phase: Phase = Phase.STOPPING) -> ProcessView:
    return ProcessView(role.value, role, phase, 100.0, 0.0, 0, 0, "")


@pytest.mark.parametrize("role", sorted(GRACE_S))
def test_every_process_of_a_run_is_named_with_what_it_does(role: Role) -> None:
    told = end_notice([view(role), view(Role.LAUNCHER, Phase.ENDED)], [], GRACE_S, 30.0, 105.0)
    assert told.startswith(f"ending, waits for: {role.value} ")
    assert "ends, killed" not in told, "each role says what it does"
    assert role is Role.ORCHESTRATOR or told.endswith("killed in 15 s")


def test_the_rollouts_of_the_workers_are_counted_with_their_deadline(
    make_worker: Callable[..., WorkerStatus],
) -> None:
    workers = [make_worker(f"add-{number}", in_hand=number) for number in range(5)]
    views = [view(Role.TRAINER), view(Role.ORCHESTRATOR), view(Role.BROKER, Phase.RUNNING)]
    assert end_notice(views, workers, GRACE_S, 30.0, 104.0) == (
        "ending, waits for: trainer settles its step and writes a checkpoint, killed in 16 s; orchestrator, whose "
        "workers finish 10 rollouts for at most 26 s (orchestrator.end_deadline_s): add-1, add-2, add-3, ..."
    )
    late: Any = end_notice(views[1:], workers[:2], GRACE_S, 30.0, 200.0)
    assert late == "ending, waits for: orchestrator, whose workers finish 1 rollouts and are ended now: add-1"
    assert end_notice([view(Role.BROKER, Phase.ENDED)], workers, GRACE_S, 30.0, 104.0) == ""


FAILED = "environment.bad: 20 rollouts in a row failed, the last with: ValueError: no: error: here"


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("trainer: exit code 3: error: nothing to learn", "trainer: exit code 3: error: nothing to learn"),
        ("broker: killed by SIGKILL", "broker: killed by SIGKILL"),
        (
            "orchestrator: exit code 3: error: environment.bad: all workers failed; bad-0: crashed 3 times",
            "environment.bad: all workers failed; bad-0: crashed 3 times",
        ),
        (f"orchestrator: exit code 3: error: environment.bad: all workers failed; bad-0: {FAILED}", FAILED),
        (
            "orchestrator: exit code 3: error: environment.bad: all workers failed; bad-0: exit code 3: error: "
            f"{FAILED}",
            FAILED,
        ),
        (
            "orchestrator: exit code 3: error: environment.bad: all workers failed; bad-0: exit code 3: error: "
            "environment.bad.entry: no such class",
            "environment.bad.entry: no such class",
        ),
        (f"curriculum: exit code 3: error: {FAILED}", FAILED),
    ],
)
def test_the_cause_is_that_of_the_environment_alone(reason: str, told: str) -> None:
    assert cause_of(reason) == told


def test_the_report_is_that_of_this_life(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    assert failure_report(layout, FAILED, 0.0) == ""
    layout.failures.mkdir(parents=True)
    path = layout.failure("bad")
    path.write_text('{"error": "E", "where": "bad.py:1", "report": "bad.py:1: in score\\nE   E"}')
    written = path.stat().st_mtime
    assert failure_report(layout, FAILED, written) == (
        "last error of environment bad: E (bad.py:1)\n\n    bad.py:1: in score\n    E   E\n"
    )
    assert failure_report(layout, FAILED, written + 1.0) == ""
    assert failure_report(layout, "interrupted by SIGINT", 0.0) == ""
    path.write_text("{")
    assert failure_report(layout, FAILED, 0.0) == ""
