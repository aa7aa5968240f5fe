"""The gateway as an ASGI target: `uvicorn rolloutmq.services.gateway.asgi:app --host 127.0.0.1 --port 8000`.

It serves the run in `ROLLOUTMQ_RUN_DIR` (default `runs/gateway`). If that run is not active, it starts a broker there,
which resumes the run and ends with the server. Each run allows one process: a second one, such as another uvicorn
worker, is rejected. The server binds its address itself, so nothing here can check it.
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from rolloutmq.bus.rundir import load_run, wait_json
from rolloutmq.schemas.errors import MissingError, RolloutMQError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.process import python_command
from rolloutmq.services.gateway.app import SWITCH_S, GatewayApp
from rolloutmq.services.gateway.server import NAME, access
from rolloutmq.services.gateway.service import Gateway
from rolloutmq.services.gateway.web.http_io import Receive, Scope, Send
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of
from rolloutmq.services.process.latency_publisher import publishing, recorder_of

logger = logging.getLogger(__name__)

RUN_DIR: Final = "ROLLOUTMQ_RUN_DIR"
DEFAULT: Final = "runs/gateway"
END_S: Final = 60.0
"""Longest wait for the broker's end; after that its launcher's own deadlines apply."""


class AsgiTarget:
    """Application that opens its gateway when the server starts."""

    def __init__(self, run_dir: Path | None = None) -> None:
        self._run_dir = run_dir
        self._application: GatewayApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._application is None:
            raise RuntimeError(
                "the gateway needs the lifespan protocol: start uvicorn without `--lifespan off`"
            )
        else:
            await self._application(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with AsyncExitStack() as stack:
            try:
                self._application = await stack.enter_async_context(self._opened())
            except Exception as error:  # the server logs its text and ends
                if not isinstance(error, RolloutMQError):
                    logger.exception("gateway not started")
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
            try:
                await receive()
            except BaseException:
                # The gateway failed while running. Servers mistake that for an app without lifespan, and would go on.
                signal.raise_signal(signal.SIGTERM)
                raise
            finally:
                self._application = None
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[GatewayApp]:
        layout = RunLayout(self._run_dir or Path(os.environ.get(RUN_DIR, DEFAULT)))
        async with AsyncExitStack() as stack:
            if fate_of(layout).life is not RunLiveness.LIVING:
                await stack.enter_async_context(_broker(layout))
            run, _ = load_run(layout.root)
            sys.setswitchinterval(SWITCH_S)
            latencies = recorder_of(NAME, run.telemetry)
            await stack.enter_async_context(publishing(latencies, layout, run.telemetry.interval_s))
            gateway = await stack.enter_async_context(Gateway.opened(layout, run.gateway))
            allowed, group_bytes = access(run, run.gateway), run.broker.max_group_bytes
            application = GatewayApp(gateway, run.gateway, allowed, group_bytes, latencies)
            stack.callback(application.close)
            yield application


@asynccontextmanager
async def _broker(layout: RunLayout) -> AsyncIterator[None]:
    """Run a broker within the block, under a launcher."""
    layout.endpoints.unlink(missing_ok=True)
    words = ("gateway", "--broker-only", "--plain", "--run-dir", str(layout.root))
    command = python_command(sys.executable, "rolloutmq.launch.cli", *words)
    launcher = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        await _up(launcher, layout)
        yield
    finally:
        if launcher.returncode is None:
            launcher.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await launcher.wait()


async def _up(launcher: Process, layout: RunLayout) -> None:
    bound = asyncio.create_task(wait_json(layout.endpoints, Endpoints))
    ended = asyncio.create_task(launcher.wait())
    try:
        await asyncio.wait({bound, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not bound.done():
            raise MissingError(
                "a broker", f"see {layout.log('up')}: its launcher ended with {launcher.returncode}"
            )
    finally:
        bound.cancel()
        ended.cancel()


app = AsgiTarget()
