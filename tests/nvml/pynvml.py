"""A driver that does what a script says, under the names of NVIDIA's bindings, as their documentation describes them.

A test puts `Driver(script)` in the place of the module and changes the script as it goes. A process of its own that
has this folder first on its path imports it as `pynvml`, and reads the script from the file that NVML_SCRIPT names,
again at every call.

    {"error": "Driver Not Loaded",                      why nothing can be asked, if nothing can
     "gpus": [{"uuid": "GPU-1", "name": "H100", "memory": {"used": 1, "free": 8, "total": 10, "reserved": 1},
               "utilisation": 3, "temperature": 40, "margin": 45, "threshold": 87, "reasons": 1, "ecc": 0,
               "remapped": [0, 0, 0, 0], "recovery": 0, "xids": [79], "mig": 0,
               "lost": false, "hangs": false, "missing": ["nvmlDeviceGetMarginTemperature"]}]}

What a GPU does not have is not supported by it; `missing` are functions that its driver does not have.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in the bindings, and so are the others."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
    pass


class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801, N818
    pass


class NVMLError_GpuIsLost(NVMLError):  # noqa: N801, N818
    pass


class NVMLError_NotFound(NVMLError):  # noqa: N801, N818
    pass


class NVMLError_Timeout(NVMLError):  # noqa: N801, N818
    pass


ANSWERS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetMarginTemperature": "margin",
    "nvmlDeviceGetTemperatureThreshold": "threshold",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "reasons",
    "nvmlDeviceGetTotalEccErrors": "ecc",
    "nvmlDeviceGetRemappedRows": "remapped",
}
"""Functions that give a value of the script as it is."""


class Driver:
    """The module, with a script of its own: a dictionary, or a file of one."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_GpuIsLost = NVMLError_GpuIsLost
    NVMLError_NotFound = NVMLError_NotFound
    NVMLError_Timeout = NVMLError_Timeout
    nvmlMemory_v2: int | None = 0x2000028  # noqa: N815

    def __init__(self, script: dict[str, Any] | Path) -> None:
        self._script = script
        self._told: dict[str, int] = {}
        self._listening: set[str] = set()

    @property
    def script(self) -> dict[str, Any]:
        if isinstance(self._script, Path):
            read: dict[str, Any] = json.loads(self._script.read_text())
            return read
        return self._script

    def __getattr__(self, name: str) -> Any:
        if name not in ANSWERS:
            raise AttributeError(name)
        return lambda uuid, *_: self._value(uuid, name, ANSWERS[name])

    def nvmlInit(self) -> None:  # noqa: N802
        if "error" in self.script:
            raise NVMLError(self.script["error"])

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self.nvmlInit()
        return len(self.script["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        gpu = self.script["gpus"][index]
        if gpu.get("lost"):
            raise NVMLError_GpuIsLost("GPU is lost")
        return str(gpu["uuid"])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if all(gpu["uuid"] != uuid for gpu in self.script["gpus"]):
            raise NVMLError_NotFound("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetUtilizationRates(self, uuid: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._value(uuid, "nvmlDeviceGetUtilizationRates", "utilisation"))

    def nvmlDeviceGetMigMode(self, uuid: str) -> list[int]:  # noqa: N802
        return [int(self._value(uuid, "nvmlDeviceGetMigMode", "mig"))] * 2

    def nvmlDeviceGetMemoryInfo(self, uuid: str, version: int | None = None) -> Any:  # noqa: N802
        name = "nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo"
        memory = SimpleNamespace(**self._value(uuid, name, "memory"))
        if not version:
            memory.used += memory.reserved
            del memory.reserved
        return memory

    def nvmlDeviceGetFieldValues(self, uuid: str, fields: list[int]) -> list[Any]:  # noqa: N802
        assert fields == [230]
        gpu = self._gpu(uuid, "nvmlDeviceGetFieldValues")
        known = "recovery" in gpu
        value = SimpleNamespace(uiVal=gpu.get("recovery", 0))
        return [SimpleNamespace(nvmlReturn=0 if known else 3, value=value)]

    def nvmlEventSetCreate(self) -> set[str]:  # noqa: N802
        return set()

    def nvmlDeviceRegisterEvents(self, uuid: str, kinds: int, events: set[str]) -> None:  # noqa: N802
        self._value(uuid, "nvmlDeviceRegisterEvents", "xids")
        assert kinds == 8
        events.add(uuid)

    def nvmlEventSetWait_v2(self, events: set[str], timeout_ms: int) -> Any:  # noqa: N802
        assert timeout_ms == 0
        (uuid,) = events
        xids = self._gpu(uuid, "nvmlEventSetWait_v2")["xids"]
        told = self._told.get(uuid, 0)
        if told >= len(xids):
            raise NVMLError_Timeout("Timeout")
        self._told[uuid] = told + 1
        return SimpleNamespace(eventType=8, eventData=xids[told])

    def _value(self, uuid: str, name: str, key: str) -> Any:
        gpu = self._gpu(uuid, name)
        if key not in gpu:
            raise NVMLError_NotSupported("Not Supported")
        return gpu[key]

    def _gpu(self, uuid: str, name: str) -> dict[str, Any]:
        while True:
            gpus: list[dict[str, Any]] = self.script["gpus"]
            gone: dict[str, Any] = {"lost": True}
            found = next((gpu for gpu in gpus if gpu["uuid"] == uuid), gone)
            if not found.get("hangs"):
                break
            time.sleep(0.005)
        if found.get("lost"):
            raise NVMLError_GpuIsLost("GPU is lost")
        if name in found.get("missing", ()):
            raise NVMLError_FunctionNotFound("Function Not Found")
        return found


if "NVML_SCRIPT" in os.environ:
    _driver = Driver(Path(os.environ["NVML_SCRIPT"]))
    globals().update(
        {name: getattr(_driver, name) for name in (*dir(_driver), *ANSWERS) if "nvml" in name.lower()}
    )
