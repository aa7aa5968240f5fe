"""The broker's ipc addresses, there as long as there are descriptors for those who come.

The socket library ends the whole process when it has no descriptor for a client that connects over ipc (over tcp it
waits). So near the limit the files of the sockets get another name: who is connected goes on, others find nothing and
try again, and are taken in when somebody has left. Unbinding would not do: it ends every connection that came by it.
"""

import logging
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq

from rolloutmq.bus.sockets import Socket

logger = logging.getLogger(__name__)

RESERVE: Final = 512
"""Descriptors that clients do not get, unless the limit is small."""
CHECK_S: Final = 0.05
"""How often they are counted while there are many."""
SELDOM_S: Final = 1.0
"""How often they are counted however many are left."""
COME_PER_S: Final = 100_000
"""More clients than that cannot come in a second: each is accepted, and greeted, by one thread."""
NEAR_CHECK_S: Final = 0.004
"""The same near the limit. Clients that found nobody try again ten times a second, so that few come in between."""
LOG_S: Final = 30.0
"""Least time between two lines of the log: it may go to and fro for long."""
_ASIDE: Final = ".full"
_DESCRIPTORS: Final = Path("/proc/self/fd")


class Listening:
    """Takes the addresses away and puts them back; for one thread.

    Args:
        sockets: Bound sockets; those that are not of ipc are left alone.
    """

    def __init__(self, sockets: Sequence[Socket]) -> None:
        self.due = 0.0
        """When to check again, in monotonic seconds; infinite if there is nothing to check."""
        addresses = [address for socket in sockets if (address := address_of(socket)).startswith("ipc://")]
        self._files = [Path(address.removeprefix("ipc://")) for address in addresses]
        self._away = False
        self._pulsing = False
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = limit - min(RESERVE, limit // 4)
        self._logged_at = float("-inf")
        if not self._files or limit == resource.RLIM_INFINITY:
            self.due = float("inf")

    def check(self, now: float) -> None:
        """Take the addresses away or put them back, by the number of descriptors, if it is time."""
        if now < self.due:
            return
        used = _used()
        near = used >= self._most * 3 // 4
        self.due = now + (NEAR_CHECK_S if near else self._pause_s(used))
        if used >= self._most and not self._away:
            self._note(used, now)
            self._move(away=True)
            self._pulsing = True
        elif self._away and used < self._most:
            self._move(away=False)
        elif self._pulsing and near:
            # Many may be waiting: they come in a few at a time.
            self._move(away=True)
            self.due = now + CHECK_S
        elif not near:
            self._pulsing = False

    def _pause_s(self, used: int) -> float:
        """Return how long it takes until they may be near the limit."""
        left = self._most * 3 // 4 - used
        return min(max(left / COME_PER_S, CHECK_S), SELDOM_S)

    def close(self) -> None:
        """Put the addresses back, so that whoever made them can remove them."""
        if self._away:
            self._move(away=False)

    def _note(self, used: int, now: float) -> None:
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            logger.warning("taking in clients only as others leave descriptors=%d", used)

    def _move(self, *, away: bool) -> None:
        self._away = away
        for file in self._files:
            aside = file.with_name(file.name + _ASIDE)
            with suppress(FileNotFoundError):
                (file if away else aside).rename(aside if away else file)


def address_of(socket: Socket) -> str:
    """Return what a socket was bound to last."""
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()


def _used() -> int:
    """Return how many descriptors are open. Linux tells since 6.2; before, each costs a few microseconds."""
    try:
        if told := _DESCRIPTORS.stat().st_size:
            return told
        with os.scandir(_DESCRIPTORS) as entries:
            return sum(1 for _ in entries)
    except OSError:
        return 1 << 30
