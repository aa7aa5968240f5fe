"""A worker hangs only if its silence was witnessed, and only where that is configured."""

from collections.abc import Callable

import pytest
from tests.services.monitor.conftest import make_worker

from rolloutmq.schemas.wire.control import WorkerState, WorkerStatus
from rolloutmq.services.orchestrator.supervision.hang_watch import PAUSE_S, HangWatch

__all__ = ["make_worker"]

MakeWorker = Callable[..., WorkerStatus]


def watched(watch: HangWatch, until: float) -> None:
    """Let messages arrive from 0 to `until`, four a second, without any worker."""
    for quarter in range(int(until * 4) + 1):
        assert watch.look({}, quarter / 4) == {}


def test_a_silent_worker_hangs_once_it_is_silent_for_longer_than_allowed(make_worker: MakeWorker) -> None:
    watch = HangWatch({"e": 10.0})
    watched(watch, 20.0)
    silent = {
        "e-0": make_worker("e-0", env="e", silent_s=9.9),
        "e-1": make_worker("e-1", env="e", silent_s=10.1),
    }
    assert watch.look(silent, 20.25) == {
        "e-1": "hangs: no heartbeat for 10 s (environment.e.liveness_s: 10)",
    }


def test_a_pause_of_the_broker_is_nobodys_silence(make_worker: MakeWorker) -> None:
    watch = HangWatch({"e": 10.0})
    watched(watch, 20.0)
    after = 20.0 + PAUSE_S + 58.0
    for quarter in range(40):
        silent = {"e-0": make_worker("e-0", env="e", silent_s=60.0 + quarter / 4)}
        assert watch.look(silent, after + quarter / 4) == {}
    silent = {"e-0": make_worker("e-0", env="e", silent_s=71.0)}
    assert list(watch.look(silent, after + 10.25)) == ["e-0"], "it has been silent since"


@pytest.mark.parametrize("state", [WorkerState.GONE, WorkerState.FAILED])
def test_a_worker_that_has_ended_does_not_hang(make_worker: MakeWorker, state: WorkerState) -> None:
    watch = HangWatch({"e": 10.0})
    watched(watch, 100.0)
    assert watch.look({"e-0": make_worker("e-0", env="e", silent_s=60.0, state=state)}, 100.25) == {}


def test_without_a_limit_nobody_hangs(make_worker: MakeWorker) -> None:
    watch = HangWatch({})
    watched(watch, 100.0)
    assert watch.look({"e-0": make_worker("e-0", env="e", silent_s=60.0)}, 100.25) == {}
