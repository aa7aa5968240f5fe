"""The end of a run says what it waits for."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.services.monitor.conftest import make_worker

from rolloutmq.launch.end_notice import end_notice
from rolloutmq.launch.plan import STOP_ORDER
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
