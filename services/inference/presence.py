"""What an engine says of itself: where it is, what it has in hand, how busy it is, what troubles it, that it goes.

Said in its address file once a second and at each change. Busy is the part of the last seconds in which it generated,
however few sequences at once: an engine that is never idle may still have room, one that is idle surely has.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rolloutmq.bus.engines import BEAT_S
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.records import InferenceAddress

logger = logging.getLogger(__name__)

BUSY_OVER_S: Final = 10.0
"""A step of training may leave an engine idle for some seconds: over that long it shows as less, not as nothing."""


class Busy:
    """The part of the last seconds that were busy, from a sum that only grows. Pure."""

    def __init__(self) -> None:
        self._sums: deque[tuple[float, float]] = deque()

    def part(self, busy_s: float, now: float) -> float:
        """Return it, given the seconds that were busy so far."""
        self._sums.append((now, busy_s))
        while len(self._sums) > 2 and self._sums[1][0] <= now - BUSY_OVER_S:
            self._sums.popleft()
        since, before = self._sums[0]
        return min(1.0, max(0.0, (busy_s - before) / (now - since))) if now > since else 0.0


class Presence:
    """The address file of one engine.

    Args:
        path: The file.
        name: The engine.
        url: Where it serves.
        busy_s: Returns the seconds in which it generated so far.
        in_hand: Returns the number of requests that it has.
        trouble: Returns in a word why it can sample nothing now, or nothing.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        url: str,
        busy_s: Callable[[], float],
        in_hand: Callable[[], int],
        trouble: Callable[[], str] = str,
    ) -> None:
        self.draining = False
        self._path = path
        self._name = name
        self._url = url
        self._busy_s = busy_s
        self._in_hand = in_hand
        self._trouble = trouble
        self._busy = Busy()
        self._number = 0

    def tell(self) -> None:
        """Say how it is now."""
        self._number += 1
        address = InferenceAddress(
            url=self._url,
            pid=os.getpid(),
            name=self._name,
            number=self._number,
            at=time.time(),
            in_hand=self._in_hand(),
            busy=round(self._busy.part(self._busy_s(), time.monotonic()), 3),
            draining=self.draining,
            trouble=self._trouble(),
        )
        try:
            write_json(self._path, address)
        except OSError as error:  # a full disk must not end what still answers; those who look find it silent
            logger.error("address not written path=%s error=%s", self._path, error)

    async def run(self) -> None:
        """Say it again and again, until cancelled."""
        while True:
            self.tell()
            await asyncio.sleep(BEAT_S)
