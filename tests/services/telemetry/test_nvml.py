"""Every field is read on drivers of any age; a lost GPU is news, and what is not told is neither good nor bad."""

import asyncio
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from tests.services.nvml.driver import GIB, Driver, Gpu, Instance, Memory, gpu

from rolloutmq.bus.encoding import codec
from rolloutmq.schemas.wire.telemetry import GpuAbsence, GpuSample, GpuState
from rolloutmq.services.telemetry.gpus import GpuProbe, NoGpuError
from rolloutmq.services.telemetry.nvml import RENEW_ROUNDS, Nvml


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """A driver with one GPU that tells everything."""
    driver = Driver(tmp_path / "nvml")
    driver.show(gpu("GPU-1"))
    return driver


@pytest.fixture
def library(driver: Driver) -> Iterator[ctypes.CDLL]:
    """The library of the driver, under the bindings."""
    with driver.installed() as library:
        yield library


@pytest.fixture
def nvml(library: ctypes.CDLL) -> Nvml:  # noqa: ARG001
    nvml = Nvml("h")
    assert nvml.uuids() == ("GPU-1",)
    return nvml


def read(nvml: Nvml, uuid: str = "GPU-1") -> GpuSample:
    return nvml.read(uuid, 1, 0.0)


def returned(nvml: Nvml, uuid: str = "GPU-1") -> GpuSample:
    """Return the first sample of a GPU from the session after a loss."""
    for _ in range(RENEW_ROUNDS):
        try:
            nvml.uuids()
        except NoGpuError:
            continue
    return read(nvml, uuid)


def test_a_gpu_is_read_field_by_field(driver: Driver, nvml: Nvml) -> None:
    driver.change(
        "GPU-1",
        memory=Memory(total=80 * GIB, reserved=GIB, used=3 * GIB),
        utilisation_percent=87,
        temperature_c=91,
        margin_c=-3,
        reasons=4,
        ecc=(2, 7),
        remapped=(0, 0, 1, 0),
        recovery=3,
    )
    sample = nvml.read("GPU-1", 3, 5.0)

    assert (sample.uuid, sample.number, sample.at, sample.host) == ("GPU-1", 3, 5.0, "h")
    assert (sample.name, sample.state, sample.mig) == ("H100", GpuState.OK, False)
    assert (sample.utilisation_percent, sample.temperature_c, sample.margin_c) == (87.0, 91.0, -3.0)
    assert (sample.memory_used_bytes, sample.memory_free_bytes) == (3 * GIB, 76 * GIB)
    assert (sample.memory_total_bytes, sample.memory_reserved_bytes) == (80 * GIB, GIB)
    # Of the memory errors, those since the driver was loaded.
    assert (sample.clock_event_reasons, sample.ecc_uncorrected, sample.recovery_action) == (4, 2, 3)
    assert (sample.remap_pending, sample.remap_failed) == (True, False)


def test_a_row_that_could_not_be_replaced_is_told(driver: Driver, nvml: Nvml) -> None:
    driver.change("GPU-1", remapped=(0, 3, 0, 1))
    sample = read(nvml)
    assert (sample.remap_pending, sample.remap_failed) == (False, True)


def test_what_a_gpu_does_not_tell_is_none_and_travels(driver: Driver, nvml: Nvml) -> None:
    driver.show(Gpu("GPU-1", name="Bare"))
    sample = read(nvml)

    assert sample.state is GpuState.OK
    assert (sample.utilisation_percent, sample.temperature_c, sample.margin_c) == (None, None, None)
    told = (sample.memory_used_bytes, sample.clock_event_reasons, sample.ecc_uncorrected, sample.remap_failed)
    assert told == (None, None, None, None)
    assert sample.recovery_action is None
    assert codec.decode_event(codec.encode(sample)) is not None


def test_a_gpu_that_tells_nothing_at_all_is_silent(driver: Driver, nvml: Nvml) -> None:
    driver.show(Gpu("GPU-1"))
    assert (read(nvml).state, read(nvml).why) == (GpuState.SILENT, "the driver reports no value")


def test_a_value_that_may_not_be_read_costs_only_its_field(driver: Driver, nvml: Nvml) -> None:
    refused = dict.fromkeys(
        ["nvmlDeviceGetTotalEccErrors", "nvmlDeviceRegisterEvents", "nvmlDeviceGetPowerUsage"],
        pynvml.NVML_ERROR_NO_PERMISSION,
    )
    driver.change("GPU-1", fails=refused)
    sample = read(nvml)
    assert (sample.state, sample.ecc_uncorrected, sample.temperature_c) == (GpuState.OK, None, 40.0)


def test_an_older_driver_is_asked_under_the_older_names(tmp_path: Path) -> None:
    older = Driver(
        tmp_path / "older",
        lacks=[
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetMarginTemperature",
        ],
    )
    older.show(gpu(memory=Memory(used=3 * GIB), reasons=4, temperature_c=61, slowdown_c=90))
    with older.installed():
        nvml = Nvml("h")
        nvml.uuids()
        sample = read(nvml)

    assert sample.clock_event_reasons == 4
    # The older form counts what is reserved as used.
    used = sample.memory_used_bytes, sample.memory_free_bytes, sample.memory_reserved_bytes
    assert used == (4 * GIB, 76 * GIB, None)
    # What it does tell is where it slows down; nobody else's degrees are taken instead.
    assert sample.margin_c == 90 - 61


def test_a_driver_that_lacks_whole_functions_costs_their_fields(tmp_path: Path) -> None:
    older = Driver(
        tmp_path / "older",
        lacks=[
            *("nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMigMode"),
            *("nvmlEventSetWait_v2", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetTemperatureThreshold"),
        ],
    )
    older.show(gpu(temperature_c=61, xids=(), margin_c=None))
    with older.installed():
        nvml = Nvml("h")
        nvml.uuids()
        older.change("GPU-1", xids=(79,))
        sample = read(nvml)
    assert (sample.state, sample.temperature_c, sample.xids, sample.mig) == (GpuState.OK, 61.0, (), False)
    told = sample.remap_failed, sample.recovery_action, sample.ecc_uncorrected, sample.margin_c
    assert told == (None, None, None, None)


def test_a_driver_that_refuses_the_newer_structure_is_asked_for_the_older_one(
    driver: Driver, nvml: Nvml
) -> None:
    refused = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    driver.change("GPU-1", memory=Memory(used=3 * GIB), fails={"nvmlDeviceGetMemoryInfo_v2": refused})
    assert (read(nvml).memory_used_bytes, read(nvml).memory_reserved_bytes) == (4 * GIB, None)


def test_bindings_without_the_newer_names_do_as_well(
    driver: Driver, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.change("GPU-1", reasons=4, temperature_c=61, slowdown_c=90)
    for name in (
        *("nvmlMemory_v2", "nvmlDeviceGetMarginTemperature", "nvmlDeviceGetCurrentClocksEventReasons"),
        *("NVMLError_ResetRequired", "NVMLError_LibRmVersionMismatch"),
    ):
        monkeypatch.delattr(pynvml, name)
    sample = read(nvml)
    assert (sample.clock_event_reasons, sample.margin_c, sample.memory_reserved_bytes) == (4, 29.0, None)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"lost": True}, "GPU is lost"),
        ({"fails": {"*": pynvml.NVML_ERROR_RESET_REQUIRED}}, "GPU requires restart"),
    ],
)
def test_a_lost_gpu_is_a_sample_and_no_silence(
    driver: Driver, nvml: Nvml, facts: dict[str, object], why: str
) -> None:
    driver.change("GPU-1", **facts)
    for _ in range(2 * RENEW_ROUNDS):  # also in the sessions after the one that lost it
        assert (read(nvml).state, read(nvml).why) == (GpuState.LOST, why)
        with pytest.raises(NoGpuError, match=rf"none of 1 GPUs can be reached \({why}\)"):
            nvml.uuids()

    driver.change("GPU-1", lost=False, fails={})  # it was reset
    assert returned(nvml).state is GpuState.OK


def test_a_session_that_lost_a_gpu_is_ended_and_leaves_nothing(
    driver: Driver, nvml: Nvml, library: ctypes.CDLL
) -> None:
    for _ in range(3):
        assert read(nvml).state is GpuState.OK
        assert (library.fakeUsers(), library.fakeEventSets()) == (1, 1)
        driver.change("GPU-1", lost=True)
        assert read(nvml).state is GpuState.LOST
        assert library.fakeEventSets() == 0
        driver.change("GPU-1", lost=False)
        assert returned(nvml).state is GpuState.OK
    nvml.close()
    assert (library.fakeUsers(), library.fakeEventSets()) == (0, 0)
    assert nvml.uuids() == ("GPU-1",)


def test_a_lost_gpu_takes_no_other_with_it(driver: Driver, nvml: Nvml) -> None:
    driver.show(gpu("GPU-1"), gpu("GPU-2"))
    assert nvml.uuids() == ("GPU-1", "GPU-2")
    driver.change("GPU-1", lost=True)
    for _ in range(2 * RENEW_ROUNDS):
        assert nvml.uuids() == ("GPU-2",)
        assert read(nvml, "GPU-1").state is GpuState.LOST
        assert read(nvml, "GPU-2").state is GpuState.OK


async def test_a_gpu_that_may_not_be_opened_hides_no_other(
    driver: Driver, nvml: Nvml, caplog: pytest.LogCaptureFixture
) -> None:
    refused = {"nvmlDeviceGetHandleByIndex_v2": pynvml.NVML_ERROR_NO_PERMISSION}
    driver.show(gpu("GPU-0", fails=refused), gpu("GPU-1"))
    probe = GpuProbe(nvml, "h")
    for number in range(3):
        samples = await probe.sample(number, 0.0)
        assert not isinstance(samples, GpuAbsence)
        assert [(one.uuid, one.state) for one in samples] == [("GPU-1", GpuState.OK)]
    assert nvml.unreached == {0: "Insufficient Permissions"}
    assert caplog.text.count("gpu not reached index=0 error=Insufficient Permissions") == 1


async def test_a_gpu_that_fails_for_a_moment_is_not_lost(driver: Driver, nvml: Nvml) -> None:
    driver.show(gpu("GPU-1"), gpu("GPU-2"))
    probe = GpuProbe(nvml, "h")
    await probe.sample(1, 0.0)
    for number in range(2, 5):
        driver.change("GPU-1", fails={"*": pynvml.NVML_ERROR_UNKNOWN})
        samples = await probe.sample(number, 0.0)
        assert not isinstance(samples, GpuAbsence)
        states = {one.uuid: one.state for one in samples}
        assert states == {"GPU-1": GpuState.SILENT, "GPU-2": GpuState.OK}


def test_critical_errors_stay_told_until_it_was_reset(driver: Driver, nvml: Nvml) -> None:
    assert read(nvml).xids == ()
    driver.change("GPU-1", xids=(48, 31, 48))
    assert read(nvml).xids == (31, 48)
    assert read(nvml).xids == (31, 48)
    driver.change("GPU-1", lost=True)
    assert read(nvml).xids == (31, 48)
    driver.change("GPU-1", lost=False)
    assert returned(nvml).xids == ()
    driver.change("GPU-1", xids=(48, 31, 48, 79))
    assert read(nvml).xids == (79,)


def test_errors_from_before_the_start_are_not_told(driver: Driver, nvml: Nvml) -> None:
    driver.change("GPU-1", xids=(79,))
    assert read(nvml).xids == ()


def test_many_errors_of_applications_hide_no_critical_one(driver: Driver, nvml: Nvml) -> None:
    read(nvml)
    for first in range(0, 100, 10):
        driver.change("GPU-1", xids=())
        read(nvml)
        driver.change("GPU-1", xids=tuple(range(first, first + 10)))
        read(nvml)
    driver.change("GPU-1", xids=())
    read(nvml)
    driver.change("GPU-1", xids=(119,))
    assert 119 in read(nvml).xids


@pytest.mark.parametrize("refused", [0, pynvml.NVML_ERROR_NO_PERMISSION])
def test_a_divided_gpu_says_so_and_its_instances_are_not_listed(
    driver: Driver, nvml: Nvml, refused: int
) -> None:
    names = "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"
    driver.change(
        "GPU-1",
        mig=True,
        instances=(Instance("MIG-1", Memory(20 * GIB)),),
        fails=dict.fromkeys(names, refused) if refused else {},
    )
    sample = read(nvml)

    assert nvml.uuids() == ("GPU-1",)
    assert (sample.state, sample.mig) == (GpuState.OK, True)
    assert sample.utilisation_percent is None
    # The memory of all of it, for those who may see the other instances.
    assert sample.memory_free_bytes == (None if refused else 79 * GIB)


def test_a_gpu_is_its_uuid_wherever_it_is_listed(driver: Driver, nvml: Nvml) -> None:
    one, other = gpu("GPU-1", temperature_c=91), Gpu("GPU-2", name="Other", temperature_c=20)
    driver.show(one, other)
    assert nvml.uuids() == ("GPU-1", "GPU-2")
    driver.change("GPU-1", lost=True)
    nvml.uuids()
    assert read(nvml).state is GpuState.LOST

    driver.show(other, one)  # after a reset
    moved = returned(nvml)
    assert nvml.uuids() == ("GPU-2", "GPU-1")
    assert (moved.state, moved.index, moved.name, moved.temperature_c) == (GpuState.OK, 1, "H100", 91.0)
    there = read(nvml, "GPU-2")
    assert (there.index, there.temperature_c) == (0, 20.0)


def test_a_machine_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", absent)
    with pytest.raises(NoGpuError, match="NVML Shared Library Not Found"):
        Nvml("h").uuids()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "NVML/RM version mismatch"),
    ],
)
def test_a_machine_without_a_driver_says_why_until_there_is_one(
    driver: Driver,
    library: ctypes.CDLL,
    code: int,
    why: str,
) -> None:
    driver.fail(code)
    nvml = Nvml("h")
    for _ in range(3):
        with pytest.raises(NoGpuError, match=why):
            nvml.uuids()
    assert read(nvml).state is GpuState.SILENT
    driver.back()
    assert nvml.uuids() == ("GPU-1",)
    assert library.fakeUsers() == 1


def test_a_driver_that_goes_while_it_is_used_is_started_again(
    driver: Driver, nvml: Nvml, library: ctypes.CDLL
) -> None:
    read(nvml)
    driver.fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert (read(nvml).state, read(nvml).why) == (GpuState.SILENT, "Driver Not Loaded")
    with pytest.raises(NoGpuError, match="Driver Not Loaded"):
        nvml.uuids()
    driver.back()

    assert nvml.uuids() == ("GPU-1",)
    assert read(nvml).state is GpuState.OK
    assert library.fakeUsers() == 1


def test_a_machine_with_a_driver_and_no_gpu_says_so(driver: Driver, library: ctypes.CDLL) -> None:  # noqa: ARG001
    driver.show()
    with pytest.raises(NoGpuError, match="the driver lists no GPU"):
        Nvml("h").uuids()


async def test_a_driver_that_hangs_is_an_absence_until_it_goes_on(
    driver: Driver, library: ctypes.CDLL
) -> None:
    driver.stick()
    probe = GpuProbe(Nvml("h"), "h", timeout_s=0.5)
    try:
        absence = await probe.sample(1, 0.0)
    finally:
        driver.back()
    assert isinstance(absence, GpuAbsence)
    assert absence.why == "no reply from the driver for 0 s"
    async with asyncio.timeout(60):
        while isinstance(absence, GpuAbsence):
            await asyncio.sleep(0)  # With a call in flight the probe itself waits for nothing.
            absence = await probe.sample(2, 1.0)
    assert [one.state for one in absence] == [GpuState.OK]
    assert library.fakeUsers() == 1


async def test_a_call_that_hangs_costs_its_gpu_the_samples_and_no_other(
    driver: Driver, nvml: Nvml, library: ctypes.CDLL
) -> None:
    driver.show(gpu("GPU-1"), gpu("GPU-2"), gpu("GPU-3"))
    probe = GpuProbe(nvml, "h", timeout_s=3.0)

    async def states() -> dict[str, GpuState]:
        samples = await probe.sample(1, 0.0)
        assert not isinstance(samples, GpuAbsence)
        return {one.uuid: one.state for one in samples}

    assert set((await states()).values()) == {GpuState.OK}
    driver.change("GPU-1", hangs=("nvmlDeviceGetTotalEccErrors",))
    try:
        hung = {"GPU-1": GpuState.SILENT, "GPU-2": GpuState.OK, "GPU-3": GpuState.OK}
        assert await states() == hung
        # The session of a call in flight is not ended, even while another GPU is lost.
        driver.change("GPU-3", lost=True)
        for _ in range(RENEW_ROUNDS + 1):
            assert await states() == hung | {"GPU-3": GpuState.LOST}
        assert library.fakeUsers() == 1
    finally:
        driver.change("GPU-1", hangs=())
    async with asyncio.timeout(60):
        while (await states())["GPU-1"] is not GpuState.OK:
            pass


def test_the_bindings_have_the_numbers_that_are_asked_for() -> None:
    assert pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == 230
    assert pynvml.nvmlEventTypeXidCriticalError == 8
    assert (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC) == (1, 0)
    assert (pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN) == (0, 1)


def test_the_driver_of_this_machine_answers_or_is_absent() -> None:
    nvml = Nvml("h")
    try:
        uuids = nvml.uuids()
    except NoGpuError:
        uuids = ()
    assert all(read(nvml, uuid).state is GpuState.OK for uuid in uuids)
    nvml.close()
