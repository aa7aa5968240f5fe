"""The memory guard: bounds the memory of unfinished messages. The socket library does not.

The library buffers the frames of a message outside all its limits until the last one has arrived, and a peer may
never send it. Such memory is in no count and below no high-water mark. It shows only as the difference between the
process's memory and the memory the broker's state explains. Below `overhead_bytes` nothing is done. Above it, in
this order:

    trim          the allocator returns free memory to the system
    cut senders   the connections by the listener that took in most since the memory was last as it should be
    cut remote    every connection by the listener
    cut           every connection

A connection that is shut down loses the unfinished message that came by it: the library frees it. Sockets and addresses
stay bound, and every honest peer reconnects by itself and resends unacked groups. Clients of the broker's host cannot
be told apart, since the kernel counts no bytes of a unix socket. They are cut only if the connections of other hosts
took in less than half of the unexplained memory: such a peer must not be able to end theirs.

Memory that remains after a cut did not belong to the sockets. It is accepted until it shrinks; the next cut comes
when another `overhead_bytes` has been added. An error in the accounting therefore costs each peer one pause, and a
peer that starts anew after each cut is cut off each time. The less room is left, the sooner the next check.
"""

import ctypes
import logging
import math
import os
import socket
import struct
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Final

from rolloutmq.services.broker.batches.rewind import FORGET_PARTS
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.stored_group import BodyMemory

FILL_BYTES_PER_S: Final = 4 << 30
"""Faster than one thread of the socket library receives: 0.4 GiB took 0.1 s over ipc in frames of 0.9 MB."""

LONGEST_S: Final = 0.25
"""Longest time between two checks; one costs about 50 µs."""

SHORTEST_S: Final = 0.01
"""Shortest time between two checks."""

SETTLE_S: Final = 0.03
"""Duration of a cut: 0.4 GiB were free after 0.03 s. Also the first pause after a trim in vain."""

REMOTE_SETTLE_S: Final = 0.1
"""Duration of a cut of other hosts: the next one meets more peers, so it comes only if this one did not help."""

FREE_S: Final = 0.5
"""Longest time that the library takes to free what a cut connection held."""

NOTE_S: Final = 5.0
"""Time between two notes of what each connection of other hosts took in: with a thousand a note takes 10 ms."""

TRIM_AGAIN_S: Final = 30.0
"""Longest pause between two trims in vain; the pauses double."""

TRIM_FRESH_S: Final = 1.0
"""A cut needs a trim at most this old."""


Peer = tuple[str, int, int]
"""One TCP connection: host and port of its other end, and the own port."""


class MemoryRemedy(Enum):
    """Remedy for unexplained memory."""

    NOTHING = auto()
    TRIM = auto()
    """Let the allocator return free memory, and check again at once."""
    CUT_SENDERS = auto()
    """Shut down the connections of other hosts that took in most."""
    CUT_REMOTE = auto()
    """Shut down every connection of other hosts."""
    CUT = auto()
    """Shut down every connection."""


LOCAL_CUTS: Final = (MemoryRemedy.CUT,)
REMOTE_CUTS: Final = (MemoryRemedy.CUT_SENDERS, MemoryRemedy.CUT_REMOTE, MemoryRemedy.CUT)
"""The order of cuts, without and with a listener."""


class UnexplainedMemory:
    """Chooses a remedy from two numbers and the clock.

    Args:
        allowance_bytes: Accepted unexplained memory.
        cuts: The cuts in their order; the last one is that of every connection.

    Attributes:
        due: When to check again, in monotonic seconds.
        is_calm: Whether less than half of the accepted memory was unexplained at the last check.
    """

    def __init__(self, allowance_bytes: int, cuts: Sequence[MemoryRemedy] = LOCAL_CUTS) -> None:
        self.due = -math.inf
        self.is_calm = True
        self._cuts = cuts
        self._next = 0
        """Number of the next cut: each one that does not help is followed by a harder one."""
        self._allowance = allowance_bytes
        self._lasting: float = 0
        """Least unexplained memory since the last cut; infinite before the first check."""
        self._trimmed_at = self._trim_due = -math.inf
        self._pause_s = SETTLE_S

    def look(
        self,
        now: float,
        held_bytes: int,
        accounted_bytes: int,
        remote_bytes: Callable[[], int] = lambda: 0,
    ) -> MemoryRemedy:
        """Compare the process's memory with the accounted memory.

        Args:
            now: Monotonic seconds.
            held_bytes: Memory of the process.
            accounted_bytes: Memory the broker's state explains.
            remote_bytes: Returns the bytes that present connections of other hosts took in since the memory was last
                as it should be; asked before a cut.
        """
        over = held_bytes - accounted_bytes
        self._lasting = min(self._lasting, over)
        self.is_calm = over <= self._allowance // 2
        if over <= self._allowance:
            self._next = 0
            self._trim_due, self._pause_s = -math.inf, SETTLE_S
            self.due = now + _pause_s(self._allowance - over)
            return MemoryRemedy.NOTHING
        beyond = over > self._limit
        if now >= self._trim_due or (beyond and now - self._trimmed_at > TRIM_FRESH_S):
            return self._trim(now)
        if beyond:
            return self._cut(now, can_be_remote=2 * remote_bytes() >= over)
        self.due = min(self._trim_due, now + _pause_s(self._limit - over))
        return MemoryRemedy.NOTHING

    @property
    def _limit(self) -> float:
        return self._allowance + (self._lasting if self._lasting > self._allowance else 0)

    def _trim(self, now: float) -> MemoryRemedy:
        self._trimmed_at = self.due = now
        self._trim_due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, TRIM_AGAIN_S)
        return MemoryRemedy.TRIM

    def _cut(self, now: float, *, can_be_remote: bool) -> MemoryRemedy:
        *remote, every = self._cuts
        if remote and can_be_remote:
            remedy = remote[min(self._next, len(remote) - 1)]
            self._next += 1
            self._trim_due = self.due = now + REMOTE_SETTLE_S
            self._trimmed_at = -math.inf
            return remedy
        self._next = 0
        self._lasting = math.inf
        self._pause_s = SETTLE_S
        self._trim_due = now + SETTLE_S
        self.due = now + SHORTEST_S
        return every


def _pause_s(room_bytes: float) -> float:
    """Return the time in which no peer can fill the room."""
    return min(max(room_bytes / FILL_BYTES_PER_S, SHORTEST_S), LONGEST_S)


logger = logging.getLogger(__name__)


CONNECTION_BYTES: Final = 48 << 10
"""Memory of a connection of another host in the socket library, its ciphers and the broker's session included."""
GROUP_BYTES: Final = 4 << 10
"""Memory of a group without its body: 1.4 kB measured, and a snapshot has each of them once more."""

LOG_S: Final = 30.0
"""Least time between two lines of the log."""

_STATUS: Final = Path("/proc/self/status")

_TAKEN_AT: Final = 128
"""Place of `tcpi_bytes_received` in the kernel's `tcp_info`."""

_RESET: Final = struct.pack("ii", 1, 0)
"""Over tcp, reset the connection on close: a peer with a closed window would wait a minute for it to open."""


class MemoryAccounts:
    """Memory the broker's state explains; for the thread of the data plane."""

    def __init__(self, core: BrokerCore, ram: BodyMemory | None, journal: Journal | None) -> None:
        self._core = core
        self._ram = ram
        self._journal = journal
        self._most_groups = 0

    def __call__(self) -> int:
        """Return the explained bytes.

        They are bodies; data the journal has yet to write; the objects of the most groups there ever were, since a
        fragmented heap does not shrink; and once the high-water mark, for groups on their way in and batches on their
        way out.
        """
        self._most_groups = max(self._most_groups, self._core.held_groups)
        behind = self._journal.behind_bytes if self._journal is not None else 0
        return self._bodies() + behind + self._core.config.high_bytes + GROUP_BYTES * self._most_groups

    def _bodies(self) -> int:
        if self._ram is not None:
            return self._ram.used_bytes
        config = self._core.config
        return config.high_bytes + FORGET_PARTS * config.retain_bytes


class MemoryGuard:
    """Watches the memory of this process, which must be the broker's own, and cuts connections if it must.

    Args:
        addresses: Bound addresses.
        allowance_bytes: Accepted unexplained memory.
        accounted: Returns the explained bytes.
    """

    def __init__(self, addresses: Sequence[str], allowance_bytes: int, accounted: Callable[[], int]) -> None:
        self._addresses = addresses
        self._remote = [address for address in addresses if address.startswith("tcp://")]
        self._unexplained = UnexplainedMemory(allowance_bytes, REMOTE_CUTS if self._remote else LOCAL_CUTS)
        self._accounted = accounted
        self._logged_at = float("-inf")
        self._note_due = float("-inf")
        self._taken: dict[Peer, int] = {}
        """Bytes that each connection of other hosts had taken in when the memory was last as it should be."""
        self._cut_bytes, self._cut_at = 0, float("-inf")
        """Bytes that the connections of the last cut of other hosts took in, and its time."""

    @property
    def due(self) -> float:
        """When to check again, in monotonic seconds."""
        return self._unexplained.due

    def check(self, now: float) -> MemoryRemedy:
        """Check the memory, if it is due, apply the remedy, and return it."""
        if now < self.due:
            return MemoryRemedy.NOTHING
        remedy = self._look(now)
        if remedy is MemoryRemedy.TRIM:
            trim()
            remedy = self._look(now)
        if self._remote and self._unexplained.is_calm and now >= self._note_due:
            self._note_due = now + NOTE_S
            self._taken = taken_by(self._remote) or self._taken
        return remedy

    def _look(self, now: float) -> MemoryRemedy:
        held, accounted = held_bytes(), self._accounted() + CONNECTION_BYTES * len(self._taken)
        remedy = self._unexplained.look(now, held, accounted, lambda: self._remote_bytes(now))
        if remedy in REMOTE_CUTS:
            count = self._cut(remedy, now, held - accounted)
            if now - self._logged_at >= LOG_S:
                self._logged_at = now
                logger.warning(
                    "memory limit reached, connections cut remedy=%s held=%d accounted=%d connections=%d",
                    *(remedy.name.lower(), held, accounted, count),
                )
        return remedy

    def _remote_bytes(self, now: float) -> int:
        """Return what connections of other hosts took in, those that were just cut included: they may still hold it."""
        lately = self._cut_bytes if now - self._cut_at < FREE_S else 0
        return sum(self._grown().values()) + lately

    def _grown(self) -> dict[Peer, int]:
        taken = taken_by(self._remote) if self._remote else {}
        return {peer: max(0, count - self._taken.get(peer, 0)) for peer, count in taken.items()}

    def _cut(self, remedy: MemoryRemedy, now: float, over_bytes: int) -> int:
        if remedy is MemoryRemedy.CUT:
            return cut(self._addresses)
        grown = self._grown()
        wanted = most(grown, over_bytes) if remedy is MemoryRemedy.CUT_SENDERS else grown.keys()
        self._cut_bytes, self._cut_at = sum(grown[peer] for peer in wanted), now
        return cut(self._remote, only=wanted)


def most(grown: Mapping[Peer, int], nbytes: int) -> set[Peer]:
    """Return the fewest connections that together took in so many bytes, those with the most first.

    Args:
        grown: Bytes that each has taken in lately.
        nbytes: What they may hold together.
    """
    found: set[Peer] = set()
    for peer, count in sorted(grown.items(), key=lambda one: -one[1]):
        if nbytes <= 0 or count <= 0:
            break
        found.add(peer)
        nbytes -= count
    return found


def taken_by(addresses: Sequence[str]) -> dict[Peer, int]:
    """Return the bytes that each TCP connection to one of the addresses has taken in."""
    names = {_name(address) for address in addresses}
    found: dict[Peer, int] = {}
    for connection in _connections():
        with connection, suppress(OSError, struct.error):
            if _own_name(connection) in names and not _listens(connection):
                found[_peer(connection)] = _taken(connection)
    return found


def _taken(connection: socket.socket) -> int:
    """Return the bytes that a TCP connection has taken in."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TAKEN_AT + 8)
    taken: int = struct.unpack_from("=Q", info, _TAKEN_AT)[0]
    return taken


def held_bytes() -> int:
    """Return the private memory of this process, swapped out or not; 0 where the system does not report it."""
    try:
        text = _STATUS.read_bytes()
    except OSError:
        return 0
    return 1024 * sum(_kilobytes(text, name) for name in (b"RssAnon:", b"VmSwap:"))


def _kilobytes(text: bytes, name: bytes) -> int:
    rest = text.partition(name)[2].split(maxsplit=1)
    return int(rest[0]) if rest else 0


def trim() -> None:
    """Let the allocator return free memory, if it can. Takes about 0.1 s for 0.4 GiB in small pieces."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def cut(
    addresses: Sequence[str], peers: Container[str] | None = None, only: Container[Peer] | None = None
) -> int:
    """Shut down every connection of this process made to one of the addresses; return how many.

    Args:
        addresses: Bound addresses.
        peers: Cut only connections that came from these hosts, by TCP; None for all.
        only: Cut only these connections, by TCP; None for all.
    """
    names = {name for address in addresses if (name := _name(address)) is not None}
    count = 0
    for connection in _connections():
        with connection, suppress(OSError):
            if _own_name(connection) not in names or _listens(connection):
                continue
            if only is not None and _peer(connection) not in only:
                continue
            if peers is None or _host_of(connection) in peers:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def cut_silent(addresses: Sequence[str], descriptors: int) -> int:
    """Shut down the connections to TCP addresses from which no byte has come; return how many.

    It needs no further descriptor: this process may have none. So the library may close one while it is looked at, and
    open another under its number, which would be shut down if it is as silent.

    Args:
        addresses: Bound addresses.
        descriptors: Look at the numbers below this one.
    """
    names = {_name(address) for address in addresses}
    count = 0
    for number in range(descriptors):
        try:
            connection = socket.socket(fileno=number)
        except OSError:
            continue
        try:
            with suppress(OSError, struct.error):
                if _own_name(connection) in names and not _listens(connection) and not _taken(connection):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        finally:
            connection.detach()
    return count


def listeners(addresses: Sequence[str]) -> list[socket.socket]:
    """Return second descriptors of the sockets that listen at TCP addresses; the caller closes them."""
    names = {_name(address) for address in addresses if address.startswith("tcp://")}
    found = []
    for connection in _connections() if names else ():
        with suppress(OSError):
            if _own_name(connection) in names and _listens(connection):
                found.append(connection)
                continue
        connection.close()
    return found


def _connections() -> Iterator[socket.socket]:
    """Yield a second descriptor of each socket of this process: the library may close the first at any time.

    Yields none while this process is out of descriptors.
    """
    entries: list[Path] = []
    with suppress(OSError):
        entries += Path("/proc/self/fd").iterdir()  # not those that the caller keeps open meanwhile
    for entry in entries:
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
    """Return the path or the port a connection was made to."""
    name = connection.getsockname()
    if isinstance(name, str):
        return name
    return int(name[1]) if isinstance(name, tuple) and len(name) > 1 else None


def _host_of(connection: socket.socket) -> str:
    """Return the address of the host at the other end of a TCP connection."""
    name = connection.getpeername()
    return str(name[0]).partition("%")[0] if isinstance(name, tuple) else ""


def _peer(connection: socket.socket) -> Peer:
    """Return what tells one TCP connection from another: host and port of the other end, and the own port."""
    name = connection.getpeername()
    return str(name[0]), int(name[1]), int(connection.getsockname()[1])


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _name(address: str) -> str | int | None:
    kind, _, place = address.partition("://")
    if kind == "ipc":
        return place
    return int(place.rpartition(":")[2]) if kind == "tcp" else None
