"""A drain tells once, and ahead, which rollouts it will abandon."""

from collections.abc import Callable

from tests.services.monitor.conftest import make_worker

from rolloutmq.schemas.process import Role, Step
from rolloutmq.schemas.wire.control import WorkerStatus
from rolloutmq.services.orchestrator.supervision.core import Phase, ProcessView
from rolloutmq.services.orchestrator.supervision.drain_watch import TELL_S, DrainWatch

__all__ = ["make_worker"]


def draining(ends: float | None, phase: Phase = Phase.STOPPING) -> dict[str, ProcessView]:
    rungs = () if ends is None else ((ends, Step.TERM),)
    return {"e-0": ProcessView("e-0", Role.WORKER, phase, 100.0, 0.0, 0, 0, "", rungs=rungs)}


def test_a_drain_is_told_once_before_its_end_and_so_is_the_next_one(
    make_worker: Callable[..., WorkerStatus],
) -> None:
    watch = DrainWatch()
    busy: dict[str, WorkerStatus] = {"e-0": make_worker("e-0", in_hand=4)}
    assert watch.look(draining(700.0), busy, 110.0) == []
    (line,) = watch.look(draining(700.0), busy, 700.0 - TELL_S)
    assert line == f"worker=e-0 in_hand=4 draining_s={600 - TELL_S:.0f} abandoned_in_s={TELL_S:.0f}"
    assert watch.look(draining(700.0), busy, 690.0) == []
    assert watch.look(draining(None, Phase.RUNNING), busy, 690.0) == []
    assert watch.look(draining(700.0), busy, 690.0) != [], "another drain"


def test_a_worker_without_rollouts_abandons_nothing(make_worker: Callable[..., WorkerStatus]) -> None:
    watch = DrainWatch()
    assert watch.look(draining(110.0), {"e-0": make_worker("e-0", in_hand=0)}, 105.0) == []
    assert watch.look(draining(110.0), {}, 105.0) == []
    assert watch.look(draining(None, Phase.RUNNING), {"e-0": make_worker("e-0", in_hand=1)}, 105.0) == []
