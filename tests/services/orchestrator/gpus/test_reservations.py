"""Memory is promised once: until it shows, until it is back, and never beyond what the GPU has."""

import pytest
from tests.services.orchestrator.gpus.traces import GIB, LIMITS

from rolloutmq.services.orchestrator.gpus.reservations import Reservations, ReservationStage

ONE = ("GPU-1",)
TOTAL = 80 * GIB


class Trial:
    """Promises on one GPU, with a clock; `see` is what is in use a second later."""

    def __init__(self, used: int = 0) -> None:
        self.promises = Reservations(LIMITS)
        self.now = 0.0
        self.see(used)

    def see(self, *used: int, every_s: float = 1.0) -> None:
        for one in used:
            self.now += every_s
            self.promises.see("GPU-1", one, TOTAL, self.now)
            self.promises.settle(self.now)

    def stage(self, worker: str) -> ReservationStage | None:
        claim = self.promises.of(worker)
        return None if claim is None else claim.stage

    def loaded(self, worker: str, vram_bytes: int, used: int) -> None:
        self.promises.claim(worker, ONE, vram_bytes, self.now)
        self.promises.ready(worker, self.now)
        self.see(used)
        assert self.stage(worker) is ReservationStage.HELD


def test_a_promise_is_kept_until_the_worker_is_ready_and_its_memory_shows() -> None:
    trial = Trial(used=4 * GIB)
    trial.promises.claim("w-0", ONE, 30 * GIB, trial.now)
    trial.see(34 * GIB, 34 * GIB)
    assert trial.promises.promised_bytes("GPU-1") == 30 * GIB

    trial.promises.ready("w-0", trial.now)
    trial.see(34 * GIB)
    assert trial.promises.promised_bytes("GPU-1") == 0
    assert trial.promises.claimed_bytes("GPU-1") == 30 * GIB


def test_a_worker_that_is_ready_before_its_memory_shows_is_waited_for_and_not_for_ever() -> None:
    trial = Trial()
    trial.promises.claim("w-0", ONE, 30 * GIB, trial.now)
    trial.promises.ready("w-0", trial.now)
    trial.see(*[10 * GIB] * 119)
    assert trial.stage("w-0") is ReservationStage.LOADING
    trial.see(10 * GIB)
    assert trial.stage("w-0") is ReservationStage.HELD


def test_what_shows_is_credited_once() -> None:
    trial = Trial()
    for worker in ("w-0", "w-1"):
        trial.promises.claim(worker, ONE, 20 * GIB, trial.now)
        trial.promises.ready(worker, trial.now)
    trial.see(20 * GIB)
    assert (trial.stage("w-0"), trial.stage("w-1")) == (ReservationStage.HELD, ReservationStage.LOADING)
    trial.see(20 * GIB, 20 * GIB)
    assert trial.stage("w-1") is ReservationStage.LOADING
    trial.see(40 * GIB)
    assert trial.stage("w-1") is ReservationStage.HELD


def test_what_others_give_back_is_credited_to_nobody() -> None:
    trial = Trial(used=30 * GIB)
    trial.promises.claim("w-0", ONE, 20 * GIB, trial.now)
    trial.promises.ready("w-0", trial.now)
    trial.see(10 * GIB, 28 * GIB)
    assert trial.stage("w-0") is ReservationStage.LOADING
    trial.see(30 * GIB)
    assert trial.stage("w-0") is ReservationStage.HELD


def test_memory_that_comes_back_late_is_waited_for() -> None:
    trial = Trial()
    trial.loaded("w-0", 30 * GIB, 30 * GIB)
    trial.promises.ended("w-0", trial.now, comes_back=False)
    trial.see(30 * GIB, every_s=0.3)
    assert trial.promises.claimed_bytes("GPU-1") == 30 * GIB
    trial.see(2 * GIB, every_s=0.3)
    assert trial.stage("w-0") is ReservationStage.SETTLING
    trial.see(GIB // 2, every_s=0.3)
    assert trial.stage("w-0") is None
    assert trial.promises.claimed_bytes("GPU-1") == 0


def test_memory_that_never_settles_is_waited_for_two_seconds() -> None:
    trial = Trial()
    trial.loaded("w-0", 30 * GIB, 30 * GIB)
    trial.promises.ended("w-0", trial.now, comes_back=False)
    trial.see(*[used * GIB for used in (30, 20, 29, 19, 28, 18)], every_s=0.32)
    assert trial.stage("w-0") is ReservationStage.SETTLING
    trial.see(27 * GIB, every_s=0.32)
    assert trial.stage("w-0") is None


@pytest.mark.parametrize(("total", "gap", "settles"), [(80, 1.59, True), (80, 1.61, False), (8, 0.25, True)])
def test_settled_is_within_the_larger_of_two_bounds(total: int, gap: float, settles: bool) -> None:
    promises = Reservations(LIMITS)
    promises.see("GPU-1", 0, total * GIB, 0.0)
    promises.claim("w-0", ONE, GIB, 0.0)
    promises.ended("w-0", 0.0, comes_back=False)
    promises.see("GPU-1", 5 * GIB, total * GIB, 0.1)
    promises.see("GPU-1", int((5 - gap) * GIB), total * GIB, 0.2)
    assert (promises.settle(0.2) != []) is settles


def test_ghost_memory_is_reported_after_a_time_and_not_while_somebody_may_have_it() -> None:
    trial = Trial(used=3 * GIB)
    trial.loaded("w-0", 30 * GIB, 33 * GIB)
    trial.promises.ended("w-0", trial.now, comes_back=False)
    trial.see(*[20 * GIB] * 31)
    assert trial.promises.ghost_bytes("GPU-1") == 0
    trial.see(20 * GIB)
    assert trial.promises.ghost_bytes("GPU-1") == 17 * GIB
    # The next worker does not make it legitimate.
    trial.loaded("w-1", 20 * GIB, 40 * GIB)
    trial.promises.ended("w-1", trial.now, comes_back=False)
    trial.see(*[20 * GIB] * 40)
    assert trial.promises.ghost_bytes("GPU-1") == 17 * GIB
    trial.see(3 * GIB)
    assert trial.promises.ghost_bytes("GPU-1") == 0


def test_memory_that_others_had_before_is_no_ghost() -> None:
    trial = Trial(used=20 * GIB)
    trial.loaded("w-0", 30 * GIB, 50 * GIB)
    trial.promises.ended("w-0", trial.now, comes_back=False)
    trial.see(*[20 * GIB] * 60)
    assert trial.promises.ghost_bytes("GPU-1") == 0


def test_a_worker_that_comes_back_keeps_its_claim_and_loads_again() -> None:
    trial = Trial()
    trial.loaded("w-0", 30 * GIB, 30 * GIB)
    trial.promises.ended("w-0", trial.now, comes_back=True)
    assert not trial.promises.settled("w-0")
    trial.see(0, 0)
    assert trial.promises.settled("w-0")
    assert trial.promises.claimed_bytes("GPU-1") == 30 * GIB
    trial.promises.again("w-0", trial.now)
    assert trial.promises.promised_bytes("GPU-1") == 30 * GIB


def test_memory_of_an_adopted_worker_is_in_use_already() -> None:
    promises = Reservations(LIMITS)
    promises.claim("w-0", ONE, 30 * GIB, 0.0, adopted=True)
    assert promises.promised_bytes("GPU-1") == 30 * GIB
    promises.see("GPU-1", 30 * GIB, TOTAL, 1.0)
    promises.claim("w-1", ONE, 20 * GIB, 1.0)
    promises.ready("w-0", 1.0)
    promises.ready("w-1", 1.0)
    promises.see("GPU-1", 30 * GIB, TOTAL, 2.0)
    # What the first one had all along is not what the second one loads.
    assert promises.promised_bytes("GPU-1") == 20 * GIB


def test_a_worker_with_several_gpus_shows_on_all_of_them() -> None:
    promises = Reservations(LIMITS)
    for uuid in ("GPU-1", "GPU-2"):
        promises.see(uuid, 0, TOTAL, 0.0)
    promises.claim("w-0", ("GPU-1", "GPU-2"), 10 * GIB, 0.0)
    promises.ready("w-0", 0.0)
    promises.see("GPU-1", 10 * GIB, TOTAL, 1.0)
    assert promises.promised_bytes("GPU-2") == 10 * GIB
    promises.see("GPU-2", 10 * GIB, TOTAL, 1.0)
    assert promises.promised_bytes("GPU-2") == promises.promised_bytes("GPU-1") == 0


def test_a_worker_has_one_claim() -> None:
    promises = Reservations(LIMITS)
    promises.claim("w-0", ONE, 1, 0.0)
    with pytest.raises(ValueError, match="already has GPUs"):
        promises.claim("w-0", ("GPU-2",), 1, 0.0)
