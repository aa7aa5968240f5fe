"""Engines: the servers that sample from one copy of the weights, and how they are found.

The first is called `inference`, further ones `inference-1`, `inference-2`, .... Each says where it is in a file of its
own in the run directory, replaced as a whole and anew once a second. A file that stands still is that of an engine
that died or hangs: whether it moves is seen on the clock of who looks, so that wall clocks play no part.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import InferenceAddress

logger = logging.getLogger(__name__)

FIRST: Final = "inference"
"""Name of the first engine, and of all of them in `rolloutmq scale inference N`."""
BEAT_S: Final = 1.0
"""How often an engine says where it is and how much it has to do."""
SILENT_S: Final = 5.0
"""An address that stands still for that long is not believed: four beats may be late on a busy machine."""
_FILE: Final = re.compile(rf"{FIRST}(-[1-9][0-9]*)?")


def engine_name(number: int) -> str:
    """Return the name of an engine; the first has the number 0."""
    return f"{FIRST}-{number}" if number else FIRST


def engine_number(name: str) -> int:
    """Return the number of an engine, or -1 if this is no engine's name."""
    found = _FILE.fullmatch(name)
    return -1 if found is None else int((found[1] or "-0")[1:])


def engines_of(layout: RunLayout) -> list[InferenceAddress]:
    """Read where engines say that they are, by number; also what the dead have left.

    A file that cannot be read is left out, and said: the engines that can be found go on.
    """
    names = [path.stem for path in layout.root.glob(f"{FIRST}*.json") if _FILE.fullmatch(path.stem)]
    found = (_read(layout.engine(name)) for name in sorted(names, key=engine_number))
    return [address for address in found if address is not None]


def _read(path: Path) -> InferenceAddress | None:
    try:
        return read_json(path, InferenceAddress)
    except msgspec.DecodeError as error:
        logger.warning("address of an engine unreadable path=%s error=%s", path, error)
        return None


class Seen(NamedTuple):
    """An address, and for how many seconds it has stood still."""

    address: InferenceAddress
    silent_s: float

    @property
    def is_silent(self) -> bool:
        """Whether it is that of an engine that died or hangs."""
        return self.silent_s > SILENT_S


class Watch:
    """Sees which addresses move. Pure: the clock is passed in."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[tuple[int, int], float]] = {}

    def look(self, found: Iterable[InferenceAddress], now: float) -> list[Seen]:
        """Return what was found, each with its silence; an address that counts no beats is never silent."""
        seen, moved = [], {}
        for address in found:
            beat = address.pid, address.number
            last, at = self._moved.get(address.name, (None, now))
            moved[address.name] = beat, at if beat == last else now
            seen.append(Seen(address, now - moved[address.name][1] if address.number else 0.0))
        self._moved = moved
        return seen
