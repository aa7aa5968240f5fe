"""Heat is what lasts, faults are what is told, and neither is made of silence."""

from collections.abc import Iterable
from typing import Any

import pytest
from tests.services.orchestrator.gpus.traces import (
    APPLICATION,
    HW_THERMAL,
    IDLE,
    LIMITS,
    POWER_CAP,
    SLOWDOWN,
    SW_THERMAL,
    hot,
    lost,
    sample,
    silent,
)

from rolloutmq.schemas.wire.hardware import Cause
from rolloutmq.schemas.wire.telemetry import GpuSample
from rolloutmq.services.orchestrator.gpus.health import HW_POWER_BRAKE, Health


def shown(samples: Iterable[GpuSample], start: float = 0.0, every_s: float = 1.0) -> Health:
    health = Health(LIMITS)
    for tick, one in enumerate(samples):
        health.see(one, start + tick * every_s)
    return health


def test_three_hot_samples_of_five_are_heat_and_two_are_not() -> None:
    cool = sample()
    assert set(shown([hot(), cool, hot(), cool, hot()]).faults) == {Cause.HEAT}
    assert shown([hot(), cool, hot(), cool, cool]).faults == {}
    assert shown([hot(), cool, cool, hot(), cool, cool, hot()] * 5).faults == {}
    assert shown([hot(), hot(), hot(), cool, cool, cool]).faults == {}


@pytest.mark.parametrize("bits", [SW_THERMAL, HW_THERMAL, SW_THERMAL | POWER_CAP])
def test_either_thermal_bit_is_heat(bits: int) -> None:
    fault = shown([hot(clock_event_reasons=bits)] * 3).faults[Cause.HEAT]
    assert not fault.fatal
    assert fault.says == "hot: thermal slowdown"


@pytest.mark.parametrize(
    "bits", [0, IDLE, APPLICATION, POWER_CAP, IDLE | APPLICATION | POWER_CAP, 0x800 | 1 << 40]
)
def test_how_a_gpu_works_is_no_heat_and_unknown_bits_mean_nothing(bits: int) -> None:
    health = shown([sample(clock_event_reasons=bits)] * 20)
    assert health.faults == {}
    assert health.cool_s == 19.0


def test_a_slow_down_by_the_board_must_last_and_is_no_heat_beside_a_power_brake() -> None:
    slowed = sample(clock_event_reasons=SLOWDOWN)
    assert shown([slowed] * 4).faults == {}
    assert set(shown([slowed] * 5).faults) == {Cause.HEAT}
    assert shown([slowed, slowed, sample(), slowed, slowed, slowed, slowed]).faults == {}
    braked = sample(clock_event_reasons=SLOWDOWN | HW_POWER_BRAKE)
    assert shown([braked] * 20).faults == {}


def test_no_margin_is_heat_after_ten_seconds() -> None:
    tight = sample(margin_c=0.0)
    assert shown([tight] * 10).faults == {}
    assert set(shown([tight] * 11).faults) == {Cause.HEAT}
    assert shown([*[tight] * 9, sample(margin_c=1.0), *[tight] * 9]).faults == {}


def test_silence_makes_nothing_last() -> None:
    tight = sample(margin_c=0.0)
    assert shown([tight, tight], every_s=60.0).faults == {}
    assert shown([hot(), hot(), hot()], every_s=60.0).faults == {}
    health = shown([sample()] * 10)
    health.see(silent(), 10.0)
    assert health.cool_s == health.whole_s == 9.0
    health.see(sample(), 100.0)
    assert health.cool_s == health.whole_s == 0.0


def test_heat_that_was_seen_is_not_over_because_nobody_looks() -> None:
    health = shown([hot()] * 3)
    for now in range(3, 300):
        health.see(silent(), float(now))
    assert set(health.faults) == {Cause.HEAT}


def test_cool_needs_margin_where_the_gpu_tells_one() -> None:
    assert shown([sample(margin_c=4.9)] * 9).cool_s == 0.0
    assert shown([sample(margin_c=5.0)] * 9).cool_s == 8.0
    assert shown([sample(margin_c=None)] * 9).cool_s == 8.0
    assert shown([sample(clock_event_reasons=None)] * 9).cool_s == 8.0


def test_a_gpu_that_tells_nothing_of_heat_is_neither_hot_nor_cool() -> None:
    health = shown([sample(margin_c=None, clock_event_reasons=None)] * 100)
    assert health.faults == {}
    assert (health.cool_s, health.whole_s) == (0.0, 99.0)


@pytest.mark.parametrize(
    ("facts", "cause", "says"),
    [
        ({"recovery_action": 1}, Cause.RECOVERY, "the driver asks to reset the GPU"),
        ({"recovery_action": 3}, Cause.RECOVERY, "the driver asks to drain its peers"),
        ({"recovery_action": 12}, Cause.RECOVERY, "the driver asks to take action 12"),
        ({"ecc_uncorrected": 2}, Cause.ECC, "2 new uncorrected memory errors"),
        ({"remap_failed": True}, Cause.REMAP, "a memory row failed and could not be remapped"),
        ({"xids": (31, 48, 79)}, Cause.XID, "driver error (Xid) 48, 79"),
    ],
)
def test_what_only_a_reset_or_a_repair_undoes_is_fatal_until_it_is_told_to_be_over(
    facts: dict[str, Any], cause: Cause, says: str
) -> None:
    health = shown([sample(), sample(**facts)])
    assert health.faults[cause].fatal
    assert health.faults[cause].says == says

    untold: dict[str, Any] = {"recovery_action": None, "ecc_uncorrected": None, "remap_failed": None}
    health.see(sample(**(untold | {"xids": facts.get("xids", ())})), 2.0)
    assert set(health.faults) == {cause}
    health.see(sample(), 3.0)
    assert health.faults == {}


def test_memory_errors_from_before_the_first_sample_are_no_fault() -> None:
    health = shown([sample(ecc_uncorrected=7)] * 3)
    assert (health.faults, health.whole_s) == ({}, 2.0)
    health.see(sample(ecc_uncorrected=8), 3.0)
    assert health.faults[Cause.ECC].says == "1 new uncorrected memory error"
    health.see(silent(), 4.0)
    health.see(sample(ecc_uncorrected=8), 5.0)
    assert set(health.faults) == {Cause.ECC}


def test_memory_errors_since_a_reset_are_all_new() -> None:
    health = shown([sample(ecc_uncorrected=7), sample(ecc_uncorrected=0)])
    assert health.faults == {}
    health.see(sample(ecc_uncorrected=1), 2.0)
    assert health.faults[Cause.ECC].says == "1 new uncorrected memory error"
    health.see(sample(ecc_uncorrected=0), 3.0)
    assert health.faults == {}
    # Nobody saw the count at 0.
    health = shown([sample(ecc_uncorrected=7), sample(ecc_uncorrected=2)])
    assert health.faults[Cause.ECC].says == "2 new uncorrected memory errors"


def test_driver_errors_outlast_the_telemetry_that_heard_them() -> None:
    health = shown([sample(number=7), sample(number=8, xids=(79,))])
    health.see(silent(number=1), 2.0)
    for number in range(2, 5):
        health.see(sample(number=number), float(number))
        assert health.faults[Cause.XID].says == "driver error (Xid) 79"
    health.see(sample(number=5, xids=(119,)), 5.0)
    assert health.faults[Cause.XID].mark == "79,119"

    health.see(lost(number=6), 6.0)
    health.see(sample(number=7), 7.0)
    assert health.faults == {}


def test_errors_of_an_application_and_a_replacement_that_waits_are_no_fault() -> None:
    assert shown([sample(xids=(13, 31, 43, 45), remap_pending=True)] * 9).faults == {}


def test_a_lost_gpu_is_a_fault_at_once_and_over_when_it_answers() -> None:
    health = shown([sample(), lost()])
    assert health.faults[Cause.LOST].says == "GPU is lost"
    assert (health.whole_s, health.cool_s) == (0.0, 0.0)
    health.see(silent(), 2.0)
    assert set(health.faults) == {Cause.LOST}
    health.see(sample(), 3.0)
    assert health.faults == {}
