"""The server of a run's page: on a socket of its own, or on one that a launcher passed down.

It only reads the run, so its end or crash costs the run nothing. Started by a launcher it ends once nobody has looked
for a while: the launcher listens on, and the next look starts another.
"""

import asyncio
import errno
import logging
import os
import socket
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, RolloutMQError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.address import is_loopback
from rolloutmq.services.dashboard.app import ERROR_HEADERS, DashboardApp
from rolloutmq.services.dashboard.entry.handover import opened
from rolloutmq.services.dashboard.entry.sessions import Sessions, link
from rolloutmq.services.dashboard.run_files import read_config
from rolloutmq.services.http_server.access import HttpAccess, listed_keys, names_of
from rolloutmq.services.http_server.listening import serving
from rolloutmq.services.http_server.refusals import HttpRefusals
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.sockets import bound_socket
from rolloutmq.services.http_server.tls import ServerTls, server_tls
from rolloutmq.services.http_server.tokens import TokenStore
from rolloutmq.services.process.runner import Stop, run_service

logger = logging.getLogger(__name__)

LISTEN_FD: Final = "ROLLOUTMQ_DASHBOARD_FD"
"""Variable with the descriptor of the launcher's socket."""
SECRETS_FD: Final = "ROLLOUTMQ_DASHBOARD_SECRETS_FD"
"""Variable with the descriptor of the launcher's secrets, see `handover`."""
CONNECTIONS: Final = 256
"""Most connections at a time: a browser keeps up to six for each page."""
IDLE_S: Final = 60.0
"""Time without a request or an open page after which the server of a launcher ends."""
ORPHAN_IDLE_S: Final = 5.0
"""The same once its launcher is gone."""
LOOK_S: Final = 1.0
IDLE: Final = "idle"
"""Reason of the end without a viewer."""


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket.

    Raises:
        AddressInUseError: Another process uses the port.
        ConfigError: This machine has no such address, or this user may not bind the port.
    """
    try:
        return bound_socket(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"{host}:{port}") from None
        problem = f"cannot bind {host}:{port}: {error.strerror or error}; choose an address of this machine"
        raise ConfigError("dashboard.port", problem) from None


def link_of(bound: socket.socket, token: str, scheme: str = "http") -> str:
    """Return the link that opens the page of a bound socket."""
    host, port = bound.getsockname()[:2]
    return link(http_url(host if is_loopback(host) else socket.gethostname(), port, scheme), token)


def page_tls(root: Path, host: str) -> ServerTls | None:
    """Return the certificate of the page of a run, None if it speaks plain HTTP.

    On loopback a run whose certificate cannot be used any more has its page, too.

    Raises:
        ConfigError, NotPrivateError: Another address shall be bound, and the certificate cannot be used.
    """
    config = read_config(root)
    try:
        return None if isinstance(config, str) else server_tls(config)
    except RolloutMQError as error:
        if not is_loopback(host):
            raise
        logger.warning("page without TLS error=%s", error)
        return None


async def serve(
    root: Path, bound: socket.socket, sessions: Sessions, stop: Stop, *, idles: bool = False
) -> None:
    """Serve the page of a run until asked to stop.

    Args:
        root: The run directory, of a run in any state.
        bound: The socket, which is closed at the end.
        sessions: Token and cookies.
        stop: Ends the server.
        idles: End without a viewer, see `IDLE_S`.
    """
    host, port = bound.getsockname()[:2]
    config = read_config(root)
    known = () if isinstance(config, str) else config.run.http_hosts
    access = HttpAccess(
        names_of(host, known),
        server=Server.PAGE,
        tokens=_keys(config),
        remedy="; open the page itself",
        refusals=HttpRefusals(RunLayout(root).http_refused),
    )
    page = DashboardApp(RunLayout(root), access, sessions, port)
    async with serving(page.app(), bound, CONNECTIONS, ERROR_HEADERS, tls=page_tls(root, host)):
        if idles:
            await _until_idle(page, stop)
            if stop.reason != IDLE:
                page.end_with_run()
        else:
            await stop.wait()


def _keys(config: RunConfig | str) -> TokenStore:
    """Return the tokens of the run's keys. The page shows a run in any state: a damaged list of keys is only logged."""
    try:
        return TokenStore(listed=None if isinstance(config, str) else listed_keys(config))
    except RolloutMQError as error:
        logger.warning("tokens of keys do not open the page error=%s", error)
        return TokenStore()


async def _until_idle(page: DashboardApp, stop: Stop) -> None:
    """Wait until the stop is asked, or nobody has looked for a while."""
    parent = os.getppid()
    while not stop.event.is_set():
        patience_s = IDLE_S if os.getppid() == parent else ORPHAN_IDLE_S
        if page.idle_s() > patience_s:
            stop.request(IDLE)
            return
        try:
            async with asyncio.timeout(LOOK_S):
                await stop.event.wait()
        except TimeoutError:
            continue


def main(run_dir: Path) -> int:
    """Run the service of a launcher, on its socket; return the exit code.

    Raises:
        UsageError: No launcher passed a socket.
    """
    try:
        sessions = opened(int(os.environ.pop(SECRETS_FD, "")))
        bound = socket.socket(fileno=int(os.environ.pop(LISTEN_FD, "")))
    except (ValueError, OSError, msgspec.MsgspecError):
        raise UsageError("serve-dashboard: only a launcher starts it; use `rolloutmq dashboard`") from None
    return run_service("dashboard", lambda stop: serve(run_dir, bound, sessions, stop, idles=True))
