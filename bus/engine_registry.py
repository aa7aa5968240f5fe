"""The registry of engines: the inference servers of a run. They share one copy of the weights.

The first engine is called `inference`, further ones `inference-1`, `inference-2`, .... Engines of other hosts are
called `inference.NAME`; the broker writes their files by their heartbeats. Those that a cluster runs for the
orchestrator are called `inference.cluster-1`, `inference.cluster-2`, .... Each other engine replaces its own address
file in the run directory once a second. An engine with an unchanged file is dead or hangs. Readers measure that with
their own monotonic clock, so wall clocks do not matter.
"""

import hashlib
import logging
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.network.address import is_loopback

logger = logging.getLogger(__name__)

FIRST: Final = "inference"
"""Name of the first engine, and of all of them in `rolloutmq scale inference N`."""
PLACED: Final = f"{FIRST}.cluster"
"""Beginning of the name of an engine that a cluster runs. No engine that joins has a `-` in its name."""
BEAT_S: Final = 1.0
"""Interval at which an engine publishes its address and load."""
SILENT_S: Final = 5.0
"""Time without a change after which an engine counts as silent; on a busy machine four beats may be late."""
_FILE: Final = re.compile(rf"{FIRST}(-[1-9][0-9]*)?")
_OTHER: Final = re.compile(rf"{FIRST}\.[A-Za-z0-9][A-Za-z0-9_-]{{0,47}}")


def engine_name(number: int) -> str:
    """Return the name of an engine; the first has the number 0."""
    return f"{FIRST}-{number}" if number else FIRST


def placed_name(number: int) -> str:
    """Return the name of an engine that a cluster runs; the first of them has the number 1."""
    return f"{PLACED}-{number}"


def engine_number(name: str) -> int:
    """Return the number of an engine; -1 if the name is not an engine's."""
    found = _FILE.fullmatch(name)
    return -1 if found is None else int((found[1] or "-0")[1:])


def is_of_other_host(name: str) -> bool:
    """Return whether a name is one of an engine of another host than the run's."""
    return _OTHER.fullmatch(name) is not None


def is_engine(name: str) -> bool:
    """Return whether a name is an engine's."""
    return engine_number(name) >= 0 or is_of_other_host(name)


def engines_of(layout: RunLayout) -> list[InferenceAddress]:
    """Read the address files of all engines in order of number, dead engines included.

    An unreadable file is logged and skipped.
    """
    found = (_read(layout.engine(name)) for name in sorted(_names(layout), key=_by_number))
    return [address for address in found if address is not None]


def engine_files(layout: RunLayout) -> list[tuple[str, Path]]:
    """Return name and address file of each engine."""
    return [(name, layout.engine(name)) for name in _names(layout)]


@cache
def own_network() -> str:
    """Return the network of this process: another one than that of any other host or network namespace.

    Empty where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = Path("/proc/self/ns/net").readlink()
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {space}".encode(), digest_size=16).hexdigest()


def is_reachable(address: InferenceAddress) -> bool:
    """Return whether this process may reach an engine: one on loopback serves its own network alone."""
    host = urlsplit(address.url).hostname or ""
    return not is_loopback(host) or address.network in {"", own_network()}


def forget_engines(layout: RunLayout) -> None:
    """Remove the address files of all engines. None of them may run: a worker would wait for it within a rollout."""
    for name in _names(layout):
        layout.engine(name).unlink(missing_ok=True)


def _by_number(name: str) -> tuple[bool, int, str]:
    return is_of_other_host(name), engine_number(name), name


def _names(layout: RunLayout) -> list[str]:
    return [path.stem for path in layout.root.glob(f"{FIRST}*.json") if is_engine(path.stem)]


def _read(path: Path) -> InferenceAddress | None:
    try:
        return read_json(path, InferenceAddress)
    except msgspec.DecodeError as error:
        logger.warning("engine address unreadable path=%s error=%s", path, error)
        return None


class EngineSighting(NamedTuple):
    """An address, and the seconds since its last change."""

    address: InferenceAddress
    silent_s: float

    @property
    def is_silent(self) -> bool:
        """Whether the engine is dead or hangs."""
        return self.silent_s > SILENT_S


class EngineWatch:
    """Measures the silence of engines. Pure: the clock is an argument."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[tuple[int, int], float]] = {}

    def look(self, found: Iterable[InferenceAddress], now: float) -> list[EngineSighting]:
        """Return each address with its silence; an address without beats is never silent."""
        seen, moved = [], {}
        for address in found:
            beat = address.pid, address.number
            last, at = self._moved.get(address.name, (None, now))
            moved[address.name] = beat, at if beat == last else now
            seen.append(EngineSighting(address, now - moved[address.name][1] if address.number else 0.0))
        self._moved = moved
        return seen
