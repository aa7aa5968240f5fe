"""Heartbeat of an engine: its address file, rewritten once a second and at each change.

The file holds the URL, requests in flight, busy fraction, trouble and the drain flag. The busy fraction is the part of
the last seconds in which the engine generated, however small its batches: a fully busy engine may still have room, an
idle one surely has.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rolloutmq.bus.engine_registry import BEAT_S, own_network
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion

logger = logging.getLogger(__name__)

BUSY_OVER_S: Final = 10.0
"""Averaging window in seconds: longer than the pause of a training step, so that an engine does not look idle."""


class BusyTime:
    """Busy fraction of the last seconds, from a growing sum of busy seconds. Pure."""

    def __init__(self) -> None:
        self._sums: deque[tuple[float, float]] = deque()

    def part(self, busy_s: float, now: float) -> float:
        """Return the fraction, given the busy seconds so far."""
        self._sums.append((now, busy_s))
        while len(self._sums) > 2 and self._sums[1][0] <= now - BUSY_OVER_S:
            self._sums.popleft()
        since, before = self._sums[0]
        return min(1.0, max(0.0, (busy_s - before) / (now - since))) if now > since else 0.0


class EngineHeartbeat:
    """The address file of one engine.

    Args:
        path: The file.
        name: Name of the engine.
        url: Address of the engine.
        busy_s: Returns the seconds spent generating so far.
        in_hand: Returns the number of requests in flight.
        trouble: Returns one word for why nothing can be sampled now, or an empty string.
        run_id: Id of the run that it serves.
        version: Returns the version of its weights, None if it is unknown.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        url: str,
        busy_s: Callable[[], float],
        in_hand: Callable[[], int],
        trouble: Callable[[], str] = str,
        run_id: str = "",
        version: Callable[[], PolicyVersion | None] = lambda: None,
    ) -> None:
        self.draining = False
        self._path = path
        self._name = name
        self._url = url
        self._busy_s = busy_s
        self._in_hand = in_hand
        self._trouble = trouble
        self._run_id = run_id
        self._version = version
        self._busy = BusyTime()
        self._number = 0

    def publish(self) -> None:
        """Write the current state to the file."""
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
            network=own_network(),
            run_id=self._run_id,
            version=self._version(),
        )
        try:
            write_json(self._path, address)
        except OSError as error:  # a full disk must not end a working engine; readers see a silent one
            logger.error("address file not written path=%s error=%s", self._path, error)

    async def run(self) -> None:
        """Publish the state again and again, until cancelled."""
        while True:
            self.publish()
            await asyncio.sleep(BEAT_S)
