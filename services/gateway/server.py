"""The gateway's process: its listening socket, and an HTTP server in the loop of a service.

The launcher binds the socket and passes it down, if there is one. The gateway binds before it publishes its address,
and reuses its earlier port, so that clients need not look it up. While the gateway restarts, clients queue in the
backlog of the launcher's socket.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn

from rolloutmq.bus.rundir import load_run, read_json, write_json
from rolloutmq.bus.transport.endpoint import http_url
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.errors import AddressInUseError
from rolloutmq.schemas.files import GatewayAddress, RunLayout
from rolloutmq.services.gateway.app import SWITCH_S, GatewayApp
from rolloutmq.services.gateway.service import Gateway
from rolloutmq.services.process.runner import Stop, run_service

LISTEN_FD: Final = "ROLLOUTMQ_LISTEN_FD"
"""Variable with the descriptor of the launcher's socket, whose backlog holds clients during a restart."""

BACKLOG: Final = 2048


def bind(config: GatewayConfig, before: int | None) -> socket.socket:
    """Return a bound socket: at the configured port, or for any port at the earlier one if it is free."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    for port in [config.port] if config.port or before is None else [before, 0]:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((config.host, port))
        except OSError:
            made.close()
            continue
        return made
    raise AddressInUseError(f"{config.host}:{config.port}")


def port_before(layout: RunLayout) -> int | None:
    """Return the port of an earlier life."""
    known = read_json(layout.gateway, GatewayAddress)
    return int(known.url.rpartition(":")[2]) if known is not None else None


logger = logging.getLogger(__name__)


GRACE_S: Final = 5
"""Time running requests have after a request to stop."""

KEEP_ALIVE_S: Final = 75


class _Server(uvicorn.Server):
    """Server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(run_dir: Path, stop: Stop, config: GatewayConfig | None = None) -> None:
    """Serve until asked to stop.

    Args:
        run_dir: The run.
        stop: Ends the server; running requests get a reply.
        config: Replaces the run's configuration.

    Raises:
        AddressInUseError: Another process listens on the configured port.
    """
    run, layout = load_run(run_dir)
    config = config or run.gateway
    held = os.environ.get(LISTEN_FD)
    bound = socket.socket(fileno=int(held)) if held else bind(config, port_before(layout))
    async with Gateway.opened(layout, config) as gateway:
        application = GatewayApp(gateway, config)
        server = _Server(
            uvicorn.Config(
                application,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        host, port = bound.getsockname()[:2]
        write_json(layout.gateway, GatewayAddress(url=http_url(host, port), pid=os.getpid()))
        logger.info("listening url=%s", http_url(host, port))
        ending = asyncio.create_task(_end(server, stop))
        try:
            await server.serve([bound])
        finally:
            ending.cancel()
            application.close()
            bound.close()


async def _end(server: uvicorn.Server, stop: Stop) -> None:
    await stop.wait()
    server.should_exit = True


def main(run_dir: Path, config: GatewayConfig | None = None) -> int:
    """Run the service; return its exit code."""
    sys.setswitchinterval(SWITCH_S)
    return run_service("gateway", lambda stop: serve(run_dir, stop, config))
