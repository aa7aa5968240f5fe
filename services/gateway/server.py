"""The gateway's process: an HTTP server in the loop of a service.

It binds before it says where it is, and goes back to the port that it had, so that clients need not look. A client
that comes while it is being started again waits in the line of the socket, if the launcher holds it.
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

from rolloutmq.bus.endpoint import http_url
from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.schemas.gateway import GatewayConfig
from rolloutmq.schemas.records import GatewayAddress
from rolloutmq.services.gateway.http import SWITCH_S, Application
from rolloutmq.services.gateway.listener import BACKLOG, LISTEN_FD, bind, port_before
from rolloutmq.services.gateway.service import Gateway
from rolloutmq.services.runner import Stop, run_service

logger = logging.getLogger(__name__)

GRACE_S: Final = 5
"""How long requests in hand may take when the gateway is asked to end."""
KEEP_ALIVE_S: Final = 75


class _Server(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(run_dir: Path, stop: Stop, config: GatewayConfig | None = None) -> None:
    """Serve until asked to stop.

    Args:
        run_dir: The run.
        stop: Ends it; requests in hand are answered.
        config: Instead of that of the run.

    Raises:
        AddressInUseError: Somebody else has the configured port.
    """
    run, layout = load_run(run_dir)
    config = config or run.gateway
    held = os.environ.get(LISTEN_FD)
    bound = socket.socket(fileno=int(held)) if held else bind(config, port_before(layout))
    async with Gateway.opened(layout, config) as gateway:
        application = Application(gateway, config)
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
    """Run the service; returns the exit code."""
    sys.setswitchinterval(SWITCH_S)
    return run_service("gateway", lambda stop: serve(run_dir, stop, config))
