"""GPU samples from NVML, field by field, with drivers and bindings of any age.

A field that a device, a driver or the bindings lack is None, which is neither good nor bad. Only two errors mean that a
GPU is lost: it fell off the bus, or it must be reset before use. Any other error costs only its field. Newer names are
tried first, then older ones.

Calls block and may hang: `gpus` calls each GPU in its own thread. NVML itself is thread-safe.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState
from rolloutmq.services.telemetry.gpus import NoGpuError

logger = logging.getLogger(__name__)

RECOVERY_ACTION: Final = 230
"""Field with the recovery action of the GPU."""
XID_EVENT: Final = 0x8
XIDS_KEPT: Final = 32
"""Maximum number of distinct critical errors kept for one GPU."""
UNCORRECTED: Final = 1
VOLATILE: Final = 0
CORE_TEMPERATURE: Final = 0
SLOWDOWN_THRESHOLD: Final = 1

_T = TypeVar("_T")


class Nvml:
    """NVML of this host. Initialized at the first call and again after a failure: a driver may come later."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._indexes: dict[str, int] = {}
        self._events: dict[str, Any] = {}
        self._xids: dict[str, tuple[int, ...]] = {}
        self._lost: set[str] = set()

    def uuids(self) -> tuple[str, ...]:
        """Return the GPUs the driver can reach.

        Raises:
            NoGpuError: There is no driver, or it lists no GPU.
        """
        import pynvml

        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            count = pynvml.nvmlDeviceGetCount()
            found = tuple(uuid for index in range(count) if (uuid := self._at(pynvml, index)))
        except pynvml.NVMLError as error:
            self._nvml = None
            self._handles.clear()
            self._events.clear()
            raise NoGpuError(str(error)) from None
        if not found:
            raise NoGpuError(
                "the driver lists no GPU" if not count else f"none of {count} GPUs can be reached"
            )
        return found

    def read(self, uuid: str, number: int, now: float) -> GpuSample:
        """Sample a GPU that was listed before. Blocks as long as the driver does."""
        nvml = self._nvml
        if nvml is None:
            return self._sample(uuid, number, now, state=GpuState.SILENT, why="the driver does not reply")
        try:
            device = self._handles.get(uuid)
            if device is None:
                device = self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
            facts = self._facts(_Device(nvml, device), uuid)
            if all(fact in {None, ""} for what, fact in facts.items() if what != "mig"):
                # A GPU about to be lost returns an error of its own for every field.
                facts |= {"state": GpuState.SILENT, "why": "the driver reports no value"}
            return self._sample(uuid, number, now, **facts)
        except lost_errors(nvml) as error:
            # A handle from before a reset stays lost: look it up anew next time.
            self._handles.pop(uuid, None)
            self._events.pop(uuid, None)
            self._lost.add(uuid)
            return self._sample(uuid, number, now, state=GpuState.LOST, why=str(error))
        except nvml.NVMLError as error:
            self._handles.pop(uuid, None)
            return self._sample(uuid, number, now, state=GpuState.SILENT, why=str(error))

    def _at(self, nvml: Any, index: int) -> str:
        """Return the UUID of the GPU at an index, or an empty string if it cannot be reached."""
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(device))
        except lost_errors(nvml) as error:
            logger.warning("gpu not reached index=%d error=%s", index, error)
            return ""
        self._handles[uuid] = device
        self._indexes[uuid] = index
        return uuid

    def _sample(self, uuid: str, number: int, now: float, **facts: Any) -> GpuSample:
        shared: dict[str, Any] = {"host": self._host, "index": self._indexes.get(uuid, 0), "name": ""}
        return GpuSample(uuid=uuid, number=number, at=now, xids=self._xids.get(uuid, ()), **(shared | facts))

    def _facts(self, device: "_Device", uuid: str) -> dict[str, Any]:
        temperature = device.get("nvmlDeviceGetTemperature", CORE_TEMPERATURE)
        if uuid in self._lost:
            # It was reset: earlier faults are over.
            self._lost.discard(uuid)
            self._xids.pop(uuid, None)
        self._hear_xids(device, uuid)
        rates = device.get("nvmlDeviceGetUtilizationRates")
        remapped = device.get("nvmlDeviceGetRemappedRows")
        mig = device.get("nvmlDeviceGetMigMode")
        return {
            "name": _text(device.get("nvmlDeviceGetName") or ""),
            "utilisation_percent": None if rates is None else float(rates.gpu),
            "temperature_c": None if temperature is None else float(temperature),
            "margin_c": _margin(device, temperature),
            "clock_event_reasons": device.first(
                "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
            ),
            "ecc_uncorrected": device.get("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
            "remap_pending": None if remapped is None else bool(remapped[2]),
            "remap_failed": None if remapped is None else bool(remapped[3]),
            "recovery_action": device.field(RECOVERY_ACTION),
            "mig": mig is not None and bool(mig[0]),
            **_memory(device),
        }

    def _hear_xids(self, device: "_Device", uuid: str) -> None:
        """Collect the critical errors since the last call; they stay until the GPU was lost and returned."""
        if uuid not in self._events:
            events = device.ask("nvmlEventSetCreate")
            if events is not None and device.registers(XID_EVENT, events):
                self._events[uuid] = events
            else:
                self._events[uuid] = None  # unsupported by this device, or not permitted
        events = self._events[uuid]
        while events is not None and (event := device.ask("nvmlEventSetWait_v2", events, 0)) is not None:
            if int(event.eventType) & XID_EVENT:
                known = self._xids.get(uuid, ())
                self._xids[uuid] = tuple(sorted({*known, int(event.eventData)}))[:XIDS_KEPT]


class _Device:
    """One handle, with None for missing values; only a lost GPU and a failed driver raise."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._raised = (*lost_errors(nvml), *_known(nvml, "NVMLError_Uninitialized"))

    def get(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Query the device."""
        return self.ask(name, self._handle, *arguments, **options)

    def first(self, *names: str) -> Any:
        """Query under several names: return the first value."""
        return next((found for name in names if (found := self.get(name)) is not None), None)

    def ask(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Query the driver."""
        return self._answer(lambda: getattr(self._nvml, name)(*arguments, **options))

    def constant(self, name: str) -> Any:
        """Return a constant of the bindings, or None if they are older."""
        return getattr(self._nvml, name, None)

    def registers(self, kinds: int, events: Any) -> bool:
        """Return whether the device reports events of these kinds."""

        def register() -> bool:
            self._nvml.nvmlDeviceRegisterEvents(self._handle, kinds, events)
            return True

        return self._answer(register) is not None

    def field(self, number: int) -> int | None:
        """Return one of the numbered fields."""
        values = self.get("nvmlDeviceGetFieldValues", [number])
        if values is None or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal)

    def _answer(self, ask: Callable[[], _T]) -> _T | None:
        try:
            return ask()
        except self._raised:
            raise
        except (self._nvml.NVMLError, AttributeError, TypeError):
            # The last two: bindings without the function, or without one of its arguments.
            return None


def lost_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the errors of an unusable GPU."""
    return _known(nvml, "NVMLError_GpuIsLost", "NVMLError_ResetRequired")


def _known(nvml: Any, *names: str) -> tuple[type[Exception], ...]:
    return tuple(getattr(nvml, name) for name in names if hasattr(nvml, name))


def _memory(device: _Device) -> dict[str, int | None]:
    """Query the memory with reserved memory apart; the older query counts it as used."""
    version = device.constant("nvmlMemory_v2")
    memory = None if version is None else device.get("nvmlDeviceGetMemoryInfo", version=version)
    reserved = None if memory is None else int(memory.reserved)
    if memory is None:
        memory = device.get("nvmlDeviceGetMemoryInfo")
    if memory is None:
        return {}
    return {
        "memory_used_bytes": int(memory.used),
        "memory_free_bytes": int(memory.free),
        "memory_total_bytes": int(memory.total),
        "memory_reserved_bytes": reserved,
    }


def _margin(device: _Device, temperature: int | None) -> float | None:
    """Query the thermal margin; without one compute it from the slowdown temperature."""
    margin = device.get("nvmlDeviceGetMarginTemperature")
    if margin is not None:
        return float(margin)
    threshold = device.get("nvmlDeviceGetTemperatureThreshold", SLOWDOWN_THRESHOLD)
    return None if not threshold or temperature is None else float(threshold - temperature)


def _text(value: str | bytes) -> str:
    """Return text; older bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
