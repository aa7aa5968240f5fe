"""Keeps the memory of the broker's process bounded where the socket library does not.

The library keeps the frames of a message outside every bound of its own until the last one has come, and a peer may
never send it. When `Overgrowth` says that so much cannot be explained, all connections that were made to the sockets
are shut down, as if each peer had hung up: the library then frees what it had of unfinished messages. The sockets and
their addresses stay, so that nothing is bound anew, and every honest peer comes back by itself and says again what was
not acked. Who did it cannot be told: the kernel counts no bytes of a unix socket.
"""

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rolloutmq.bus.sockets import Socket
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.journal.body import Ram
from rolloutmq.services.broker.journal.writer import Journal
from rolloutmq.services.broker.listening import address_of
from rolloutmq.services.broker.overgrowth import Overgrowth, Remedy
from rolloutmq.services.broker.retained import FORGET_PARTS

logger = logging.getLogger(__name__)

GROUP_BYTES: Final = 4 << 10
"""What a group takes beside its body: 1.4 kB were measured, and a snapshot has each of them once more."""
LOG_S: Final = 30.0
"""Least time between two lines of the log."""
_STATUS: Final = Path("/proc/self/status")
_RESET: Final = struct.pack("ii", 1, 0)
"""Over tcp, let the close reset the connection: a peer whose window is shut would wait a minute for it to open."""


class Accounts:
    """What the broker knows to be in its memory; for the thread of the data plane."""

    def __init__(self, core: BrokerCore, ram: Ram | None, journal: Journal | None) -> None:
        self._core = core
        self._ram = ram
        self._journal = journal
        self._most_groups = 0

    def __call__(self) -> int:
        """Return the bytes.

        Bodies; what the journal has yet to write; the objects of the most groups that there ever were, since a heap
        in pieces does not shrink; and once the global mark: what is granted may be on its way in, what is leased on
        its way out, and both together stay below it.
        """
        self._most_groups = max(self._most_groups, self._core.held_groups)
        behind = self._journal.behind_bytes if self._journal is not None else 0
        return self._bodies() + behind + self._core.config.high_bytes + GROUP_BYTES * self._most_groups

    def _bodies(self) -> int:
        if self._ram is not None:
            return self._ram.used_bytes
        config = self._core.config
        return config.high_bytes + FORGET_PARTS * config.retain_bytes


class Relief:
    """Looks at the memory of this process, which must be the broker's own, and ends connections if it must.

    Args:
        sockets: Bound sockets.
        allowance_bytes: What may be there beyond the accounts.
        accounted: Returns what is known to be there.
    """

    def __init__(self, sockets: Sequence[Socket], allowance_bytes: int, accounted: Callable[[], int]) -> None:
        self._addresses = [address_of(bound) for bound in sockets]
        self._overgrowth = Overgrowth(allowance_bytes)
        self._accounted = accounted
        self._logged_at = float("-inf")

    @property
    def due(self) -> float:
        """When to check again, in monotonic seconds."""
        return self._overgrowth.due

    def check(self, now: float) -> bool:
        """Look, if it is time, and do what is to be done; True if the connections were cut."""
        if now < self.due:
            return False
        remedy = self._look(now)
        if remedy is Remedy.TRIM:
            trim()
            remedy = self._look(now)
        return remedy is Remedy.CUT

    def _look(self, now: float) -> Remedy:
        held, accounted = held_bytes(), self._accounted()
        remedy = self._overgrowth.look(now, held, accounted)
        if remedy is Remedy.CUT:
            count = cut(self._addresses)
            if now - self._logged_at >= LOG_S:
                self._logged_at = now
                logger.warning(
                    "unfinished messages, all connections cut held=%d accounted=%d connections=%d",
                    held,
                    accounted,
                    count,
                )
        return remedy


def held_bytes() -> int:
    """Return the memory of this process that is its own, swapped out or not; 0 where the system does not tell."""
    try:
        text = _STATUS.read_bytes()
    except OSError:
        return 0
    return 1024 * sum(_kilobytes(text, name) for name in (b"RssAnon:", b"VmSwap:"))


def _kilobytes(text: bytes, name: bytes) -> int:
    rest = text.partition(name)[2].split(maxsplit=1)
    return int(rest[0]) if rest else 0


def trim() -> None:
    """Let the allocator give free memory back, if it is one that can. Takes about 0.1 s for 0.4 GiB in small pieces."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def cut(addresses: Sequence[str]) -> int:
    """Shut down every connection of this process that was made to one of the addresses; return how many."""
    names = {name for address in addresses if (name := _name(address)) is not None}
    count = 0
    for connection in _connections():
        with connection, suppress(OSError):
            if _own_name(connection) in names and not _listens(connection):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _connections() -> Iterator[socket.socket]:
    """Yield a second descriptor of each socket of this process: the library may close the first at any time."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                yield _duplicate(int(entry.name))


def _duplicate(descriptor: int) -> socket.socket:
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _own_name(connection: socket.socket) -> str | int | None:
    """Return the path, or the port, that a connection was made to."""
    name = connection.getsockname()
    if isinstance(name, str):
        return name
    return int(name[1]) if isinstance(name, tuple) and len(name) > 1 else None


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _name(address: str) -> str | int | None:
    kind, _, place = address.partition("://")
    if kind == "ipc":
        return place
    return int(place.rpartition(":")[2]) if kind == "tcp" else None
