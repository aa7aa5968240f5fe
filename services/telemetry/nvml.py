"""GPU samples from NVML: its sessions, the list of the GPUs, and the events of each.

A session lasts from `nvmlInit` to `nvmlShutdown`. It ends when the driver fails, since only the next one sees a driver
that was loaded again; and at intervals while a GPU is lost, since only the next one may see that GPU after a reset. It
never ends while a call is in flight, which has a handle of it.

GPUs are listed by index and known by UUID. NVML could find one by its UUID, but documents that as failing if any GPU is
lost. A GPU that cannot be reached costs only itself.

Calls block and may hang: `gpus` calls each GPU in its own thread. NVML itself is thread-safe.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any, Final

from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState
from rolloutmq.services.telemetry.gpus import NoGpuError
from rolloutmq.services.telemetry.nvml_device import Device, driver_errors, lost_errors, text

logger = logging.getLogger(__name__)

XID_EVENT: Final = 0x8
XIDS_KEPT: Final = 256
"""Maximum number of distinct critical errors kept for one GPU; NVIDIA lists fewer."""
RENEW_ROUNDS: Final = 30
"""Listings between two sessions while a GPU is lost. A new session takes up to seconds where the driver unloads a GPU
that nobody has open."""


class Nvml:
    """NVML of this host. Initialized at the first call and again after a failure: a driver may come later."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._nvml: Any = None
        self._lock = threading.Lock()
        self._in_flight = 0
        self._rounds_lost = 0
        self._handles: dict[str, Any] = {}
        self._listed: dict[str, int] = {}
        self._indexes: dict[str, int] = {}
        self._events: dict[str, Any] = {}
        self._xids: dict[str, tuple[int, ...]] = {}
        self._lost: dict[str, str] = {}
        self.unreached: dict[int, str] = {}
        """GPUs of the last listing that cannot be reached: the reason by index."""

    def uuids(self) -> tuple[str, ...]:
        """Return the GPUs the driver can reach.

        Raises:
            NoGpuError: There is no driver, or it lists no GPU.
        """
        import pynvml

        self._rounds_lost = self._rounds_lost + 1 if self._lost else 0
        if self._rounds_lost >= RENEW_ROUNDS:
            self._rounds_lost = 0
            self.close()
        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            count = int(pynvml.nvmlDeviceGetCount())
            found = self._list(pynvml, count)
        except pynvml.NVMLError as error:
            self.close()
            raise NoGpuError(str(error)) from None
        if not found:
            reasons = ", ".join(dict.fromkeys(self.unreached.values()))
            raise NoGpuError(
                f"none of {count} GPUs can be reached ({reasons})" if count else "the driver lists no GPU"
            )
        return found

    def read(self, uuid: str, number: int, now: float) -> GpuSample:
        """Sample a GPU that was listed before. Blocks as long as the driver does."""
        with self._calling(uuid) as (nvml, handle):
            if nvml is None:
                return self._sample(uuid, number, now, state=GpuState.SILENT, why="the driver does not reply")
            if handle is None:
                state = GpuState.LOST if uuid in self._lost else GpuState.SILENT
                why = self._lost.get(uuid, "the driver does not list it")
                return self._sample(uuid, number, now, state=state, why=why)
            try:
                return self._read(Device(nvml, handle), uuid, number, now)
            except lost_errors(nvml) as error:
                self._lost[uuid] = str(error)
                self._forget_events(nvml, uuid)
                return self._sample(uuid, number, now, state=GpuState.LOST, why=str(error))
            except nvml.NVMLError as error:
                return self._sample(uuid, number, now, state=GpuState.SILENT, why=str(error))

    def close(self) -> None:
        """End the session, unless a call is in flight. The next listing begins another one."""
        with self._lock:
            nvml = self._nvml
            if nvml is None or self._in_flight:
                return
            self._nvml = None
            self._handles.clear()
        for uuid in tuple(self._events):
            self._forget_events(nvml, uuid)
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()

    @contextlib.contextmanager
    def _calling(self, uuid: str) -> Iterator[tuple[Any, Any]]:
        """Keep the session for a call; yield the bindings and the handle, None without one."""
        with self._lock:
            self._in_flight += 1
            found = self._nvml, self._handles.get(uuid)
        try:
            yield found
        finally:
            with self._lock:
                self._in_flight -= 1

    def _list(self, nvml: Any, count: int) -> tuple[str, ...]:
        """Look up each GPU by its index. One that fails without being lost stays listed, and `read` tells its state."""
        known = {index: uuid for uuid, index in self._listed.items()}
        found: dict[str, int] = {}
        failed: dict[int, Exception] = {}
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = text(nvml.nvmlDeviceGetUUID(handle))
            except driver_errors(nvml):
                raise
            except nvml.NVMLError as error:
                failed[index] = error
            else:
                found[uuid] = index
                self._handles[uuid] = handle
        for index, why in failed.items():
            if self.unreached.get(index) != str(why):
                logger.warning("gpu not reached index=%d error=%s", index, why)
            if not isinstance(why, lost_errors(nvml)) and index in known:
                found.setdefault(known[index], index)
        self.unreached = {index: str(why) for index, why in failed.items()}
        self._listed = found
        self._indexes.update(found)
        return tuple(sorted(found, key=lambda uuid: found[uuid]))

    def _read(self, device: Device, uuid: str, number: int, now: float) -> GpuSample:
        facts = device.facts()
        if self._lost.pop(uuid, None) is not None:
            # It was reset: earlier faults are over.
            self._xids.pop(uuid, None)
        self._hear_xids(device, uuid)
        if all(fact in {None, ""} for what, fact in facts.items() if what != "mig"):
            # A GPU about to be lost returns an error of its own for every field.
            facts |= {"state": GpuState.SILENT, "why": "the driver reports no value"}
        return self._sample(uuid, number, now, **facts)

    def _sample(self, uuid: str, number: int, now: float, **facts: Any) -> GpuSample:
        shared: dict[str, Any] = {"host": self._host, "index": self._indexes.get(uuid, 0), "name": ""}
        return GpuSample(uuid=uuid, number=number, at=now, xids=self._xids.get(uuid, ()), **(shared | facts))

    def _hear_xids(self, device: Device, uuid: str) -> None:
        """Collect the critical errors since the last call; they stay until the GPU was lost and returned."""
        if uuid not in self._events:
            events = device.ask("nvmlEventSetCreate")
            self._events[uuid] = events
            if events is not None and not device.registers(XID_EVENT, events):
                device.ask("nvmlEventSetFree", events)
                self._events[uuid] = None  # unsupported by this device, or not permitted
        events = self._events[uuid]
        while events is not None and (event := device.ask("nvmlEventSetWait_v2", events, 0)) is not None:
            if int(event.eventType) & XID_EVENT:
                known = self._xids.get(uuid, ())
                self._xids[uuid] = tuple(sorted({*known, int(event.eventData)}))[:XIDS_KEPT]

    def _forget_events(self, nvml: Any, uuid: str) -> None:
        events = self._events.pop(uuid, None)
        if events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)
