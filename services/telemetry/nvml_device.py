"""Facts of one GPU from NVML, field by field, with drivers and bindings of any age.

A field that a device, a driver or the bindings lack is None, which is neither good nor bad. Only two errors mean that a
GPU is lost: it fell off the bus, or it must be reset before use. Any other error costs only its field, except that the
driver itself is gone. Newer names are tried first, then older ones.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

RECOVERY_ACTION: Final = 230
"""Field with the recovery action of the GPU."""
UNCORRECTED: Final = 1
VOLATILE: Final = 0
CORE_TEMPERATURE: Final = 0
SLOWDOWN_THRESHOLD: Final = 1

_T = TypeVar("_T")


class Device:
    """One handle, with None for missing values; only a lost GPU and a failed driver raise."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._raised = (*lost_errors(nvml), *driver_errors(nvml))

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

    def facts(self) -> dict[str, Any]:
        """Return the fields of a `GpuSample` that the device reports of itself."""
        temperature = self.get("nvmlDeviceGetTemperature", CORE_TEMPERATURE)
        rates = self.get("nvmlDeviceGetUtilizationRates")
        remapped = self.get("nvmlDeviceGetRemappedRows")
        mig = self.get("nvmlDeviceGetMigMode")
        return {
            "name": text(self.get("nvmlDeviceGetName") or ""),
            "utilisation_percent": None if rates is None else float(rates.gpu),
            "temperature_c": None if temperature is None else float(temperature),
            "margin_c": self._margin(temperature),
            "clock_event_reasons": self.first(
                "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
            ),
            "ecc_uncorrected": self.get("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
            "remap_pending": None if remapped is None else bool(remapped[2]),
            "remap_failed": None if remapped is None else bool(remapped[3]),
            "recovery_action": self.field(RECOVERY_ACTION),
            "mig": mig is not None and bool(mig[0]),
            **self._memory(),
        }

    def _memory(self) -> dict[str, int | None]:
        """Query the memory with reserved memory apart; the older query counts it as used."""
        version = self.constant("nvmlMemory_v2")
        memory = None if version is None else self.get("nvmlDeviceGetMemoryInfo", version=version)
        reserved = None if memory is None else int(memory.reserved)
        if memory is None:
            memory = self.get("nvmlDeviceGetMemoryInfo")
        if memory is None:
            return {}
        return {
            "memory_used_bytes": int(memory.used),
            "memory_free_bytes": int(memory.free),
            "memory_total_bytes": int(memory.total),
            "memory_reserved_bytes": reserved,
        }

    def _margin(self, temperature: int | None) -> float | None:
        """Query the thermal margin; without one compute it from the slowdown temperature."""
        margin = self.get("nvmlDeviceGetMarginTemperature")
        if margin is not None:
            return float(margin)
        threshold = self.get("nvmlDeviceGetTemperatureThreshold", SLOWDOWN_THRESHOLD)
        return None if not threshold or temperature is None else float(threshold - temperature)

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


def driver_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the errors of a driver that serves no GPU."""
    return _known(
        nvml, "NVMLError_Uninitialized", "NVMLError_DriverNotLoaded", "NVMLError_LibRmVersionMismatch"
    )


def text(value: str | bytes) -> str:
    """Return text; older bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _known(nvml: Any, *names: str) -> tuple[type[Exception], ...]:
    return tuple(getattr(nvml, name) for name in names if hasattr(nvml, name))
