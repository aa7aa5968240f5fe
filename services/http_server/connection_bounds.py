"""The bound on the open connections of one server: an idle connection makes room for a new one.

A connection that asks nothing costs a descriptor for as long as its client likes, and a process without descriptors
can open no file. Beyond the limit the connection that has been idle for the longest time is dropped: a client opens
another when it needs it. If all are at work, the new one is dropped. Drops are logged, throttled.
"""

import logging
import resource
import time
from typing import Final, Protocol

from rolloutmq.bus.log_throttle import LogThrottle

logger = logging.getLogger(__name__)

CLIENTS_LEAST: Final = 64
CLIENTS_MOST: Final = 16_384


class Connection(Protocol):
    """An open connection."""

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is under way, the sending of a reply included."""
        ...

    def drop(self) -> None:
        """Close it now, whatever its peer has not read. Its descriptor is free in the next turn of the loop."""


class Bounds(Protocol):
    """What a connection needs of the bounds of its server, see `ConnectionBounds`."""

    def add(self, connection: Connection, /) -> None: ...
    def touch(self, connection: Connection, /) -> None: ...
    def discard(self, connection: Connection, /) -> None: ...


class ConnectionBounds:
    """The open connections of one server, in the order in which they were last at work.

    Args:
        name: The server, in the log.
        limit: Most connections at a time.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._open: dict[Connection, None] = {}
        self._throttle = LogThrottle()
        self.dropped = 0
        """Connections that were dropped so far."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Take a connection in; if there are too many, drop the one idle for the longest time, or else this one."""
        self._open[connection] = None
        if len(self._open) <= self._limit:
            return
        idle = next((one for one in self._open if one.is_idle), connection)
        del self._open[idle]
        self.dropped += 1
        if self._throttle.is_due(self._name, time.monotonic()):
            logger.warning(
                "connection limit reached, idle connections are dropped server=%s limit=%d dropped=%d",
                self._name,
                self._limit,
                self.dropped,
            )
        idle.drop()

    def touch(self, connection: Connection) -> None:
        """Record that a connection is at work: it makes room after those that are idle for a longer time."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def discard(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._open.pop(connection, None)


def client_limit() -> int:
    """Return the most connections of a server with many clients: 3/8 of the descriptors that this process may open.

    Half of them is for sockets of the bus, such as the gateway's, and an eighth for files.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return CLIENTS_MOST
    return max(CLIENTS_LEAST, min(soft * 3 // 8, CLIENTS_MOST))
