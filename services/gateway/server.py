"""The gateway's process: its listening socket, and an HTTP server in the loop of a service.

The launcher binds the socket and passes it down, if there is one. The gateway binds before it publishes its address,
and reuses its earlier port, so that clients need not look it up. While the gateway restarts, clients queue in the
backlog of the launcher's socket.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
import uvicorn

from rolloutmq.bus.rundir import load_run, read_json, write_json
from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import AddressInUseError, ConfigError
from rolloutmq.schemas.files import GatewayAddress, RunLayout
from rolloutmq.services.gateway.app import SWITCH_S, GatewayApp
from rolloutmq.services.gateway.service import Gateway
from rolloutmq.services.gateway.web.protocol import LimitedProtocol
from rolloutmq.services.http_server.access import HttpAccess, access_of
from rolloutmq.services.http_server.connection_bounds import Bounds, ConnectionBounds, client_limit
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.sockets import bound_socket
from rolloutmq.services.http_server.tls import ServerTls, server_tls
from rolloutmq.services.http_server.tls_listener import TlsListener
from rolloutmq.services.process.latency_publisher import publishing, recorder_of
from rolloutmq.services.process.runner import Stop, run_service

LISTEN_FD: Final = "ROLLOUTMQ_LISTEN_FD"
"""Variable with the descriptor of the launcher's socket, whose backlog holds clients during a restart."""

BACKLOG: Final = 2048


def bind(config: GatewayConfig, before: int | None) -> socket.socket:
    """Return a bound socket: at the configured port, or for any port at the earlier one if it is free.

    Raises:
        AddressInUseError: Another process listens on the configured port.
        ConfigError: This machine has no such address, or this user may not bind the port.
    """
    if not config.port and before is not None:
        with contextlib.suppress(OSError):
            return bound_socket(config.host, before)
    address = f"{config.host}:{config.port}"
    try:
        return bound_socket(config.host, config.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(address) from None
        problem = (
            f"cannot bind {address}: {error.strerror}; choose an address of this machine and a free port"
        )
        raise ConfigError("gateway.host", problem) from None


def port_before(layout: RunLayout) -> int | None:
    """Return the port of an earlier life; None if no file has one."""
    with contextlib.suppress(msgspec.DecodeError, ValueError):
        known = read_json(layout.gateway, GatewayAddress)
        return urlsplit(known.url).port if known is not None else None
    return None


logger = logging.getLogger(__name__)


NAME: Final = "gateway"
"""Name of the process in its latency samples."""
GRACE_S: Final = 5
"""Time running requests have after a request to stop."""

KEEP_ALIVE_S: Final = 75


class _Server(uvicorn.Server):
    """Server that leaves signals to its process.

    Args:
        config: Its configuration.
        bound: The bound socket.
        bounds: Its open connections.
        tls: Its certificate; None for plain HTTP.
        head_s: Time for a handshake of TLS, and for the headers behind it.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        bound: socket.socket,
        bounds: ConnectionBounds,
        tls: ServerTls | None,
        head_s: float,
    ) -> None:
        super().__init__(config)
        self._bound = bound
        self._bounds = bounds
        self._tls = tls
        self._head_s = head_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with TLS by a listener that bounds handshakes, too."""
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        listener = TlsListener(self._bound, BACKLOG, self._tls, self._bounds, self._connected, self._head_s)
        self.servers.append(cast("asyncio.Server", listener))

    def _connected(self, bounds: Bounds) -> asyncio.Protocol:
        return LimitedProtocol(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            head_s=self._head_s,
            bounds=bounds,
        )


async def serve(run_dir: Path, stop: Stop, config: GatewayConfig | None = None) -> None:
    """Serve until asked to stop.

    Args:
        run_dir: The run.
        stop: Ends the server; running requests get a reply.
        config: Replaces the run's configuration.

    Raises:
        AddressInUseError: Another process listens on the configured port.
        ConfigError: The address cannot be bound, there is no token in `run.http_token_file`, or the certificate cannot
            be used.
    """
    run, layout = load_run(run_dir)
    config = config or run.gateway
    held = os.environ.get(LISTEN_FD)
    bound = socket.socket(fileno=int(held)) if held else bind(config, port_before(layout))
    latencies, tls = recorder_of(NAME, run.telemetry), server_tls(run)
    bounds = ConnectionBounds(NAME, client_limit())
    async with (
        publishing(latencies, layout, run.telemetry.interval_s),
        Gateway.opened(layout, config, run.environment) as gateway,
    ):
        allowed, group_bytes = access(run, config), run.broker.max_group_bytes
        application = GatewayApp(gateway, config, allowed, group_bytes, latencies)
        server = _Server(
            uvicorn.Config(
                application,
                http=_connections(config, bounds),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            ),
            bound,
            bounds,
            tls,
            config.silent_s,
        )
        host, port = bound.getsockname()[:2]
        url = http_url(host, port, run.run.scheme)
        write_json(layout.gateway, GatewayAddress(url=url, pid=os.getpid()))
        logger.info("listening url=%s", url)
        ending = asyncio.create_task(_end(server, gateway, stop))
        try:
            await server.serve([bound])
        finally:
            ending.cancel()
            application.close()
            bound.close()


def access(run: RunConfig, config: GatewayConfig) -> HttpAccess:
    """Return who may send requests to the gateway of a run."""
    remedy = "; allow the page with gateway.cors_origins"
    return access_of(run, Server.GATEWAY, config.host, config.cors_origins, remedy)


def _connections(config: GatewayConfig, bounds: ConnectionBounds) -> Any:
    """Return the class of a connection, as uvicorn calls it."""
    return partial(LimitedProtocol, head_s=config.silent_s, bounds=bounds)


async def _end(server: uvicorn.Server, gateway: Gateway, stop: Stop) -> None:
    await stop.wait()
    gateway.watch.end_holds()
    server.should_exit = True


def main(run_dir: Path, config: GatewayConfig | None = None) -> int:
    """Run the service; return its exit code."""
    sys.setswitchinterval(SWITCH_S)
    return run_service("gateway", lambda stop: serve(run_dir, stop, config))
