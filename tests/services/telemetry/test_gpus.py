"""A driver that hangs costs its own GPU a sample, and nobody else anything."""

import asyncio
import threading

import pytest

from rolloutmq.schemas.wire.telemetry import GpuAbsence, GpuSample
from rolloutmq.services.telemetry.gpus import GpuProbe, NoGpuError

SHORT_S = 0.05


class Backend:
    """GPUs of which each can be made to hang, `""` being the list of them."""

    def __init__(self, *uuids: str) -> None:
        self.listed: tuple[str, ...] = uuids
        self.absent = ""
        self.broken = ""
        self.calls: list[str] = []
        self.hangs: dict[str, threading.Event] = {}

    def hang(self, key: str) -> threading.Event:
        return self.hangs.setdefault(key, threading.Event())

    def uuids(self) -> tuple[str, ...]:
        self._wait("")
        if self.absent:
            raise NoGpuError(self.absent)
        return self.listed

    def read(self, uuid: str, number: int, now: float) -> GpuSample:
        self._wait(uuid)
        if uuid == self.broken:
            raise TypeError("bad binding")
        return GpuSample(uuid=uuid, number=number, at=now, name="n", utilisation_percent=float(number))

    def _wait(self, key: str) -> None:
        self.calls.append(key)
        if key in self.hangs:
            self.hangs[key].wait()


async def states(probe: GpuProbe, number: int = 1, now: float = 0.0) -> dict[str, str]:
    samples = await probe.sample(number, now)
    assert not isinstance(samples, GpuAbsence)
    return {sample.uuid: f"{sample.state} {sample.why}".strip() for sample in samples}


async def test_every_gpu_is_sampled_under_the_number_of_the_round() -> None:
    samples = await GpuProbe(Backend("GPU-1", "GPU-2"), "h").sample(7, 2.5)

    assert not isinstance(samples, GpuAbsence)
    assert [(one.uuid, one.number, one.at) for one in samples] == [("GPU-1", 7, 2.5), ("GPU-2", 7, 2.5)]


async def test_a_machine_without_gpus_says_why() -> None:
    backend = Backend()
    backend.absent = "Driver Not Loaded"

    assert await GpuProbe(backend, "h").sample(1, 2.0) == GpuAbsence(
        host="h", number=1, at=2.0, why="Driver Not Loaded"
    )


async def test_a_gpu_that_hangs_is_asked_once_and_the_others_go_on() -> None:
    backend = Backend("GPU-1", "GPU-2")
    released = backend.hang("GPU-1")
    probe = GpuProbe(backend, "h", SHORT_S)
    try:
        assert await states(probe, 1, 100.0) == {
            "GPU-1": "silent no reply from the driver for 0 s",
            "GPU-2": "ok",
        }
        assert await states(probe, 2, 107.0) == {
            "GPU-1": "silent no reply from the driver for 7 s",
            "GPU-2": "ok",
        }
        assert backend.calls.count("GPU-1") == 1
        assert backend.calls.count("GPU-2") == 2
    finally:
        released.set()
    async with asyncio.timeout(30):
        while (await states(probe, 3, 108.0))["GPU-1"] != "ok":
            pass
    samples = await probe.sample(9, 109.0)
    assert not isinstance(samples, GpuAbsence)
    # What the stuck call said in the end is not passed off as news.
    assert samples[0].utilisation_percent == 9.0


async def test_a_list_that_hangs_leaves_the_known_gpus_sampled() -> None:
    backend = Backend("GPU-1")
    probe = GpuProbe(backend, "h", SHORT_S)
    assert await states(probe) == {"GPU-1": "ok"}
    released = backend.hang("")
    try:
        assert await states(probe, 2, 1.0) == {"GPU-1": "ok"}
    finally:
        released.set()


async def test_a_driver_that_hangs_from_the_start_is_an_absence_with_a_reason() -> None:
    backend = Backend("GPU-1")
    released = backend.hang("")
    try:
        answer = await GpuProbe(backend, "h", SHORT_S).sample(1, 0.0)
    finally:
        released.set()
    assert isinstance(answer, GpuAbsence)
    assert "no reply from the driver" in answer.why


async def test_a_gpu_that_is_listed_no_more_is_lost_and_stays_known() -> None:
    backend = Backend("GPU-1", "GPU-2")
    probe = GpuProbe(backend, "h")
    await states(probe)
    backend.listed = ("GPU-2",)

    assert await states(probe, 2) == {"GPU-2": "ok", "GPU-1": "lost no longer listed by the driver"}


async def test_a_driver_that_is_gone_loses_no_gpu() -> None:
    backend = Backend("GPU-1")
    probe = GpuProbe(backend, "h")
    await states(probe)
    backend.absent = "Driver Not Loaded"
    backend.broken = "GPU-1"

    found = await states(probe, 2)

    assert found == {"GPU-1": "silent TypeError: bad binding"}


async def test_a_probe_that_raises_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend("GPU-1", "GPU-2")
    backend.broken = "GPU-2"

    assert await states(GpuProbe(backend, "h")) == {"GPU-1": "ok", "GPU-2": "silent TypeError: bad binding"}
    assert "probe failed key=GPU-2" in caplog.text
