"""Cordons hold, are lifted by evidence alone, and never take more than the breaker allows."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.orchestrator.gpus.traces import hot, lost, sample, silent

from rolloutmq.schemas.config.orchestrator import HardwareConfig
from rolloutmq.schemas.files import GpuRecord
from rolloutmq.schemas.wire.hardware import FATAL, Cause, GpuOrder, GpuStanding
from rolloutmq.schemas.wire.telemetry import GpuSample
from rolloutmq.services.orchestrator.gpus.cordons import Cordons


class Trial:
    """Cordons, with a clock."""

    def __init__(self, *uuids: str, **limits: Any) -> None:
        self.cordons = Cordons(HardwareConfig(**limits))
        self.now = 0.0
        self._number = 0
        for uuid in uuids:
            self.see(sample(uuid))

    def see(self, one: GpuSample, times: int = 1) -> None:
        """Give it so many samples, a second apart."""
        for _ in range(times):
            self.now += 1.0
            self.cordons.see(one.uuid, one, self.now, 1000.0 + self.now)

    def order(self, uuid: str, *, cordoned: bool, reason: str = "") -> None:
        self._number += 1
        orders = {uuid: GpuOrder(number=self._number, cordoned=cordoned, reason=reason)}
        for _ in range(2):  # An order is repeated for ever.
            self.cordons.carry_out(orders, self.now, 1000.0 + self.now)

    def causes(self, uuid: str = "GPU-1") -> tuple[Cause, ...]:
        return self.cordons[uuid].causes

    def restarted(self) -> "Trial":
        """Return what a restart makes of it: all that is kept is in the records."""
        other = Trial()
        other.now, other._number = self.now + 1000.0, self._number
        for uuid in self.cordons.known():
            gpu = self.cordons[uuid]
            standing = GpuStanding(
                uuid=uuid, host="h", name="n", at=0.0, since=gpu.since, order=gpu.order, causes=gpu.causes
            )
            kept: dict[str, Any] = self.cordons.kept(uuid)
            other.cordons.restore(GpuRecord(standing=standing, **kept), other.now)
        return other


def test_flapping_heat_cordons_nobody() -> None:
    trial = Trial("GPU-1")
    for _ in range(60):
        trial.see(hot(), 2)
        trial.see(sample(), 3)
    assert trial.causes() == ()


def test_heat_cordons_and_a_clean_minute_uncordons() -> None:
    trial = Trial("GPU-1")
    trial.see(hot(), 3)
    assert trial.causes() == (Cause.HEAT,)
    assert trial.cordons["GPU-1"].since == 1000.0 + trial.now
    assert trial.cordons.doomed() == {}
    trial.see(sample(), 60)
    assert trial.causes() == (Cause.HEAT,)
    trial.see(sample())
    assert trial.causes() == ()


def test_clean_without_margin_is_not_clean() -> None:
    trial = Trial("GPU-1")
    trial.see(hot(), 3)
    trial.see(sample(margin_c=3.0), 200)
    assert trial.causes() == (Cause.HEAT,)
    trial.see(sample(margin_c=5.0), 61)
    assert trial.causes() == ()


def test_silence_never_uncordons() -> None:
    trial = Trial("GPU-1")
    trial.see(hot(), 3)
    trial.see(silent(), 500)
    assert trial.causes() == (Cause.HEAT,)
    trial.now += 3600.0
    trial.see(sample(), 60)
    assert trial.causes() == (Cause.HEAT,)
    trial.see(sample(margin_c=None, clock_event_reasons=None), 500)
    assert trial.causes() == (Cause.HEAT,)


def test_workers_go_where_heat_lasts() -> None:
    trial = Trial("GPU-1")
    trial.see(hot(), 302)
    assert trial.cordons.doomed() == {}
    trial.see(hot())
    assert trial.cordons.doomed() == {"GPU-1": "hot for 300 s"}
    trial.see(sample(), 5)
    assert trial.cordons.doomed() == {}


@pytest.mark.parametrize(
    "bad", [lost(), sample(recovery_action=1), sample(ecc_uncorrected=1), sample(xids=(79,))]
)
def test_a_fatal_fault_cordons_and_dooms_at_once_until_it_is_over_for_a_minute(bad: GpuSample) -> None:
    trial = Trial("GPU-1")
    trial.see(bad)
    assert set(trial.causes()) <= FATAL
    assert list(trial.cordons.doomed()) == ["GPU-1"]
    trial.see(silent(), 300)
    assert list(trial.cordons.doomed()) == ["GPU-1"]
    trial.see(sample(), 60)
    assert trial.causes() != ()
    trial.see(sample())
    assert trial.causes() == ()


def test_relapses_double_the_hold_off_up_to_its_bound_and_calm_halves_it() -> None:
    trial = Trial("GPU-1", hold_off_max_s=200.0)

    def clean_for() -> int:
        trial.see(hot(), 3)
        assert trial.causes() == (Cause.HEAT,)
        seconds = 0
        while trial.causes():
            trial.see(sample())
            seconds += 1
        return seconds - 1

    assert [clean_for() for _ in range(5)] == [60, 120, 200, 200, 200]
    level = trial.cordons["GPU-1"].level
    trial.see(sample(), 3000)
    assert clean_for() == 60
    assert trial.cordons["GPU-1"].level < level


def test_the_breaker_leaves_half_of_the_gpus_in_use() -> None:
    uuids = [f"GPU-{index}" for index in range(5)]
    trial = Trial(*uuids)
    for _ in range(10):
        for uuid in uuids:
            trial.see(hot(uuid))
            trial.now -= 0.8
    cordoned = [uuid for uuid in uuids if trial.causes(uuid)]
    assert len(cordoned) == 2
    spared = next(uuid for uuid in uuids if uuid not in cordoned)
    assert "the breaker allows no more cordons" in trial.cordons[spared].reason
    assert trial.cordons.doomed() == {}


def test_a_single_gpu_may_be_cordoned() -> None:
    trial = Trial("GPU-1")
    trial.see(hot(), 3)
    assert trial.causes() == (Cause.HEAT,)


def test_fatal_faults_take_places_of_the_breaker_and_are_not_held_by_it() -> None:
    trial = Trial("GPU-1", "GPU-2")
    trial.see(lost("GPU-1"))
    trial.see(hot("GPU-2"), 5)
    assert (trial.causes("GPU-1"), trial.causes("GPU-2")) == ((Cause.LOST,), ())
    trial.see(lost("GPU-2"))
    assert trial.causes("GPU-2") == (Cause.LOST,)


def test_an_operators_cordon_lasts_and_drains_nobody() -> None:
    trial = Trial("GPU-1")
    trial.order("GPU-1", cordoned=True, reason="new fan")
    trial.see(sample(), 500)
    assert trial.causes() == (Cause.MANUAL,)
    assert trial.cordons["GPU-1"].reason == "by hand: new fan"
    assert trial.cordons.doomed() == {}
    trial.order("GPU-1", cordoned=False)
    assert trial.causes() == ()


def test_the_end_of_heat_does_not_lift_an_operators_cordon() -> None:
    trial = Trial("GPU-1")
    trial.order("GPU-1", cordoned=True)
    trial.see(hot(), 3)
    assert trial.causes() == (Cause.MANUAL, Cause.HEAT)
    trial.see(sample(), 61)
    assert trial.causes() == (Cause.MANUAL,)


def test_what_is_uncordoned_by_hand_is_not_cordoned_for_the_same_heat() -> None:
    trial = Trial("GPU-1")
    trial.see(hot(), 10)
    trial.order("GPU-1", cordoned=False)
    for _ in range(20):
        trial.see(hot(), 20)
        trial.see(sample(), 20)
    assert trial.causes() == ()
    assert "uncordoned by hand despite: heat" in trial.cordons["GPU-1"].reason
    trial.see(sample(), 61)
    assert trial.cordons["GPU-1"].reason == ""
    trial.see(hot(), 3)
    assert trial.causes() == (Cause.HEAT,)


def test_what_is_uncordoned_by_hand_is_cordoned_for_another_fault() -> None:
    trial = Trial("GPU-1")
    trial.see(sample(ecc_uncorrected=1), 5)
    trial.order("GPU-1", cordoned=False)
    trial.see(sample(ecc_uncorrected=1), 200)
    assert trial.causes() == ()
    trial.see(sample(ecc_uncorrected=2))
    assert trial.causes() == (Cause.ECC,)


def test_a_restart_keeps_what_memory_errors_were_new() -> None:
    trial = Trial("GPU-1", "GPU-2")
    trial.see(sample("GPU-3", ecc_uncorrected=3))
    trial.see(sample("GPU-4", ecc_uncorrected=3))
    trial.see(sample("GPU-4", ecc_uncorrected=4))
    assert (trial.causes("GPU-3"), trial.causes("GPU-4")) == ((), (Cause.ECC,))

    after = trial.restarted()
    after.see(sample("GPU-3", ecc_uncorrected=3), 200)
    after.see(sample("GPU-4", ecc_uncorrected=4), 200)
    assert (after.causes("GPU-3"), after.causes("GPU-4")) == ((), (Cause.ECC,))
    # What came while nobody looked is new, too.
    again = after.restarted()
    again.see(sample("GPU-3", ecc_uncorrected=4))
    assert again.causes("GPU-3") == (Cause.ECC,)
    # A reset of the GPU ends it.
    again.see(sample("GPU-4", ecc_uncorrected=0), 61)
    assert again.causes("GPU-4") == ()


def test_an_order_for_a_gpu_that_is_not_known_waits_for_it() -> None:
    trial = Trial()
    orders = {"GPU-1": GpuOrder(number=1, cordoned=True, reason="r")}
    trial.cordons.carry_out(orders, 0.0, 0.0)
    trial.see(sample())
    assert trial.causes() == ()
    trial.cordons.carry_out(orders, 0.0, 0.0)
    assert trial.causes() == (Cause.MANUAL,)


def test_a_restart_keeps_cordons_and_what_was_dismissed() -> None:
    trial = Trial("GPU-1", "GPU-2", "GPU-3", "GPU-4", "GPU-5", "GPU-6")
    trial.see(hot("GPU-1"), 3)
    trial.see(lost("GPU-2"))
    trial.order("GPU-3", cordoned=True, reason="fan")
    trial.see(hot("GPU-4"), 3)
    trial.order("GPU-4", cordoned=False)
    since = trial.cordons["GPU-1"].since

    after = trial.restarted()

    assert [after.causes(f"GPU-{index}") for index in (1, 2, 3, 4)] == [
        (Cause.HEAT,),
        (Cause.LOST,),
        (Cause.MANUAL,),
        (),
    ]
    assert after.cordons["GPU-1"].since == since
    assert after.cordons["GPU-1"].reason == "hot: thermal slowdown"
    assert list(after.cordons.doomed()) == ["GPU-2"]
    # Orders that were carried out are not again, though they are told again.
    after.cordons.carry_out({"GPU-3": GpuOrder(number=1, cordoned=False)}, after.now, 0.0)
    assert after.causes("GPU-3") == (Cause.MANUAL,)
    after.see(hot("GPU-4"), 30)
    assert after.causes("GPU-4") == ()
    # What must last begins anew: a restart is no proof of anything.
    after.see(sample("GPU-1"), 60)
    assert after.causes("GPU-1") == (Cause.HEAT,)
    after.see(sample("GPU-1"))
    assert after.causes("GPU-1") == ()


def test_a_relapse_after_a_restart_is_a_relapse() -> None:
    trial = Trial("GPU-1")
    trial.see(hot(), 3)
    trial.see(sample(), 61)
    after = trial.restarted()
    after.see(hot(), 3)
    assert after.cordons["GPU-1"].level == 1


UUIDS = tuple(f"GPU-{index}" for index in range(4))
SAMPLES = st.sampled_from(("cool", "hot", "lost", "silent", "ecc", "untold", "pause"))
MADE: dict[str, Callable[[str], GpuSample]] = {
    "cool": sample,
    "hot": hot,
    "lost": lost,
    "silent": silent,
    "ecc": lambda uuid: sample(uuid, ecc_uncorrected=1),
    "untold": lambda uuid: sample(uuid, margin_c=None, clock_event_reasons=None),
}
STEPS = st.lists(st.tuples(st.sampled_from(UUIDS), SAMPLES, st.integers(1, 70)), max_size=40)


@given(STEPS, st.sampled_from((0.25, 0.5, 1.0)))
@settings(max_examples=150, deadline=None)
def test_never_more_than_the_breaker_is_cordoned_for_heat(
    steps: list[tuple[str, str, int]], breaker: float
) -> None:
    trial = Trial(*UUIDS, breaker=breaker)
    for uuid, kind, times in steps:
        if kind == "pause":
            trial.now += 100.0
            continue
        trial.see(MADE[kind](uuid), times)
        heated = [one for one in UUIDS if Cause.HEAT in trial.causes(one)]
        assert len(heated) <= max(1, int(breaker * len(UUIDS)))


@given(STEPS, st.integers(1, 10_000))
@settings(max_examples=150, deadline=None)
def test_silence_changes_no_cordon(steps: list[tuple[str, str, int]], silence: int) -> None:
    trial = Trial(*UUIDS)
    for uuid, kind, times in steps:
        if kind != "pause":
            trial.see(MADE[kind](uuid), times)
        before = {one: trial.causes(one) for one in UUIDS}
        trial.now += silence
        for one in UUIDS:
            trial.see(silent(one), 2)
        trial.cordons.carry_out({}, trial.now, 0.0)
        assert {one: trial.causes(one) for one in UUIDS} == before
        # One sample after it proves nothing good either.
        trial.see(sample(uuid))
        assert set(before[uuid]) <= set(trial.causes(uuid))


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_an_operators_cordon_outlives_everything_but_an_order(steps: list[tuple[str, str, int]]) -> None:
    trial = Trial(*UUIDS)
    trial.order("GPU-0", cordoned=True)
    for uuid, kind, times in steps:
        if kind != "pause":
            trial.see(MADE[kind](uuid), times)
        assert Cause.MANUAL in trial.causes("GPU-0")
        trial = trial.restarted() if kind == "pause" else trial
