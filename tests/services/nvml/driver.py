"""A driver that does what a test says, below NVIDIA's real bindings.

    driver.show(gpu("GPU-1", temperature_c=91), gpu("GPU-2"))
    driver.change("GPU-1", lost=True)

A program started with `environment` has this driver; `installed` gives it to the process of the test. The source of the
library, `libnvidia-ml.c`, says what it answers and where it differs from a real driver.
"""

import ctypes
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pynvml
import pytest
from tests.services.nvml.library import library

GIB: Final = 1 << 30
VARIABLE: Final = "NVML_STATE"


@dataclass(frozen=True)
class Memory:
    """Bytes; the rest of `total` is free."""

    total: int = 80 * GIB
    reserved: int = GIB
    used: int = 0


@dataclass(frozen=True)
class Instance:
    """A MIG device."""

    uuid: str
    memory: Memory


@dataclass(frozen=True)
class Gpu:
    """What the driver says of one GPU; None is not supported. Units are those of the names, else of NVML."""

    uuid: str
    name: str | None = None
    pci: str | None = None
    memory: Memory | None = None
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    margin_c: int | None = None
    slowdown_c: int | None = None
    power_mw: int | None = None
    reasons: int | None = None
    ecc: tuple[int, int] | None = None
    """Uncorrected memory errors since the driver was loaded, and of all time."""
    remapped: tuple[int, int, int, int] | None = None
    """Rows for correctable and uncorrectable errors, a pending one, a failed one."""
    recovery: int | None = None
    xids: tuple[int, ...] | None = None
    """All Xid errors so far."""
    mig: bool | None = None
    instances: tuple[Instance, ...] = ()
    compute: Mapping[int, int] = field(default_factory=dict)
    """Memory in bytes by pid; likewise `graphics`."""
    graphics: Mapping[int, int] = field(default_factory=dict)
    lost: bool = False
    fails: Mapping[str, int] = field(default_factory=dict)
    """Code by function; `*` is every function."""
    hangs: tuple[str, ...] = ()
    """Functions; `*` is every one."""

    def lines(self) -> Iterator[str]:
        """Yield its part of the file."""
        yield f"gpu {self.uuid}"
        memory = self.memory
        facts: dict[str, Any] = {
            "name": self.name,
            "pci": self.pci,
            "memory": memory and (memory.total, memory.reserved, memory.used),
            "utilisation": self.utilisation_percent,
            "temperature": self.temperature_c,
            "margin": self.margin_c,
            "slowdown": self.slowdown_c,
            "power": self.power_mw,
            "reasons": self.reasons,
            "ecc": self.ecc,
            "remapped": self.remapped,
            "recovery": self.recovery,
            "xids": self.xids,
            "mig": None if self.mig is None else int(self.mig),
        }
        for key, value in facts.items():
            if value is not None:
                yield f"{key} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        yield from ("lost",) if self.lost else ()
        yield from (f"compute {pid} {used}" for pid, used in self.compute.items())
        yield from (f"graphics {pid} {used}" for pid, used in self.graphics.items())
        yield from (f"fails {name} {code}" for name, code in self.fails.items())
        yield from (f"hangs {name}" for name in self.hangs)
        for one in self.instances:
            yield f"instance {one.uuid}"
            yield f"name {self.name} MIG"
            yield f"memory {one.memory.total} {one.memory.reserved} {one.memory.used}"


def gpu(uuid: str = "GPU-1", used: int = 0, **facts: Any) -> Gpu:
    """Return a healthy, idle GPU of 80 GiB that tells everything, but for what is given."""
    healthy: dict[str, Any] = {
        "name": "H100",
        "pci": "00000000:17:00.0",
        "memory": Memory(used=used),
        "utilisation_percent": 0,
        "temperature_c": 40,
        "margin_c": 40,
        "slowdown_c": 80,
        "power_mw": 70_000,
        "reasons": 1,
        "ecc": (0, 0),
        "remapped": (0, 0, 0, 0),
        "recovery": 0,
        "xids": (),
        "mig": False,
    }
    return Gpu(uuid, **(healthy | facts))


class Driver:
    """The driver, as its file says; every change shows in the next call of any program.

    Args:
        path: The file.
        lacks: Functions that this driver does not have yet.
    """

    def __init__(self, path: Path, lacks: Collection[str] = ()) -> None:
        self.library = library(lacks)
        self._path = path
        self._gpus: tuple[Gpu, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of a program that is to have this driver."""
        folders = [str(self.library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {"LD_LIBRARY_PATH": ":".join(folders), VARIABLE: str(self._path)}

    def show(self, *gpus: Gpu) -> None:
        """List these GPUs, by their indexes."""
        self._gpus = gpus
        self._write("driver 0")

    def change(self, uuid: str, **facts: Any) -> None:
        """Change what it says of one GPU."""
        assert any(one.uuid == uuid for one in self._gpus), uuid
        self.show(*(replace(one, **facts) if one.uuid == uuid else one for one in self._gpus))

    def fail(self, code: int) -> None:
        """Return a code from every call, until the next `show`."""
        self._write(f"driver {code}")

    def stick(self) -> None:
        """Return from no call, until the next `show`."""
        self._write("stuck")

    def back(self) -> None:
        """Work again."""
        self.show(*self._gpus)

    def _write(self, first: str) -> None:
        lines = [first, *(line for one in self._gpus for line in one.lines())]
        aside = self._path.with_suffix(".new")
        aside.write_text("\n".join(lines) + "\n")
        aside.replace(self._path)

    @contextmanager
    def installed(self) -> Iterator[ctypes.CDLL]:
        """Give the bindings of this process this driver; a real one of the machine stays as it was."""
        with pytest.MonkeyPatch.context() as patch:
            loaded = ctypes.CDLL(str(self.library))
            patch.setenv(VARIABLE, str(self._path))
            patch.setattr(pynvml, "nvmlLib", loaded)
            patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
            try:
                yield loaded
            finally:
                for _ in range(loaded.fakeUsers()):
                    loaded.nvmlShutdown()
