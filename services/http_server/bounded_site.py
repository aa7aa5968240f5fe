"""A bound on the connections of a server, and headers for the replies that aiohttp makes by itself.

A connection that asks nothing costs memory and a descriptor for as long as its client likes, up to the keep-alive time.
Beyond the limit the oldest idle one makes room for a new one: a browser opens another when it needs it. If all are at
work, the new one is closed. A request that is no HTTP gets its reply from aiohttp before it reaches the application, so
the application's headers are added here.
"""

import asyncio
import logging
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

logger = logging.getLogger(__name__)

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class BoundedSite(web.SockSite):
    """A listening socket with at most so many connections.

    Args:
        runner: Runner of the application; its `setup` has ended.
        bound: The bound socket.
        backlog: Connections that the kernel keeps until they are taken.
        limit: Most connections at a time.
        headers: Headers of each reply that aiohttp makes by itself.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        bound: socket.socket,
        *,
        backlog: int,
        limit: int,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(runner, bound, backlog=backlog)
        self._bounds = _Bounds(limit, headers)

    async def start(self) -> None:
        """Listen. OSError if the socket cannot."""
        await web.BaseSite.start(self)
        server, loop = self._runner.server, asyncio.get_running_loop()
        assert server is not None

        def connected() -> RequestHandler:
            return _Connection(self._bounds, server, loop=loop, **server._kwargs)

        self._server = await loop.create_server(connected, sock=self._sock, backlog=self._backlog)


class _Bounds:
    """The open connections of a site, the oldest first."""

    def __init__(self, limit: int, headers: Mapping[str, str]) -> None:
        self._limit = limit
        self._open: dict[_Connection, None] = {}
        self._is_told = False
        self.headers = headers

    def add(self, connection: "_Connection") -> None:
        """Take a connection in; if there are too many, close the oldest idle one, or else this one."""
        self._open[connection] = None
        if len(self._open) <= self._limit:
            return
        if not self._is_told:
            self._is_told = True
            logger.warning("connection limit reached, closing idle ones limit=%d", self._limit)
        idle = next((one for one in self._open if one.is_idle), connection)
        del self._open[idle]
        idle.force_close()

    def discard(self, connection: "_Connection") -> None:
        self._open.pop(connection, None)


class _Connection(RequestHandler):
    """One connection of a bounded site."""

    __slots__ = ("_bounds",)

    def __init__(self, bounds: _Bounds, server: web.Server, **given: Any) -> None:
        super().__init__(server, **given)
        self._bounds = bounds

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is under way."""
        return self._current_request is None and not self._messages

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it in, see `_Bounds.add`."""
        super().connection_made(transport)
        self._bounds.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self._bounds.discard(self)
        super().connection_lost(exc)

    def handle_error(self, *given: Any, **named: Any) -> web.StreamResponse:
        """Return aiohttp's reply to a request that it cannot serve, with the site's headers."""
        response = super().handle_error(*given, **named)
        response.headers.update(self._bounds.headers)
        return response
