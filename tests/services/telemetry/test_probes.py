"""Probes answer on any machine, and never wait for a driver that hangs."""

import asyncio
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rolloutmq.bus import codec
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.telemetry import GpuAbsence, GpuSample
from rolloutmq.services.orchestrator.identity import identify
from rolloutmq.services.telemetry.probes import (
    BoundedGpuProbe,
    GpuAnswer,
    HostProbe,
    NvmlProbe,
    ProcessProbe,
)


class NVMLError(Exception):
    """As in the bindings."""


class NotSupportedError(NVMLError):
    """As in the bindings."""


class NotFoundError(NVMLError):
    """As in the bindings."""


def fake_nvml(gpus: list[dict[str, Any]], init: Exception | None = None) -> Any:
    def field(name: str) -> Callable[..., Any]:
        def ask(gpu: dict[str, Any], *_: Any) -> Any:
            if name not in gpu:
                raise NotSupportedError("Not Supported")
            return gpu[name]

        return ask

    def start() -> None:
        if init is not None:
            raise init

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NotSupportedError,
        NVMLError_FunctionNotFound=NotFoundError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=start,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetUUID=field("uuid"),
        nvmlDeviceGetName=field("name"),
        nvmlDeviceGetMemoryInfo=field("memory"),
        nvmlDeviceGetUtilizationRates=field("rates"),
        nvmlDeviceGetTemperature=field("temperature"),
        nvmlDeviceGetCurrentClocksEventReasons=field("reasons"),
    )


def test_host_sample_is_plausible(tmp_path: Path) -> None:
    sample = HostProbe(tmp_path).sample(7, 12.5)

    assert (sample.number, sample.at) == (7, 12.5)
    assert sample.cpus >= 1
    assert 0 < sample.memory_used_bytes < sample.memory_total_bytes
    assert sample.disk_free_bytes > 0
    assert 0.0 <= sample.cpu_percent <= 100.0


def test_process_is_sampled_and_a_stranger_of_its_pid_is_not() -> None:
    myself = identify("me", Role.WORKER, os.getpid(), "token/me")
    stranger = msgspec.structs.replace(myself, name="other", start_ticks=myself.start_ticks + 1)
    probe = ProcessProbe()

    samples = probe.sample([myself, stranger], 1, 0.0)

    assert [(one.name, one.pid) for one in samples] == [("me", os.getpid())]
    assert samples[0].rss_bytes > 1 << 20
    assert probe.sample([], 2, 1.0) == []


def test_cpu_of_a_process_is_measured_from_one_sample_to_the_next() -> None:
    myself = identify("me", Role.WORKER, os.getpid(), "token/me")
    probe = ProcessProbe()
    first = probe.sample([myself], 1, 0.0)[0]

    sum(range(2_000_000))
    second = probe.sample([myself], 2, 1.0)[0]

    assert first.cpu_percent == 0.0
    assert second.cpu_percent > 0.0


def test_gpu_is_read_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(used=3, total=10)
    full = {
        "uuid": "GPU-1",
        "name": b"Tesla",
        "memory": memory,
        "rates": SimpleNamespace(gpu=87),
        "temperature": 61,
        "reasons": 4,
    }
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([full, {"uuid": "GPU-2", "name": "Bare"}]))

    answer = NvmlProbe().sample(3, 5.0)

    assert isinstance(answer, tuple)
    assert answer[0] == GpuSample(
        uuid="GPU-1",
        number=3,
        at=5.0,
        name="Tesla",
        utilisation_percent=87.0,
        memory_used_bytes=3,
        memory_total_bytes=10,
        temperature_c=61.0,
        clock_event_reasons=4,
    )
    assert answer[1].name == "Bare"
    assert math.isnan(answer[1].utilisation_percent)
    assert math.isnan(answer[1].temperature_c)
    assert answer[1].memory_total_bytes == 0
    assert isinstance(codec.decode_event(codec.encode(answer[1])), GpuSample)


def test_machine_without_a_driver_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake_nvml([], NVMLError("NVML Shared Library Not Found"))
    monkeypatch.setitem(sys.modules, "pynvml", broken)

    answer = NvmlProbe().sample(1, 2.0)

    assert isinstance(answer, GpuAbsence)
    assert "NVML Shared Library Not Found" in answer.why


def test_driver_that_comes_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = NvmlProbe()
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([]))
    assert isinstance(probe.sample(1, 0.0), GpuAbsence)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([{"uuid": "GPU-1", "name": "Late"}]))

    assert isinstance(probe.sample(2, 1.0), tuple)


def test_real_bindings_answer_on_this_machine() -> None:
    answer = NvmlProbe().sample(1, 0.0)

    assert isinstance(answer, GpuAbsence) or answer[0].uuid.startswith("GPU-")


class Hanging:
    """Hangs until released."""

    def __init__(self) -> None:
        self.calls = 0
        self.released = threading.Event()

    def sample(self, number: int, now: float) -> GpuAnswer:
        self.calls += 1
        self.released.wait()
        return GpuAbsence(host="h", number=number, at=now, why=f"call {self.calls}")


async def test_hanging_driver_is_waited_for_once_and_reported() -> None:
    hanging = Hanging()
    probe = BoundedGpuProbe(hanging, timeout_s=0.02)

    first = await probe.sample(1, 100.0)
    second = await probe.sample(2, 107.0)

    assert isinstance(first, GpuAbsence)
    assert isinstance(second, GpuAbsence)
    assert second.why == "the driver has not answered for 7 s"
    assert hanging.calls == 1
    hanging.released.set()
    async with asyncio.timeout(5):
        while (answer := await probe.sample(3, 108.0)) == second or "not answered" in str(answer):
            pass
    assert isinstance(answer, GpuAbsence)
    assert answer.why == "call 1"


async def test_probe_that_raises_is_an_absence(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def sample(self, number: int, now: float) -> GpuAnswer:
            raise TypeError(f"bad binding {number} {now:g}")

    answer = await BoundedGpuProbe(Broken()).sample(1, 0.0)

    assert isinstance(answer, GpuAbsence)
    assert answer.why == "TypeError: bad binding 1 0"
    assert "gpu probe failed" in caplog.text
