"""The life cycle of a service: event loop, stop request, exit code.

Signals and logging are the same for every process of a run, see `bus.lifecycle`.
"""

import asyncio
import faulthandler
import logging
import os
from collections.abc import Awaitable, Callable

import uvloop

from rolloutmq.bus.lifecycle import log_failure, set_up_logging, signals

logger = logging.getLogger(__name__)


class Stop:
    """Stop request: made once, seen by every task. Belongs to one loop and its thread."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.reason: str | None = None
        """Reason as a keyword such as `SIGTERM`; None before a request."""

    def request(self, reason: str) -> None:
        """Request the stop. Only the first reason is kept."""
        if self.reason is None:
            self.reason = reason
            logger.info("stopping reason=%s", reason)
        self.event.set()

    async def wait(self) -> str:
        """Wait for the request and return its reason."""
        await self.event.wait()
        return self.reason or ""


def run_service(
    name: str,
    main: Callable[[Stop], Awaitable[None]],
    *,
    on_drain: Callable[[], None] | None = None,
    on_force: Callable[[], None] | None = None,
) -> int:
    """Run an async service on uvloop until `main` returns. Blocks; call it from the main thread.

    Args:
        name: Name of the service in its log.
        main: Receives the stop request, watches it, and returns after its cleanup.
        on_drain: Called in the loop at SIGUSR1; without it SIGUSR1 is a stop request.
        on_force: Called at a second SIGTERM or SIGINT, just before the process ends with 130.

    Returns:
        0 if `main` returned, 1 if it raised, PERMANENT_FAILURE if it raised an error that a restart cannot fix; the
        error is logged.
    """
    set_up_logging()
    faulthandler.enable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(name, main, on_drain, on_force))
    except Exception as error:  # noqa: BLE001 - the task boundary of the process
        return log_failure(name, error)
    return 0


async def _serve(
    name: str,
    main: Callable[[Stop], Awaitable[None]],
    on_drain: Callable[[], None] | None,
    on_force: Callable[[], None] | None,
) -> None:
    loop = asyncio.get_running_loop()
    stop = Stop()

    def asked(reason: str) -> None:
        loop.call_soon_threadsafe(stop.request, reason)

    def drain() -> None:
        if on_drain is not None:
            loop.call_soon_threadsafe(on_drain)

    with signals(asked, drain if on_drain else None, on_force):
        logger.info("started service=%s pid=%d", name, os.getpid())
        await main(stop)
        logger.info("ended service=%s reason=%s", name, stop.reason or "done")
