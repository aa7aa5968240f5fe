"""Where samples come from: psutil for the host and the processes of the run, NVML for the GPUs.

A probe never takes the service down with it: a process that is gone is left out, a machine without a GPU or a driver
gives a `GpuAbsence` that says why, and a driver that hangs is asked in a thread of its own, one call at a time, so that
the caller waits no longer than its deadline. A number that a device does not tell is NaN, or 0 where it is a count.
"""

import asyncio
import contextlib
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.telemetry import GpuAbsence, GpuSample, HostSample, ProcessSample
from rolloutmq.services.orchestrator.identity import alive

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 2.0
"""NVML answers in milliseconds; a driver that takes this long is in trouble, which is the news."""
SHM: Final = Path("/dev/shm")

GpuAnswer = tuple[GpuSample, ...] | GpuAbsence


def host_name() -> str:
    """Return the name of this host, fit for a topic."""
    return socket.gethostname() or "localhost"


class HostProbe:
    """CPU, memory, shared memory and disk of this host.

    Args:
        disk: A directory of the disk that the run writes to.
    """

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._host = host_name()
        psutil.cpu_percent(None)  # The first call only sets the start of the interval.

    def sample(self, number: int, now: float) -> HostSample:
        """Return the state of the host; CPU is the mean since the last sample."""
        memory = psutil.virtual_memory()
        return HostSample(
            host=self._host,
            number=number,
            at=now,
            cpus=psutil.cpu_count() or 1,
            cpu_percent=psutil.cpu_percent(None),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            shm_free_bytes=_free_bytes(SHM),
            disk_free_bytes=_free_bytes(self._disk),
            load_1m=psutil.getloadavg()[0],
        )


def _free_bytes(path: Path) -> int:
    try:
        return int(psutil.disk_usage(str(path)).free)
    except OSError:
        return 0


class ProcessProbe:
    """CPU and memory of the run's processes, told apart by their whole identity: no stranger is ever sampled."""

    def __init__(self) -> None:
        self._known: dict[ProcessIdentity, psutil.Process] = {}

    def sample(self, processes: Iterable[ProcessIdentity], number: int, now: float) -> list[ProcessSample]:
        """Return a sample of each process that lives; the first of a process has 0 CPU."""
        living = [one for one in processes if alive(one)]
        self._known = {one: self._known[one] for one in living if one in self._known}
        samples = []
        for one in living:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                samples.append(self._one(one, number, now))
        return samples

    def _one(self, one: ProcessIdentity, number: int, now: float) -> ProcessSample:
        process = self._known.get(one) or self._known.setdefault(one, psutil.Process(one.pid))
        with process.oneshot():
            return ProcessSample(
                name=one.name,
                pid=one.pid,
                number=number,
                at=now,
                cpu_percent=process.cpu_percent(None),
                rss_bytes=process.memory_info().rss,
            )


class GpuProbe(Protocol):
    """Where GPU samples come from. May block and may hang; never raises for a machine without GPUs."""

    def sample(self, number: int, now: float) -> GpuAnswer:
        """Return one sample for each GPU, or why there is none."""
        ...


class NvmlProbe:
    """GPUs by NVML. Starts it at the first sample and again after it failed, so a driver may come later.

    Not thread-safe: ask it through `BoundedGpuProbe`, which never has two calls under way.
    """

    def __init__(self) -> None:
        self._host = host_name()
        self._nvml: Any = None

    def sample(self, number: int, now: float) -> GpuAnswer:
        import pynvml

        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            count = pynvml.nvmlDeviceGetCount()
            samples = tuple(_gpu(pynvml, index, number, now) for index in range(count))
        except pynvml.NVMLError as error:
            self._nvml = None
            return GpuAbsence(host=self._host, number=number, at=now, why=str(error))
        if not samples:
            return GpuAbsence(host=self._host, number=number, at=now, why="the driver lists no GPU")
        return samples


def _gpu(nvml: Any, index: int, number: int, now: float) -> GpuSample:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def told(ask: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return ask()
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return otherwise

    memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(device), None)
    return GpuSample(
        uuid=_text(nvml.nvmlDeviceGetUUID(device)),
        number=number,
        at=now,
        name=_text(nvml.nvmlDeviceGetName(device)),
        utilisation_percent=float(told(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu, math.nan)),
        memory_used_bytes=memory.used if memory else 0,
        memory_total_bytes=memory.total if memory else 0,
        temperature_c=float(
            told(lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU), math.nan)
        ),
        clock_event_reasons=told(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(device), 0),
    )


def _text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class BoundedGpuProbe:
    """Ask a probe that may hang, from an event loop, for no longer than `timeout_s`.

    Each call has its own daemon thread, since a thread stuck in a driver can be neither cancelled nor joined. While
    one is stuck no other is started: the answer is an absence that says for how long.
    """

    def __init__(self, probe: GpuProbe, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._probe = probe
        self._timeout_s = timeout_s
        self._host = host_name()
        self._call: asyncio.Future[GpuAnswer] | None = None
        self._asked_at = 0.0

    async def sample(self, number: int, now: float) -> GpuAnswer:
        """Return the samples, or an absence. Cancellation leaves a call under way, to be picked up by the next."""
        if self._call is None:
            self._asked_at = now
            self._call = self._start(number, now)
        done, _ = await asyncio.wait([self._call], timeout=self._timeout_s)
        if not done:
            why = f"the driver has not answered for {max(now - self._asked_at, 0) + self._timeout_s:.0f} s"
            return GpuAbsence(host=self._host, number=number, at=now, why=why)
        call, self._call = self._call, None
        return call.result()

    def _start(self, number: int, now: float) -> "asyncio.Future[GpuAnswer]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[GpuAnswer] = loop.create_future()

        def ask() -> None:
            try:
                result = self._probe.sample(number, now)
            except Exception as error:  # The boundary of the thread.
                logger.exception("gpu probe failed")
                why = f"{type(error).__name__}: {error}"
                result = GpuAbsence(host=self._host, number=number, at=now, why=why)
            # Without a loop nobody waits for the answer any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answer, result)

        threading.Thread(target=ask, name="gpu-probe", daemon=True).start()
        return answer


def _settle(answer: "asyncio.Future[GpuAnswer]", result: GpuAnswer) -> None:
    if not answer.done():
        answer.set_result(result)
