"""The fleet as a whole: placements against promises, cordons against processes, and all of it by UUID."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.orchestrator.gpus.traces import GIB, LIMITS, hot, lost, sample, silent, using

from rolloutmq.schemas.wire.hardware import Cause, GpuOrder
from rolloutmq.schemas.wire.telemetry import GpuSample
from rolloutmq.services.orchestrator.gpus.fleet import Fleet, GpuRoom, GpuWait, WorkerLife
from rolloutmq.services.orchestrator.gpus.placement import GpuRequest, NoGpu

NEED = GpuRequest(1, 50 * GIB)


class Trial:
    """A fleet with a clock, and the lives of its workers."""

    def __init__(self, *samples: GpuSample) -> None:
        self.fleet = Fleet(LIMITS)
        self.now = 0.0
        self.lives: dict[str, WorkerLife] = {}
        self.see(*samples)

    def see(self, *samples: GpuSample, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            for one in samples:
                self.fleet.see(one, self.now, 0.0)
            self.fleet.follow(self.lives, self.now)

    def start(self, worker: str, need: GpuRequest = NEED) -> tuple[str, ...] | NoGpu:
        placed = self.fleet.place(worker, need, self.now)
        if not isinstance(placed, NoGpu):
            self.live(worker, pid=hash(worker) % 1000 + 1)
        return placed

    def live(self, worker: str, **life: Any) -> None:
        self.lives[worker] = WorkerLife(**life)
        self.fleet.follow(self.lives, self.now)


def test_two_starts_on_one_gpu_the_second_is_denied() -> None:
    trial = Trial(using(0))
    assert trial.start("w-0") == ("GPU-1",)
    second = trial.start("w-1")
    assert isinstance(second, NoGpu)
    assert "without enough memory" in second.reason
    # Neither before it loads nor while it does, nor when it has.
    trial.see(using(20 * GIB))
    assert isinstance(trial.start("w-1"), NoGpu)
    trial.live("w-0", pid=7, ready=True)
    trial.see(using(50 * GIB), times=3)
    assert isinstance(trial.start("w-1"), NoGpu)
    assert trial.start("w-1", GpuRequest(1, 20 * GIB)) == ("GPU-1",)


def test_room_counts_what_would_be_promised() -> None:
    trial = Trial(using(0, "GPU-1"), using(0, "GPU-2"))
    room = trial.fleet.room(GpuRequest(1, 30 * GIB), 9, trial.now)
    assert room.count == 4
    assert room.reason.startswith("no_gpu: 0 of 1 wanted; 2 without enough memory")
    assert trial.fleet.room(GpuRequest(1), 9, trial.now).count == 2
    assert trial.fleet.room(GpuRequest(2), 9, trial.now).count == 1
    assert trial.fleet.room(GpuRequest(1), 2, trial.now) == GpuRoom(2)
    # It only counted: nothing was promised.
    assert trial.start("w-0", GpuRequest(2)) == ("GPU-1", "GPU-2")


def test_reordered_indexes_change_nothing() -> None:
    trial = Trial(using(0, "GPU-1", index=0), using(70 * GIB, "GPU-2", index=1))
    assert trial.start("w-0") == ("GPU-1",)
    trial.see(*[hot("GPU-2", index=1, memory_used_bytes=0)], times=3)
    trial.see(hot("GPU-2", index=0, memory_used_bytes=0), using(0, "GPU-1", index=1), times=3)
    assert trial.fleet.cordons["GPU-2"].causes == (Cause.HEAT,)
    assert trial.fleet.cordons["GPU-1"].causes == ()
    assert [claim.worker for claim in trial.fleet.promises.claims("GPU-1")] == ["w-0"]


def test_nothing_is_placed_where_nothing_is_known_now() -> None:
    trial = Trial(using(0))
    trial.now += 5.5
    denied = trial.start("w-0")
    assert denied == NoGpu("no_gpu: 0 of 1 wanted; 1 without a recent sample")
    trial.see(silent())
    assert isinstance(trial.start("w-0"), NoGpu)
    trial.see(using(0))
    assert trial.start("w-0") == ("GPU-1",)


def test_a_cordoned_gpu_is_passed_over_and_keeps_its_workers() -> None:
    trial = Trial(using(0, "GPU-1"), using(10 * GIB, "GPU-2"))
    assert trial.start("w-0") == ("GPU-1",)
    trial.fleet.carry_out({"GPU-1": GpuOrder(number=1, cordoned=True)}, trial.now, 0.0)
    assert trial.start("w-1", GpuRequest(1, GIB)) == ("GPU-2",)
    assert trial.fleet.leaving() == {}


def test_workers_of_a_lost_gpu_must_leave_and_are_placed_elsewhere() -> None:
    trial = Trial(using(0, "GPU-1"), using(10 * GIB, "GPU-2"))
    assert trial.start("w-0") == ("GPU-1",)
    trial.see(lost("GPU-1"), using(10 * GIB, "GPU-2"))
    assert trial.fleet.leaving() == {"w-0": "GPU-1: GPU is lost"}
    assert trial.start("w-1") == ("GPU-2",)


def test_a_process_that_is_not_really_gone_keeps_its_gpu() -> None:
    trial = Trial(using(0))
    trial.start("w-0")
    trial.see(using(50 * GIB), times=5)
    trial.live("w-0", pid=7)
    trial.see(using(0), times=10)
    assert isinstance(trial.start("w-1"), NoGpu)
    trial.live("w-0", pid=None)
    trial.see(using(0))
    assert isinstance(trial.start("w-1"), NoGpu)
    trial.see(using(0))
    assert trial.start("w-1") == ("GPU-1",)


def test_a_worker_comes_back_when_its_memory_has() -> None:
    trial = Trial(using(0))
    trial.start("w-0")
    trial.live("w-0", pid=7, ready=True)
    trial.see(using(50 * GIB), times=2)
    trial.live("w-0", pid=None, comes_back=True)
    assert trial.fleet.comeback("w-0", trial.now) is GpuWait.SETTLING
    trial.see(using(50 * GIB))
    assert trial.fleet.comeback("w-0", trial.now) is GpuWait.SETTLING
    trial.see(using(0), using(0), times=2)
    assert trial.fleet.comeback("w-0", trial.now) is None
    # Nobody else took its place meanwhile.
    assert isinstance(trial.start("w-1"), NoGpu)
    trial.live("w-0", pid=8)
    assert trial.fleet.promises.promised_bytes("GPU-1") == 50 * GIB


def test_a_worker_does_not_come_back_on_a_gpu_that_was_cordoned_or_stays_full() -> None:
    trial = Trial(using(0, "GPU-1"), using(10 * GIB, "GPU-2"))
    trial.start("w-0")
    trial.live("w-0", pid=None, comes_back=True)
    trial.see(using(0, "GPU-1"), times=3)
    assert trial.fleet.comeback("w-0", trial.now) is None
    trial.see(using(60 * GIB, "GPU-1"))
    assert trial.fleet.comeback("w-0", trial.now) == NoGpu("no_gpu: GPU-1 is without enough memory")
    trial.fleet.carry_out({"GPU-1": GpuOrder(number=1, cordoned=True)}, trial.now, 0.0)
    assert trial.fleet.comeback("w-0", trial.now) == NoGpu("no_gpu: GPU-1 is cordoned")


def test_silence_holds_a_worker_that_ended_where_it_is() -> None:
    trial = Trial(using(0))
    trial.start("w-0")
    trial.live("w-0", pid=None, comes_back=True)
    trial.now += 60.0
    trial.fleet.follow(trial.lives, trial.now)
    assert trial.fleet.comeback("w-0", trial.now) is GpuWait.SILENT


def test_a_restart_between_two_looks_is_a_new_load() -> None:
    trial = Trial(using(0))
    trial.start("w-0")
    trial.live("w-0", pid=7, ready=True)
    trial.see(using(50 * GIB), times=2)
    assert trial.fleet.promises.promised_bytes("GPU-1") == 0
    trial.live("w-0", pid=8)
    assert trial.fleet.promises.promised_bytes("GPU-1") == 50 * GIB


def test_a_busy_gpu_is_passed_over_when_it_was_for_long() -> None:
    trial = Trial(sample("GPU-1"), using(10 * GIB, "GPU-2"))
    trial.see(sample("GPU-1", utilisation_percent=100.0), using(10 * GIB, "GPU-2"), times=4)
    assert trial.fleet.room(NEED, 2, trial.now).count == 2
    trial.see(sample("GPU-1", utilisation_percent=100.0), using(10 * GIB, "GPU-2"))
    assert trial.start("w-0") == ("GPU-2",)


def test_standings_tell_who_has_what_and_why_a_gpu_is_not_used() -> None:
    trial = Trial(using(0, "GPU-1"), using(0, "GPU-2"))
    trial.start("w-0", GpuRequest(1, GIB))
    trial.see(lost("GPU-2"))
    one, two = trial.fleet.standings(trial.now, 5.0)
    assert (one.uuid, one.holders, one.promised_bytes, one.cordoned) == ("GPU-1", ("w-0",), GIB, False)
    assert (two.uuid, two.causes, two.reason, two.draining) == ("GPU-2", (Cause.LOST,), "GPU is lost", True)


def test_a_divided_gpu_is_passed_over() -> None:
    trial = Trial(sample("GPU-1", mig=True))
    denied = trial.start("w-0")
    assert isinstance(denied, NoGpu)
    assert "divided" in denied.reason


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("start", "ready", "load", "end", "gone", "free", "look")),
        st.integers(0, 5),
        st.sampled_from((5, 20, 50)),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_never_are_two_promises_beyond_the_free_memory(steps: list[tuple[str, int, int]]) -> None:
    """A model GPU: processes load what they were promised at any time after their start, and free it late."""
    trial = Trial(using(0))
    promised: dict[str, int] = {}
    in_use: dict[str, int] = {}
    for what, number, size in steps:
        worker = f"w-{number}"
        if what == "start" and trial.fleet.promises.of(worker) is None and worker not in in_use:
            if not isinstance(trial.start(worker, GpuRequest(1, size * GIB)), NoGpu):
                promised[worker] = size * GIB
        elif what == "load" and worker in promised:
            in_use[worker] = promised[worker]
        elif what == "ready" and worker in in_use and worker in promised:
            trial.live(worker, pid=number + 1, ready=True)
        elif what == "end" and worker in promised:
            del promised[worker]
            trial.live(worker, pid=None)
        elif what == "free" and worker not in promised:
            in_use.pop(worker, None)
        trial.see(using(min(sum(in_use.values()), 79 * GIB)))
        # Whatever of it is in use already: all that was promised to the living fits.
        assert sum(promised.values()) <= 79 * GIB
        loading = {one: size for one, size in promised.items() if one not in in_use}
        assert sum(loading.values()) + sum(in_use.values()) <= 79 * GIB
