"""An aiohttp application on a listening socket, with the limits of every HTTP server of a run."""

import errno
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from rolloutmq.schemas.errors import AddressInUseError
from rolloutmq.services.http_server.bounded_site import HEAD_S, NO_HEADERS, BoundedSite
from rolloutmq.services.http_server.connection_bounds import client_limit
from rolloutmq.services.http_server.sockets import bound_socket
from rolloutmq.services.http_server.tls import ServerTls

KEEP_ALIVE_S: Final = 75.0
"""Longest time without a request, in seconds."""
BACKLOG: Final = 1024


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, before: int | None, tls: ServerTls | None = None
) -> AsyncIterator[int]:
    """Listen for the duration of the block, and yield the port. `client_limit` bounds the connections.

    Args:
        port: Port, or 0 for any.
        before: Preferred port if `port` is 0.
        tls: Certificate of the server; None for plain HTTP.

    Raises:
        AddressInUseError: Another process uses the port.
        OSError: The address cannot be bound.
    """
    async with _set_up(app) as runner:
        wanted = [port] if port else [before, 0] if before else [0]
        for candidate in wanted:
            try:
                bound = bound_socket(host, candidate)
                site = BoundedSite(runner, bound, backlog=BACKLOG, limit=client_limit(), tls=tls)
                await _start(site, bound)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or candidate == 0:
                    raise
        else:
            raise AddressInUseError(f"{host}:{port}")
        yield int(runner.addresses[0][1])


@asynccontextmanager
async def serving(
    app: web.Application,
    bound: socket.socket,
    limit: int,
    headers: Mapping[str, str] = NO_HEADERS,
    head_s: float = HEAD_S,
    tls: ServerTls | None = None,
) -> AsyncIterator[int]:
    """Serve on a bound socket for the duration of the block, which closes it; yield the port.

    Args:
        app: The application.
        bound: The bound socket.
        limit: Most connections at a time, see `BoundedSite`.
        headers: Headers of each reply that aiohttp makes by itself.
        head_s: Time for the headers of a request, in seconds.
        tls: Certificate of the server; None for plain HTTP.
    """
    async with _set_up(app) as runner:
        site = BoundedSite(
            runner, bound, backlog=BACKLOG, limit=limit, headers=headers, head_s=head_s, tls=tls
        )
        await _start(site, bound)
        yield int(runner.addresses[0][1])


@asynccontextmanager
async def _set_up(app: web.Application) -> AsyncIterator[web.AppRunner]:
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        keepalive_timeout=KEEP_ALIVE_S,
    )
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


async def _start(site: web.BaseSite, bound: socket.socket) -> None:
    try:
        await site.start()
    except OSError:
        bound.close()
        raise
