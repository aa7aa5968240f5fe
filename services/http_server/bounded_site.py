"""An aiohttp site with a bound on its connections, a time limit for headers, and headers for aiohttp's own replies.

The headers of a request have `HEAD_S` from the beginning of the connection, or from the first byte after the last
reply. `connection_bounds` has the bound. A request that is no HTTP gets its reply from aiohttp before it reaches the
application, so the application's headers are added here. aiohttp repeats such a request in its reply and in the log,
and a token may be in it: here neither has any part of it.
"""

import asyncio
import socket
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from rolloutmq.services.http_server.connection_bounds import Bounds, ConnectionBounds
from rolloutmq.services.http_server.tls import ServerTls
from rolloutmq.services.http_server.tls_listener import TlsListener

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
HEAD_S: Final = 10.0
"""Time for the headers of a request, in seconds."""
LATE_S: Final = 1.0
"""A timer that fires later than this after its time says that this process stood still, and nothing about the peer."""


class BoundedSite(web.SockSite):
    """A listening socket with at most so many connections.

    Args:
        runner: Runner of the application; its `setup` has ended.
        bound: The bound socket.
        backlog: Connections that the kernel keeps until they are taken.
        limit: Most connections at a time.
        headers: Headers of each reply that aiohttp makes by itself.
        head_s: Time for the headers of a request, in seconds; for a handshake of TLS the same.
        tls: Certificate of the server; None for plain HTTP.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        bound: socket.socket,
        *,
        backlog: int,
        limit: int,
        headers: Mapping[str, str] = NO_HEADERS,
        head_s: float = HEAD_S,
        tls: ServerTls | None = None,
    ) -> None:
        host, port = bound.getsockname()[:2]
        super().__init__(runner, bound, backlog=backlog)
        self._bounds = ConnectionBounds(f"{host}:{port}", limit)
        self._headers = headers
        self._head_s = head_s
        self._tls = tls

    async def start(self) -> None:
        """Listen. OSError if the socket cannot."""
        await web.BaseSite.start(self)
        server, loop = self._runner.server, asyncio.get_running_loop()
        assert server is not None

        def connected(bounds: Bounds) -> RequestHandler:
            return _Connection(bounds, self._headers, self._head_s, server, loop=loop, **server._kwargs)

        if self._tls is None:
            plain = partial(connected, self._bounds)
            self._server = await loop.create_server(plain, sock=self._sock, backlog=self._backlog)
            return
        listener = TlsListener(self._sock, self._backlog, self._tls, self._bounds, connected, self._head_s)
        self._server = cast("asyncio.Server", listener)

    async def stop(self) -> None:
        """Stop to listen; connections go on until their server ends."""
        await super().stop()
        if self._tls is not None and self._server is not None:
            await self._server.wait_closed()


class _Connection(RequestHandler):
    """One connection of a bounded site."""

    __slots__ = ("_bounds", "_due", "_extra", "_head_s", "_kept")

    def __init__(
        self,
        bounds: Bounds,
        extra: Mapping[str, str],
        head_s: float,
        server: web.Server,
        **given: Any,
    ) -> None:
        super().__init__(server, **given)
        self._bounds = bounds
        self._extra = extra
        self._head_s = head_s
        self._due: asyncio.TimerHandle | None = None
        self._kept: asyncio.Transport | None = None
        """The transport; aiohttp forgets its own when it begins to close it."""

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is under way: none has come, or aiohttp waits for the next one."""
        return not self._messages and (self._waiter is not None or not self._request_count)

    def drop(self) -> None:
        """See `Connection.drop`."""
        transport = self._kept
        self.force_close()
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it in, see `ConnectionBounds.add`."""
        self._kept = cast("asyncio.Transport", transport)
        super().connection_made(transport)
        self._expect(self._loop.time() + self._head_s)
        self._bounds.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self._expect_nothing()
        self._bounds.discard(self)
        super().connection_lost(exc)
        self._kept = None

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes; the first ones of a request begin the time of its headers."""
        super().data_received(data)
        if self._messages:
            self._bounds.touch(self)
        if not self.is_idle:
            self._expect_nothing()
        elif data and self._due is None and self._kept is not None:
            self._expect(self._loop.time() + self._head_s)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the reply to a request that cannot be served, with the site's headers."""
        if isinstance(exc, HttpProcessingError):
            status = exc.code
            response: web.StreamResponse = web.Response(
                status=status, text=f"no valid HTTP request ({type(exc).__name__})"
            )
            response.force_close()
        else:
            response = super().handle_error(request, status, exc, message)
        response.headers.update(self._extra)
        return response

    def _expect(self, due: float) -> None:
        self._due = self._loop.call_at(due, self._late, due)

    def _expect_nothing(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _late(self, due: float) -> None:
        now, self._due = self._loop.time(), None
        if now - due > LATE_S:
            self._expect(now + self._head_s)
        elif self.is_idle:
            self.drop()
