"""The scripted driver answers the real bindings as NVIDIA's documentation says."""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from tests.services.nvml.driver import GIB, Driver, Gpu, Instance, Memory, gpu
from tests.services.nvml.library import NAME, library


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """A driver with two GPUs, in this process and initialized."""
    driver = Driver(tmp_path / "nvml")
    driver.show(gpu("GPU-1"), gpu("GPU-2", pci="00000000:65:00.0"))
    with driver.installed():
        pynvml.nvmlInit()
        yield driver


def handle(index: int = 0) -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def code_of(name: str, *arguments: object, **options: object) -> int:
    """Return the code that a function of the bindings raises."""
    with pytest.raises(pynvml.NVMLError) as caught:
        getattr(pynvml, name)(*arguments, **options)
    return int(caught.value.value)


def test_gpus_are_listed_by_index_and_named_by_uuid_and_place(driver: Driver) -> None:
    assert pynvml.nvmlDeviceGetCount() == 2
    assert [pynvml.nvmlDeviceGetUUID(handle(index)) for index in (0, 1)] == ["GPU-1", "GPU-2"]
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID("GPU-2")) == 1
    assert code_of("nvmlDeviceGetHandleByUUID", "GPU-3") == pynvml.NVML_ERROR_NOT_FOUND
    assert code_of("nvmlDeviceGetHandleByIndex", 2) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    place = pynvml.nvmlDeviceGetPciInfo(handle(1))
    assert (place.busId, place.bus, place.busIdLegacy) == ("00000000:65:00.0", 0x65, "0000:65:00.0")
    assert pynvml.nvmlDeviceGetName(handle()) == "H100"
    assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"

    driver.show(gpu("GPU-2"), gpu("GPU-1"))
    assert [pynvml.nvmlDeviceGetUUID(handle(index)) for index in (0, 1)] == ["GPU-2", "GPU-1"]


def test_memory_is_in_bytes_and_reserved_memory_counts_as_used_only_in_the_older_form(driver: Driver) -> None:
    driver.change("GPU-1", memory=Memory(80 * GIB, GIB, 3 * GIB))

    new = pynvml.nvmlDeviceGetMemoryInfo(handle(), version=pynvml.nvmlMemory_v2)
    assert (new.total, new.reserved, new.used, new.free) == (80 * GIB, GIB, 3 * GIB, 76 * GIB)
    old = pynvml.nvmlDeviceGetMemoryInfo(handle())
    assert (old.total, old.used, old.free) == (80 * GIB, 4 * GIB, 76 * GIB)


def test_a_structure_of_another_version_is_refused(driver: Driver) -> None:  # noqa: ARG001
    for version in (pynvml.nvmlMemory_v2 + 1, 0x1000028, 0x3000028):
        found = code_of("nvmlDeviceGetMemoryInfo", handle(), version=version)
        assert found == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    margin = pynvml.c_nvmlMarginTemperature_v1_t()
    ask = pynvml.nvmlLib.nvmlDeviceGetMarginTemperature
    assert ask(handle(), ctypes.byref(margin)) == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    margin.version = pynvml.nvmlMarginTemperature_v1
    assert (ask(handle(), ctypes.byref(margin)), margin.marginTemperature) == (0, 40)


def test_load_and_heat(driver: Driver) -> None:
    driver.change(
        "GPU-1", utilisation_percent=87, temperature_c=91, margin_c=-3, power_mw=350_000, reasons=0x48
    )

    assert pynvml.nvmlDeviceGetUtilizationRates(handle()).gpu == 87
    assert pynvml.nvmlDeviceGetTemperature(handle(), pynvml.NVML_TEMPERATURE_GPU) == 91
    assert pynvml.nvmlDeviceGetTemperatureV(handle(), pynvml.NVML_TEMPERATURE_GPU) == 91
    assert pynvml.nvmlDeviceGetMarginTemperature(handle()) == -3
    threshold = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    assert pynvml.nvmlDeviceGetTemperatureThreshold(handle(), threshold) == 80
    assert pynvml.nvmlDeviceGetPowerUsage(handle()) == 350_000
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle()) == 0x48
    assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle()) == 0x48


def test_faults(driver: Driver) -> None:
    driver.change(
        "GPU-1", ecc=(2, 9), remapped=(1, 2, 1, 0), recovery=pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P
    )

    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    ecc = [pynvml.nvmlDeviceGetTotalEccErrors(handle(), uncorrected, counter) for counter in (0, 1)]
    assert ecc == [2, 9]
    assert (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC) == (0, 1)
    assert pynvml.nvmlDeviceGetRemappedRows(handle()) == (1, 2, 1, 0)
    fields = [
        pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL,
        pynvml.NVML_FI_DEV_REMAPPED_PENDING,
        9999,
    ]
    values = pynvml.nvmlDeviceGetFieldValues(handle(), fields)
    assert [one.nvmlReturn for one in values] == [0, 0, 0, pynvml.NVML_ERROR_INVALID_ARGUMENT]
    assert [one.value.uiVal for one in values[:3]] == [3, 9, 1]


def test_processes(driver: Driver) -> None:
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle()) == []
    driver.change("GPU-1", compute={41: GIB, 42: 2 * GIB}, graphics={7: 5})

    found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle())
    assert [(one.pid, one.usedGpuMemory) for one in found] == [(41, GIB), (42, 2 * GIB)]
    assert [one.pid for one in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle())] == [7]


def test_what_a_gpu_has_no_line_for_is_not_supported(driver: Driver) -> None:
    driver.show(Gpu("GPU-1"))
    for name in ("Name", "UtilizationRates", "RemappedRows", "MigMode", "MarginTemperature", "PowerUsage"):
        assert code_of(f"nvmlDeviceGet{name}", handle()) == pynvml.NVML_ERROR_NOT_SUPPORTED
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle(), [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    assert value.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_an_instance_of_mig_has_memory_of_its_own_and_no_utilisation(driver: Driver) -> None:
    slices = Instance("MIG-a", Memory(20 * GIB, 0, GIB)), Instance("MIG-b", Memory(20 * GIB))
    driver.change("GPU-1", mig=True, instances=slices)

    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlDeviceGetMigMode(handle()) == [1, 1]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(handle()) == 7
    assert code_of("nvmlDeviceGetUtilizationRates", handle()) == pynvml.NVML_ERROR_NOT_SUPPORTED
    instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(), 1)
    assert pynvml.nvmlDeviceGetUUID(instance) == "MIG-b"
    assert pynvml.nvmlDeviceIsMigDeviceHandle(instance).value == 1
    assert pynvml.nvmlDeviceGetMemoryInfo(instance).total == 20 * GIB
    assert code_of("nvmlDeviceGetUtilizationRates", instance) == pynvml.NVML_ERROR_NOT_SUPPORTED
    whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
    assert pynvml.nvmlDeviceGetUUID(whole) == "GPU-1"
    absent = code_of("nvmlDeviceGetMigDeviceHandleByIndex", handle(), 2)
    assert absent == pynvml.NVML_ERROR_NOT_FOUND
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID("MIG-a")) == "MIG-a"
    driver.change("GPU-1", lost=True)
    assert code_of("nvmlDeviceGetMemoryInfo", instance) == pynvml.NVML_ERROR_GPU_IS_LOST


def test_a_lost_gpu_is_lost_to_the_session_that_saw_it(driver: Driver) -> None:
    stale = handle()
    driver.change("GPU-1", lost=True)
    assert code_of("nvmlDeviceGetName", stale) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert code_of("nvmlDeviceGetHandleByIndex", 0) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert code_of("nvmlDeviceGetHandleByUUID", "GPU-2") == pynvml.NVML_ERROR_GPU_IS_LOST
    assert pynvml.nvmlDeviceGetName(handle(1)) == "H100"

    driver.change("GPU-1", lost=False)
    assert code_of("nvmlDeviceGetName", stale) == pynvml.NVML_ERROR_GPU_IS_LOST
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetName(handle()) == "H100"
    assert code_of("nvmlDeviceGetName", stale) == pynvml.NVML_ERROR_INVALID_ARGUMENT


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH]
)
def test_a_driver_that_failed_is_back_only_for_a_new_session(driver: Driver, code: int) -> None:
    driver.fail(code)
    assert code_of("nvmlInit") == code
    assert code_of("nvmlDeviceGetCount") == code
    driver.back()
    assert code_of("nvmlDeviceGetCount") == code
    pynvml.nvmlShutdown()
    assert code_of("nvmlDeviceGetCount") == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 2


def test_a_function_fails_by_itself(driver: Driver) -> None:
    driver.change("GPU-1", fails={"nvmlDeviceGetName": pynvml.NVML_ERROR_NO_PERMISSION})
    assert code_of("nvmlDeviceGetName", handle()) == pynvml.NVML_ERROR_NO_PERMISSION
    assert pynvml.nvmlDeviceGetPowerUsage(handle()) == 70_000
    driver.change("GPU-1", fails={"*": pynvml.NVML_ERROR_UNKNOWN})
    assert code_of("nvmlDeviceGetHandleByIndex", 0) == pynvml.NVML_ERROR_UNKNOWN


def test_a_call_that_hangs_returns_when_the_driver_lets_it(driver: Driver) -> None:
    first = handle()
    driver.change("GPU-1", hangs=("nvmlDeviceGetName",))
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.append(pynvml.nvmlDeviceGetName(first)))
    thread.start()
    try:
        assert pynvml.nvmlDeviceGetName(handle(1)) == "H100"
        assert pynvml.nvmlDeviceGetPowerUsage(first) == 70_000
        assert names == []
    finally:
        driver.change("GPU-1", hangs=())
        thread.join(30.0)
    assert names == ["H100"]


def test_errors_are_heard_once_from_the_registration_on(driver: Driver) -> None:
    driver.change("GPU-1", xids=(13,))
    events = pynvml.nvmlEventSetCreate()
    kind = pynvml.nvmlEventTypeXidCriticalError
    assert pynvml.nvmlDeviceGetSupportedEventTypes(handle()) == kind
    pynvml.nvmlDeviceRegisterEvents(handle(), kind, events)
    assert code_of("nvmlEventSetWait_v2", events, 5) == pynvml.NVML_ERROR_TIMEOUT

    driver.change("GPU-1", xids=(13, 48, 79))
    heard = [pynvml.nvmlEventSetWait_v2(events, 0) for _ in range(2)]
    assert [(one.eventType, one.eventData, one.gpuInstanceId) for one in heard] == [
        (kind, 48, 0xFFFFFFFF),
        (kind, 79, 0xFFFFFFFF),
    ]
    assert code_of("nvmlEventSetWait_v2", events, 0) == pynvml.NVML_ERROR_TIMEOUT
    driver.change("GPU-1", lost=True)
    assert code_of("nvmlEventSetWait_v2", events, 0) == pynvml.NVML_ERROR_GPU_IS_LOST
    pynvml.nvmlEventSetFree(events)
    assert code_of("nvmlEventSetWait_v2", events, 0) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_an_older_driver_lacks_functions(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "nvml", lacks=["nvmlDeviceGetMemoryInfo_v2"])
    driver.show(gpu())
    with driver.installed():
        pynvml.nvmlInit()
        found = code_of("nvmlDeviceGetMemoryInfo", handle(), version=pynvml.nvmlMemory_v2)
        assert found == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        assert pynvml.nvmlDeviceGetMemoryInfo(handle()).used == GIB


def test_a_program_finds_it_as_it_finds_a_real_one(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "nvml")
    driver.show(gpu(temperature_c=91))
    program = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetTemperature(n.nvmlDeviceGetHandleByIndex(0), 0))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | driver.environment,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    )
    assert found.stdout == "91\n"


def test_it_is_never_taken_for_the_one_of_the_machine(driver: Driver) -> None:  # noqa: ARG001
    with contextlib.suppress(OSError):
        assert not hasattr(ctypes.CDLL(NAME), "fakeUsers")


def test_it_is_compiled_once() -> None:
    made = library().stat().st_mtime_ns
    library.__globals__["_built"].cache_clear()
    assert library().stat().st_mtime_ns == made
