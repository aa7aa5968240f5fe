"""Probes of the host and of the run's processes, with psutil. For GPUs see `gpus`.

A probe never ends the service: it skips a process that is gone.
"""

import contextlib
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.telemetry import HostSample, ProcessSample
from rolloutmq.services.process.identity import alive

SHM: Final = Path("/dev/shm")


def host_name() -> str:
    """Return the name of this host in a form valid in a topic."""
    return socket.gethostname() or "localhost"


@dataclass(frozen=True, slots=True)
class Disks:
    """Free bytes; 0 if unknown."""

    shm_free_bytes: int = 0
    disk_free_bytes: int = 0


class HostProbe:
    """CPU, memory, shared memory and disk of this host.

    Args:
        disk: A directory on the disk of the run.
    """

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._host = host_name()
        psutil.cpu_percent(None)  # The first call only starts the interval.

    def disks(self) -> Disks:
        """Return the free bytes. May hang with its file system."""
        return Disks(_free_bytes(SHM), _free_bytes(self._disk))

    def sample(self, number: int, now: float, disks: Disks) -> HostSample:
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
            shm_free_bytes=disks.shm_free_bytes,
            disk_free_bytes=disks.disk_free_bytes,
            load_1m=psutil.getloadavg()[0],
        )


def _free_bytes(path: Path) -> int:
    try:
        return int(psutil.disk_usage(str(path)).free)
    except OSError:
        return 0


class ProcessProbe:
    """CPU and memory of the run's processes, by their full identity: a reused pid is never sampled."""

    def __init__(self) -> None:
        self._known: dict[ProcessIdentity, psutil.Process] = {}

    def sample(self, processes: Iterable[ProcessIdentity], number: int, now: float) -> list[ProcessSample]:
        """Return a sample of each running process; the first of a process has 0 CPU."""
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
