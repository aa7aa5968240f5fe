"""A whole run on this machine: start its processes, watch them, end them in order, say what became of it.

The launcher decides little. It keeps the services that the plan names (see `Supervisor`), and the run is over when the
trainer has ended its work, when somebody asks, or when a process is given up. Then everything ends in the plan's order,
what the dead left in shared memory is swept, and the summary is made from the logs alone.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.segments import sweep
from rolloutmq.launch.plan import STOP_ORDER, plan
from rolloutmq.launch.preflight import check
from rolloutmq.launch.results import conclude
from rolloutmq.launch.rundir import claimed
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.services.monitor.top import LiveView, PlainView, make_view, watch
from rolloutmq.services.orchestrator.keeper import Supervisor
from rolloutmq.services.orchestrator.processes import end_marked
from rolloutmq.services.orchestrator.supervisor import OVER, Backoff, Phase, View, term_ladder
from rolloutmq.services.runner import Stop

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
SERVICE_GRACE_S: Final = 20.0
"""Time that a service gets after SIGTERM: a step, a checkpoint, or the saving of the queue."""


@dataclass(frozen=True)
class UpOptions:
    """How `up` was asked for.

    Attributes:
        resume: Go on with the run directory as it is.
        plain: Progress lines even where there is a terminal.
    """

    resume: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Ending:
    """Why a run ended, and the exit code that says so."""

    code: int
    reason: str


def up(config: RunConfig, options: UpOptions) -> int:
    """Run to the end and return the exit code. Blocks; for the main thread.

    Raises:
        ConfigError: The configuration cannot work; nothing was started.
        RunDirInUseError, AddressInUseError: Somebody is there already.
    """
    check(config)
    token = secrets.token_hex(8)
    with claimed(config.run.dir, token, resume=options.resume) as layout:
        _log_to(layout.log("up"))
        write_json(layout.config, config)
        started = time.monotonic()
        view = make_view(config, plain=options.plain)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ending = runner.run(Launcher(config, layout, token, view).run())
        sweep(layout.weights)
        conclude(config, layout, ending.reason, time.monotonic() - started)
    return ending.code


class Launcher:
    """The processes of one run, from their start to their end."""

    def __init__(self, config: RunConfig, layout: RunLayout, token: str, view: LiveView | PlainView) -> None:
        self._config = config
        self._layout = layout
        self._token = token
        self._view = view
        limits = config.orchestrator
        self._supervisor = Supervisor(
            token,
            Backoff(limits.backoff_s, limits.backoff_max_s, limits.crash_limit, limits.stable_s),
            identities=layout.processes,
            seed=config.run.seed,
        )
        self._roles: dict[str, Role] = {}

    async def run(self) -> Ending:
        """Start, watch and end the run; the second signal kills everything at once."""
        stop = Stop()
        shown = asyncio.Event()
        with _signals(stop, self._kill), self._view:
            async with self._supervisor, asyncio.TaskGroup() as tasks:
                tasks.create_task(watch(self._layout, self._view, shown), name="view")
                for spec in plan(self._config, self._layout, sys.executable):
                    self._roles[spec.name] = spec.role
                    self._supervisor.start(spec)
                ending = await self._ended(stop)
                await self._stop(ending.reason)
                shown.set()
        end_marked(f"{self._token}/")
        return ending

    async def _ended(self, stop: Stop) -> Ending:
        """Wait for the first reason to end the run."""
        asked = asyncio.create_task(stop.wait())
        over = asyncio.create_task(self._supervisor.until(lambda views: _verdict(views) is not None))
        try:
            await asyncio.wait({asked, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            over.cancel()
        return _verdict(self._supervisor.views()) or Ending(EXIT_INTERRUPTED, f"interrupted by {stop.reason}")

    async def _stop(self, reason: str) -> None:
        limits = self._config.orchestrator
        workers_s = limits.drain_deadline_s + limits.term_grace_s + SERVICE_GRACE_S
        for roles in STOP_ORDER:
            names = [name for name, role in self._roles.items() if role in roles]
            grace_s = workers_s if Role.ORCHESTRATOR in roles else SERVICE_GRACE_S
            await self._supervisor.stop(names, term_ladder(grace_s), reason)

    def _kill(self) -> None:
        self._supervisor.kill()
        end_marked(f"{self._token}/")
        os._exit(EXIT_INTERRUPTED)


def _verdict(views: Mapping[str, View]) -> Ending | None:
    """Say whether the run is over, and how."""
    for view in views.values():
        if view.phase is Phase.FATAL:
            return Ending(EXIT_FAILED, f"{view.name}: {view.reason}")
    for view in views.values():
        if view.phase in OVER and view.role is Role.TRAINER:
            return Ending(EXIT_DONE, "the trainer is done")
        if view.phase in OVER:
            return Ending(EXIT_FAILED, f"{view.name} ended: {view.reason}")
    return None


@contextlib.contextmanager
def _signals(stop: Stop, kill: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def asked(number: signal.Signals) -> None:
        if stop.event.is_set():
            kill()
        stop.request(number.name)

    for number in numbers:
        loop.add_signal_handler(number, asked, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _log_to(path: Path) -> None:
    """Send the launcher's own log to its file: the terminal belongs to the view."""
    logging.basicConfig(
        filename=path,
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
