"""The descriptor guard: keeps descriptors in reserve by hiding the broker's ipc addresses near the limit.

The socket library ends the whole process when it has no descriptor for a client that connects over ipc; over tcp it
waits, and the journal would find none either. Near the limit the socket files are therefore renamed: connected clients
go on, and new ones find no file and retry until others have left. Unbinding would end every connection made through the
address. Clients of other hosts are kept out earlier, at three quarters, to leave room for those of this host: a filter
drops the packets of new connections before the library sees them, and the clients' systems send them again. Those that
came all at once, and have not said a word, are cut off then: a client speaks as soon as it is connected.
"""

import ctypes
import logging
import os
import resource
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rolloutmq.services.broker.io.memory_guard import cut_silent, listeners

logger = logging.getLogger(__name__)

RESERVE: Final = 512
"""Descriptors withheld from clients, unless the limit is small."""
CHECK_S: Final = 0.05
"""How often descriptors are counted while many are in use."""
SELDOM_S: Final = 1.0
"""How often they are counted while few are in use."""
CUT_S: Final = 1.0
"""Least time between two cuts of silent connections; one looks at every descriptor."""
SPREAD: Final = 1024
"""How far the highest number of a descriptor may be above the count of all."""
LOOKED_AT: Final = 1 << 16
"""Most descriptors of a cut: 0.1 s in which nobody is served."""
COME_PER_S: Final = 100_000
"""Most connections per second: one thread accepts and greets each of them."""
NEAR_CHECK_S: Final = 0.004
"""How often descriptors are counted near the limit. Clients retry ten times a second, so few connect in between."""
LOG_S: Final = 30.0
"""Least time between two log lines: the guard may toggle for long."""
_ASIDE: Final = ".full"
_ATTACH_FILTER: Final = 26
"""SO_ATTACH_FILTER of Linux, for which Python has no name; and SO_DETACH_FILTER."""
_DETACH_FILTER: Final = 27
_DROP: Final = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction: return 0, which keeps no byte of a packet."""
_DESCRIPTORS: Final = Path("/proc/self/fd")


class FdGuard:
    """Hides the addresses and restores them; for one thread.

    Args:
        addresses: Bound addresses.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.due = 0.0
        """When to check again, in monotonic seconds; infinite without ipc sockets or a limit."""
        ipc = [address for address in addresses if address.startswith("ipc://")]
        self._files = [Path(address.removeprefix("ipc://")) for address in ipc]
        self._remote = [address for address in addresses if address.startswith("tcp://")]
        self._listeners = listeners(addresses)
        self._cut_due = 0.0
        self._filtered = False
        self._hidden = False
        self._pulsing = False
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limit = limit
        self._most = limit - min(RESERVE, limit // 4)
        self._logged_at = self._told_at = float("-inf")
        if not self._files or limit == resource.RLIM_INFINITY:
            self.due = float("inf")

    def check(self, now: float) -> None:
        """Hide or restore the addresses by the number of descriptors, if a check is due."""
        if now < self.due:
            return
        used = _used()
        near = used >= self._most * 3 // 4
        self.due = now + (NEAR_CHECK_S if near else self._pause_s(used))
        if near != self._filtered:
            self._filter(near, used, now)
        if near and self._remote and now >= self._cut_due:
            self._cut_due = now + CUT_S
            self._cut_silent(used, now)
        if used >= self._most and not self._hidden:
            self._note(used, now)
            self._move(hidden=True)
            self._pulsing = True
        elif self._hidden and used < self._most:
            self._move(hidden=False)
        elif self._pulsing and near:
            # Many clients may be waiting: admit a few at a time.
            self._move(hidden=True)
            self.due = now + CHECK_S
        elif not near:
            self._pulsing = False

    def _pause_s(self, used: int) -> float:
        """Return the shortest time in which clients could reach the limit."""
        left = self._most * 3 // 4 - used
        return min(max(left / COME_PER_S, CHECK_S), SELDOM_S)

    def close(self) -> None:
        """Restore the addresses, so their owner can remove them."""
        if self._hidden:
            self._move(hidden=False)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _cut_silent(self, used: int, now: float) -> None:
        """Cut off the connections by the listener from which no byte has come."""
        count = cut_silent(self._remote, min(used + SPREAD, self._limit, LOOKED_AT))
        if count and now - self._told_at >= LOG_S:
            self._told_at = now
            logger.warning("descriptor limit reached, silent connections cut connections=%d", count)

    def _filter(self, filtered: bool, used: int, now: float) -> None:
        """Keep new clients of other hosts out, or let them in again."""
        self._filtered = filtered
        if filtered and self._listeners:
            self._note(used, now)
        for listener in self._listeners:
            if filtered:
                program = ctypes.create_string_buffer(_DROP, len(_DROP))
                listener.setsockopt(
                    socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
                )
            else:
                with suppress(FileNotFoundError):  # it has none
                    listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    def _note(self, used: int, now: float) -> None:
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            logger.warning("descriptor limit reached, pausing new connections open=%d", used)

    def _move(self, *, hidden: bool) -> None:
        self._hidden = hidden
        for file in self._files:
            aside = file.with_name(file.name + _ASIDE)
            with suppress(FileNotFoundError):
                (file if hidden else aside).rename(aside if hidden else file)


def _used() -> int:
    """Return the number of open descriptors; since Linux 6.2 one stat call gives it."""
    try:
        if count := _DESCRIPTORS.stat().st_size:
            return count
        with os.scandir(_DESCRIPTORS) as entries:
            return sum(1 for _ in entries)
    except OSError:
        return 1 << 30
