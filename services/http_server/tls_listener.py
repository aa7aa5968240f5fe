"""A listening socket for TLS: whoever has not finished the handshake counts as an idle connection.

An event loop hands a connection to its server once the handshake is over. Until then nobody would count it, and one
that stalls would keep its descriptor. Here the first bytes and the handshake have as long as the headers of a request,
and the bound on the connections includes them. Plain HTTP is told to use TLS, and anything else is closed.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.services.http_server.connection_bounds import Bounds, Connection, ConnectionBounds
from rolloutmq.services.http_server.tls import ServerTls
from rolloutmq.services.process.descriptors import readable

logger = logging.getLogger(__name__)

Connected = Callable[[Bounds], asyncio.Protocol]
"""Returns the protocol of a new connection; it enters itself into these bounds when it begins."""

SHUTDOWN_S: Final = 5.0
"""Time of a peer to answer the end of TLS."""
RETRY_S: Final = 1.0
"""Pause without descriptors or memory."""
_HANDSHAKE: Final = b"\x16"
"""First byte of TLS."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PLAIN_BYTES: Final = 1 << 16
_TOLD: Final = b"this server speaks TLS alone: use https://\n"
_PLAIN: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
    % (len(_TOLD), _TOLD)
)


class TlsListener:
    """Accepts connections, shakes hands, and hands them over. For one event loop.

    Args:
        bound: The bound socket; `close` closes it.
        backlog: Connections that the kernel keeps until they are taken.
        tls: Certificate of the server.
        bounds: The open connections of the server.
        connected: Makes the protocol of a connection.
        head_s: Time for the first bytes and the handshake, in seconds.
    """

    def __init__(
        self,
        bound: socket.socket,
        backlog: int,
        tls: ServerTls,
        bounds: ConnectionBounds,
        connected: Connected,
        head_s: float,
    ) -> None:
        self.sockets = [bound]
        self._bound = bound
        self._tls = tls
        self._bounds = bounds
        self._connected = connected
        self._head_s = head_s
        self._throttle = LogThrottle()
        self._newcomers: set[asyncio.Task[None]] = set()
        bound.setblocking(False)
        bound.listen(backlog)
        self._accepting = asyncio.create_task(self._accept(), name="accept")

    def close(self) -> None:
        """Stop to accept, and drop whoever has not finished the handshake."""
        self._accepting.cancel()
        for one in self._newcomers:
            one.cancel()
        self._bound.close()

    async def wait_closed(self) -> None:
        """Wait until nothing of it runs any more, after `close`."""
        tasks = {self._accepting, *self._newcomers}
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                taken, _ = await loop.sock_accept(self._bound)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    if self._throttle.is_due(str(error), time.monotonic()):
                        logger.error("no connection accepted error=%s", error)
                    await asyncio.sleep(RETRY_S)
                continue  # else its peer has gone meanwhile
            newcomer = asyncio.create_task(self._admit(taken))
            self._newcomers.add(newcomer)
            newcomer.add_done_callback(self._newcomers.discard)

    async def _admit(self, taken: socket.socket) -> None:
        newcomer = _Newcomer(asyncio.current_task())
        self._bounds.add(newcomer)
        try:
            async with asyncio.timeout(self._head_s):
                await self._shake(taken, newcomer)
        except (TimeoutError, OSError, ssl.SSLError):
            taken.close()
        except asyncio.CancelledError:
            taken.close()
            raise
        finally:
            self._bounds.discard(newcomer)

    async def _shake(self, taken: socket.socket, newcomer: "_Newcomer") -> None:
        loop = asyncio.get_running_loop()
        taken.setblocking(False)
        await readable(taken.fileno())
        if taken.recv(1, socket.MSG_PEEK) != _HANDSHAKE:
            _refuse(taken)
            return
        entrance = _Entrance(self._bounds, newcomer)
        await loop.connect_accepted_socket(
            lambda: self._connected(entrance),
            taken,
            ssl=self._tls.context,
            ssl_handshake_timeout=self._head_s,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )


class _Newcomer:
    """A connection before the end of its handshake."""

    is_idle = True

    def __init__(self, task: "asyncio.Task[None] | None") -> None:
        self._task = task

    def drop(self) -> None:
        """See `Connection.drop`."""
        if self._task is not None:
            self._task.cancel()


class _Entrance:
    """The bounds of a server for one connection: it takes the place of its newcomer."""

    def __init__(self, bounds: ConnectionBounds, newcomer: _Newcomer) -> None:
        self._bounds = bounds
        self._newcomer = newcomer

    def add(self, connection: Connection) -> None:
        """See `ConnectionBounds.add`."""
        self._bounds.discard(self._newcomer)
        self._bounds.add(connection)

    def touch(self, connection: Connection) -> None:
        """See `ConnectionBounds.touch`."""
        self._bounds.touch(connection)

    def discard(self, connection: Connection) -> None:
        """See `ConnectionBounds.discard`."""
        self._bounds.discard(connection)


def _refuse(taken: socket.socket) -> None:
    """Close a connection without TLS; if it may be plain HTTP, say why."""
    with contextlib.suppress(OSError), taken:
        if taken.recv(_PLAIN_BYTES)[:1].isalpha():
            taken.send(_PLAIN)
            taken.shutdown(socket.SHUT_WR)
