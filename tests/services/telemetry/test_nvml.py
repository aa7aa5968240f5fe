"""Every field is read on drivers of any age; a lost GPU is news, and what is not told is neither good nor bad."""

import sys
from typing import Any

import pytest
from tests.nvml.pynvml import Driver

from rolloutmq.bus.encoding import codec
from rolloutmq.schemas.wire.telemetry import GpuState
from rolloutmq.services.telemetry.gpus import NoGpuError
from rolloutmq.services.telemetry.nvml import Nvml

FULL = {
    "uuid": "GPU-1",
    "name": b"Tesla",
    "memory": {"used": 3, "free": 6, "total": 10, "reserved": 1},
    "utilisation": 87,
    "temperature": 61,
    "margin": 26,
    "threshold": 90,
    "reasons": 4,
    "ecc": 0,
    "remapped": [0, 0, 1, 0],
    "recovery": 0,
    "xids": [],
    "mig": 0,
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A driver with one GPU that tells everything."""
    script: dict[str, Any] = {"gpus": [dict(FULL)]}
    monkeypatch.setitem(sys.modules, "pynvml", Driver(script))
    return script


@pytest.fixture
def nvml(script: dict[str, Any]) -> Nvml:
    nvml = Nvml("h")
    assert nvml.uuids() == tuple(gpu["uuid"] for gpu in script["gpus"])
    return nvml


def test_a_gpu_is_read_field_by_field(nvml: Nvml) -> None:
    sample = nvml.read("GPU-1", 3, 5.0)

    assert (sample.uuid, sample.number, sample.at, sample.host) == ("GPU-1", 3, 5.0, "h")
    assert (sample.name, sample.state, sample.mig) == ("Tesla", GpuState.OK, False)
    assert (sample.utilisation_percent, sample.temperature_c, sample.margin_c) == (87.0, 61.0, 26.0)
    assert (sample.memory_used_bytes, sample.memory_free_bytes) == (3, 6)
    assert (sample.memory_total_bytes, sample.memory_reserved_bytes) == (10, 1)
    assert (sample.clock_event_reasons, sample.ecc_uncorrected, sample.recovery_action) == (4, 0, 0)
    assert (sample.remap_pending, sample.remap_failed) == (True, False)


def test_what_a_gpu_does_not_tell_is_none_and_travels(script: dict[str, Any], nvml: Nvml) -> None:
    script["gpus"][0] = {"uuid": "GPU-1", "name": "Bare"}
    sample = nvml.read("GPU-1", 1, 0.0)

    assert sample.state is GpuState.OK
    assert (sample.utilisation_percent, sample.temperature_c, sample.margin_c) == (None, None, None)
    told = (sample.memory_used_bytes, sample.clock_event_reasons, sample.ecc_uncorrected, sample.remap_failed)
    assert told == (None, None, None, None)
    assert sample.recovery_action is None
    assert codec.decode_event(codec.encode(sample)) is not None


def test_a_gpu_that_tells_nothing_at_all_is_silent(script: dict[str, Any], nvml: Nvml) -> None:
    script["gpus"][0] = {"uuid": "GPU-1"}
    sample = nvml.read("GPU-1", 1, 0.0)
    assert (sample.state, sample.why) == (GpuState.SILENT, "the driver reports no value")


def test_an_older_driver_is_asked_under_the_older_names(script: dict[str, Any], nvml: Nvml) -> None:
    script["gpus"][0]["missing"] = [
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetMarginTemperature",
    ]
    sample = nvml.read("GPU-1", 1, 0.0)

    assert sample.clock_event_reasons == 4
    # The older form counts what is reserved as used.
    assert (sample.memory_used_bytes, sample.memory_free_bytes, sample.memory_reserved_bytes) == (4, 6, None)
    # What it does tell is where it slows down; nobody else's degrees are taken instead.
    assert sample.margin_c == 90 - 61


def test_bindings_without_the_newer_names_do_as_well(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older(Driver):
        nvmlMemory_v2 = None  # noqa: N815

        def __getattr__(self, name: str) -> Any:
            if name in {"nvmlDeviceGetMarginTemperature", "nvmlDeviceGetCurrentClocksEventReasons"}:
                raise AttributeError(name)
            return super().__getattr__(name)

    monkeypatch.setitem(sys.modules, "pynvml", Older(script))
    nvml = Nvml("h")
    nvml.uuids()
    sample = nvml.read("GPU-1", 1, 0.0)

    assert (sample.clock_event_reasons, sample.margin_c, sample.memory_reserved_bytes) == (4, 29.0, None)


def test_a_lost_gpu_is_a_sample_and_no_silence(script: dict[str, Any], nvml: Nvml) -> None:
    script["gpus"][0]["lost"] = True
    sample = nvml.read("GPU-1", 1, 0.0)
    assert (sample.state, sample.why) == (GpuState.LOST, "GPU is lost")
    with pytest.raises(NoGpuError, match="none of 1 GPUs can be reached"):
        nvml.uuids()

    script["gpus"][0]["lost"] = False  # it was reset
    assert nvml.uuids() == ("GPU-1",)
    assert nvml.read("GPU-1", 2, 1.0).state is GpuState.OK


def test_critical_errors_stay_told_until_it_was_reset(script: dict[str, Any], nvml: Nvml) -> None:
    assert nvml.read("GPU-1", 1, 0.0).xids == ()
    script["gpus"][0]["xids"] += [48, 31, 48]
    assert nvml.read("GPU-1", 2, 1.0).xids == (31, 48)
    assert nvml.read("GPU-1", 3, 2.0).xids == (31, 48)
    script["gpus"][0]["lost"] = True
    assert nvml.read("GPU-1", 4, 3.0).xids == (31, 48)
    script["gpus"][0]["lost"] = False
    assert nvml.read("GPU-1", 5, 4.0).xids == ()


def test_a_divided_gpu_says_so_and_breaks_nothing(script: dict[str, Any], nvml: Nvml) -> None:
    gpu = script["gpus"][0]
    del gpu["utilisation"], gpu["xids"]
    gpu["mig"] = 1
    sample = nvml.read("GPU-1", 1, 0.0)

    assert sample.mig
    assert sample.utilisation_percent is None
    assert sample.memory_free_bytes == 6


def test_a_gpu_is_its_uuid_wherever_it_is_listed(script: dict[str, Any], nvml: Nvml) -> None:
    script["gpus"].insert(0, {"uuid": "GPU-2", "name": "Other", "temperature": 20})
    assert nvml.uuids() == ("GPU-2", "GPU-1")

    moved = nvml.read("GPU-1", 1, 0.0)
    assert (moved.index, moved.name, moved.temperature_c) == (1, "Tesla", 61.0)
    assert nvml.read("GPU-2", 1, 0.0).temperature_c == 20.0


def test_a_machine_without_a_driver_says_why_until_there_is_one(script: dict[str, Any]) -> None:
    script["error"] = "NVML Shared Library Not Found"
    nvml = Nvml("h")
    with pytest.raises(NoGpuError, match="NVML Shared Library Not Found"):
        nvml.uuids()
    assert nvml.read("GPU-1", 1, 0.0).state is GpuState.SILENT
    del script["error"]
    assert nvml.uuids() == ("GPU-1",)


def test_a_driver_that_goes_while_it_is_used_is_started_again(script: dict[str, Any], nvml: Nvml) -> None:
    script["error"] = "Driver Not Loaded"
    with pytest.raises(NoGpuError, match="Driver Not Loaded"):
        nvml.uuids()
    del script["error"]

    assert nvml.uuids() == ("GPU-1",)
    assert nvml.read("GPU-1", 1, 0.0).state is GpuState.OK


def test_the_real_bindings_have_the_names_that_are_asked_for() -> None:
    import pynvml

    for name in (
        *("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        *("nvmlDeviceGetMarginTemperature", "nvmlDeviceGetTemperatureThreshold", "nvmlDeviceGetRemappedRows"),
        *("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMigMode"),
        *("nvmlDeviceGetHandleByUUID", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"),
        *("NVMLError_GpuIsLost", "NVMLError_ResetRequired", "nvmlMemory_v2"),
    ):
        assert hasattr(pynvml, name), name
    assert pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == 230
    assert pynvml.nvmlEventTypeXidCriticalError == 8
    assert (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC) == (1, 0)
    assert (pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN) == (0, 1)


def test_the_real_bindings_answer_on_this_machine() -> None:
    nvml = Nvml("h")
    try:
        uuids = nvml.uuids()
    except NoGpuError:
        uuids = ()
    assert all(nvml.read(uuid, 1, 0.0).state is GpuState.OK for uuid in uuids)
