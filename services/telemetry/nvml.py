"""What NVML tells of a GPU, field by field, on drivers and bindings of any age.

A field that a device, a driver or the bindings do not have is not told, which is neither good nor bad. Only two
answers of a GPU mean that it is lost: that it fell off the bus, and that it must be reset before anybody can use it.
Every other error of one field costs that field alone. Newer names are asked first, older ones where those are missing.

Calls block and may hang: see `gpus`, which asks each GPU in a thread of its own. NVML itself is thread-safe.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from rolloutmq.schemas.telemetry import GpuSample, GpuState
from rolloutmq.services.telemetry.gpus import NoGpuError

logger = logging.getLogger(__name__)

RECOVERY_ACTION: Final = 230
"""Field of what must be done with the GPU."""
XID_EVENT: Final = 0x8
XIDS_KEPT: Final = 32
"""Different critical errors remembered of one GPU; there are fewer that matter."""
UNCORRECTED: Final = 1
VOLATILE: Final = 0
CORE_TEMPERATURE: Final = 0
SLOWDOWN_THRESHOLD: Final = 1

_T = TypeVar("_T")


class Nvml:
    """The driver of this host. Is started at the first call and again after it failed: a driver may come later."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._indexes: dict[str, int] = {}
        self._events: dict[str, Any] = {}
        self._xids: dict[str, tuple[int, ...]] = {}
        self._lost: set[str] = set()

    def uuids(self) -> tuple[str, ...]:
        """List the GPUs that the driver reaches.

        Raises:
            NoGpuError: There is no driver, or it lists none.
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
            return self._sample(uuid, number, now, state=GpuState.SILENT, why="the driver does not answer")
        try:
            device = self._handles.get(uuid)
            if device is None:
                device = self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
            facts = self._facts(_Device(nvml, device), uuid)
            if all(fact in {None, ""} for what, fact in facts.items() if what != "mig"):
                # One that is about to be lost answers every question with an error of its own.
                facts |= {"state": GpuState.SILENT, "why": "the driver tells nothing of it"}
            return self._sample(uuid, number, now, **facts)
        except lost_errors(nvml) as error:
            # A handle from before a reset stays lost: the next one is looked up anew.
            self._handles.pop(uuid, None)
            self._events.pop(uuid, None)
            self._lost.add(uuid)
            return self._sample(uuid, number, now, state=GpuState.LOST, why=str(error))
        except nvml.NVMLError as error:
            self._handles.pop(uuid, None)
            return self._sample(uuid, number, now, state=GpuState.SILENT, why=str(error))

    def _at(self, nvml: Any, index: int) -> str:
        """Return the UUID of the GPU at an index, or nothing where there is one that cannot be reached."""
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
        temperature = device.told("nvmlDeviceGetTemperature", CORE_TEMPERATURE)
        if uuid in self._lost:
            # It was reset: what went wrong before is over.
            self._lost.discard(uuid)
            self._xids.pop(uuid, None)
        self._hear_xids(device, uuid)
        rates = device.told("nvmlDeviceGetUtilizationRates")
        remapped = device.told("nvmlDeviceGetRemappedRows")
        mig = device.told("nvmlDeviceGetMigMode")
        return {
            "name": _text(device.told("nvmlDeviceGetName") or ""),
            "utilisation_percent": None if rates is None else float(rates.gpu),
            "temperature_c": None if temperature is None else float(temperature),
            "margin_c": _margin(device, temperature),
            "clock_event_reasons": device.first(
                "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
            ),
            "ecc_uncorrected": device.told("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
            "remap_pending": None if remapped is None else bool(remapped[2]),
            "remap_failed": None if remapped is None else bool(remapped[3]),
            "recovery_action": device.field(RECOVERY_ACTION),
            "mig": mig is not None and bool(mig[0]),
            **_memory(device),
        }

    def _hear_xids(self, device: "_Device", uuid: str) -> None:
        """Take the critical errors that came since the last time; they stay until the GPU was lost and came back."""
        if uuid not in self._events:
            events = device.ask("nvmlEventSetCreate")
            if events is not None and device.registers(XID_EVENT, events):
                self._events[uuid] = events
            else:
                self._events[uuid] = None  # not on this device, or not for this user
        events = self._events[uuid]
        while events is not None and (event := device.ask("nvmlEventSetWait_v2", events, 0)) is not None:
            if int(event.eventType) & XID_EVENT:
                known = self._xids.get(uuid, ())
                self._xids[uuid] = tuple(sorted({*known, int(event.eventData)}))[:XIDS_KEPT]


class _Device:
    """One handle, asked so that what is not told is None; only a lost GPU and a driver that is gone are raised."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._raised = (*lost_errors(nvml), *_known(nvml, "NVMLError_Uninitialized"))

    def told(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Ask the device."""
        return self.ask(name, self._handle, *arguments, **options)

    def first(self, *names: str) -> Any:
        """Ask under several names: the answer of the first that tells something."""
        return next((found for name in names if (found := self.told(name)) is not None), None)

    def ask(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Ask the driver."""
        return self._answer(lambda: getattr(self._nvml, name)(*arguments, **options))

    def constant(self, name: str) -> Any:
        """Return a constant of the bindings, or None if they are older."""
        return getattr(self._nvml, name, None)

    def registers(self, kinds: int, events: Any) -> bool:
        """Say whether the device tells events of these kinds."""

        def register() -> bool:
            self._nvml.nvmlDeviceRegisterEvents(self._handle, kinds, events)
            return True

        return self._answer(register) is not None

    def field(self, number: int) -> int | None:
        """Return one of the numbered fields."""
        values = self.told("nvmlDeviceGetFieldValues", [number])
        if values is None or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal)

    def _answer(self, ask: Callable[[], _T]) -> _T | None:
        try:
            return ask()
        except self._raised:
            raise
        except (self._nvml.NVMLError, AttributeError, TypeError):
            # The last two: bindings that are older than the function, or than one of its arguments.
            return None


def lost_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the errors after which a GPU is of no use."""
    return _known(nvml, "NVMLError_GpuIsLost", "NVMLError_ResetRequired")


def _known(nvml: Any, *names: str) -> tuple[type[Exception], ...]:
    return tuple(getattr(nvml, name) for name in names if hasattr(nvml, name))


def _memory(device: _Device) -> dict[str, int | None]:
    """Ask for the form that tells reserved memory apart; the older one counts it as used."""
    version = device.constant("nvmlMemory_v2")
    memory = None if version is None else device.told("nvmlDeviceGetMemoryInfo", version=version)
    reserved = None if memory is None else int(memory.reserved)
    if memory is None:
        memory = device.told("nvmlDeviceGetMemoryInfo")
    if memory is None:
        return {}
    return {
        "memory_used_bytes": int(memory.used),
        "memory_free_bytes": int(memory.free),
        "memory_total_bytes": int(memory.total),
        "memory_reserved_bytes": reserved,
    }


def _margin(device: _Device, temperature: int | None) -> float | None:
    """Ask for the margin; GPUs that tell none tell the temperature at which they slow down."""
    margin = device.told("nvmlDeviceGetMarginTemperature")
    if margin is not None:
        return float(margin)
    threshold = device.told("nvmlDeviceGetTemperatureThreshold", SLOWDOWN_THRESHOLD)
    return None if not threshold or temperature is None else float(threshold - temperature)


def _text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
