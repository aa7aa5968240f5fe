"""Clocks of other hosts over the time of a run: a line for each change that their heartbeats could measure.

Times in a group's header are by the clock of its worker. A clock is set, or drifts, so a line counts from its own time
on. The broker writes the log and `explain` reads it; a full disk leaves a line out, and the next change writes another.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rolloutmq.bus.files import private_file
from rolloutmq.schemas.files import NotedClock

logger = logging.getLogger(__name__)

LEAST_S: Final = 0.005
"""Least change of a clock that is noted; a change within the error of the measurement is none either."""


class Measured(NamedTuple):
    """Seconds that the broker's clock is ahead of a producer's, NaN if not known, and the bound of the error."""

    offset_s: float
    error_s: float


class ClockLog:
    """The log of one run. For one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._noted: dict[str, Measured] = {}

    def note(self, clocks: Mapping[str, Measured], wall: float) -> None:
        """Append the clocks that have changed.

        Args:
            clocks: Those of the producers of other hosts.
            wall: Present time by the broker's clock.
        """
        changed = {name: one for name, one in clocks.items() if _is_news(self._noted.get(name), one)}
        if not changed:
            return
        lines = [
            NotedClock(at=wall, producer=name, offset_s=one.offset_s, error_s=one.error_s)
            for name, one in changed.items()
        ]
        try:
            with private_file(self._path, "ab") as file:
                file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        except OSError as error:
            logger.warning("clocks not noted path=%s error=%s", self._path, error)
            return
        self._noted |= changed


def clock_at(lines: Iterable[NotedClock], producer: str, wall: float) -> Measured | None:
    """Return the clock of a producer at a time of the broker's: as noted last before it, else first after it."""
    mine = [line for line in lines if line.producer == producer]
    before = [line for line in mine if line.at <= wall]
    found = before[-1] if before else next(iter(mine), None)
    return None if found is None else Measured(found.offset_s, found.error_s)


def _is_news(known: Measured | None, found: Measured) -> bool:
    if math.isnan(found.offset_s):
        return False
    return known is None or abs(known.offset_s - found.offset_s) > max(LEAST_S, known.error_s + found.error_s)
