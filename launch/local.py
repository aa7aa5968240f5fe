"""The launcher: start the processes of a run on this machine, watch them, stop them in order, report the result.

The launcher keeps the services of the plan running (see `Supervisor`). A run ends when the trainer is done, also one of
one's own that has taken `trainer.steps`, when a signal asks for it, or when a process is given up. Then the launcher
stops everything in the plan's order, removes the leftovers of dead processes, and makes the summary from the logs
alone.

    first signal    stop everything in order
    second signal   kill everything, then clean up and report as usual
    SIGHUP          like the others, unless the run was started under nohup
    SIGUSR1         stop everything in order, also the second time: from `rolloutmq down`
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.files import private_fd
from rolloutmq.bus.lifecycle import set_up_logging
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.launch.end_notice import cause_of, end_notice, failure_report, until_joined_end
from rolloutmq.launch.plan import STOP_ORDER, plan
from rolloutmq.launch.preflight.checks import check
from rolloutmq.launch.preflight.hub import fetch, sources_of
from rolloutmq.launch.results import conclude
from rolloutmq.launch.rundir import END_SIGNAL, CrashNotes, claimed, clear, trim_journal
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import OutputFailedError, WireError
from rolloutmq.schemas.files import EndNotice, RunLayout
from rolloutmq.schemas.process import ProcessSpec, Role
from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.services.dashboard.on_demand import PageOnDemand, page_of
from rolloutmq.services.gateway.server import BACKLOG, LISTEN_FD, bind, port_before
from rolloutmq.services.http_server.run_token import with_own_token
from rolloutmq.services.monitor.live.top import LiveView, PlainView, make_view, watch
from rolloutmq.services.monitor.probes.broker_watch import BrokerWatch, keep_asking
from rolloutmq.services.monitor.probes.probe_files import ProbeFiles, keep_probes
from rolloutmq.services.monitor.text.exit_codes import reader_may_leave
from rolloutmq.services.orchestrator.cluster.opening import closed, looked_at, opened, reserved
from rolloutmq.services.orchestrator.supervision.core import (
    KILL_LADDER,
    OVER,
    Backoff,
    Phase,
    ProcessView,
    term_ladder,
)
from rolloutmq.services.orchestrator.supervision.supervisor import Supervisor
from rolloutmq.services.orchestrator.supervision.worker_table import env_of
from rolloutmq.services.process.child import end_marked
from rolloutmq.services.process.logbook import LogLimits, Rotation
from rolloutmq.services.process.run_lives import living
from rolloutmq.services.process.runner import Stop

logger = logging.getLogger(__name__)

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
SERVICE_GRACE_S: Final = 20.0
"""Time a service has after SIGTERM: for a step, a checkpoint, or saving the queues."""
END_TOLD_S: Final = 2.0
END_AGAIN_S: Final = 5.0
"""Time after which the end of a run says what it waits for, and the interval from then on."""
LISTEN_S: Final = 1.0
"""Longest wait for one finding about the health of the rewards."""
SAVE_GRACE_S: Final = 2.0
"""Time the broker has to save its queues when everything else is killed."""


@dataclass(frozen=True)
class UpOptions:
    """Options of `up`.

    Attributes:
        resume: Resume the run in the run directory.
        plain: Print progress lines even on a terminal.
        picture: Draw `report.png` at the end.
        as_json: Print lines of JSON alone: `event` names the kind of each.
        probe_dir: Directory for the files of probes; None for none.
    """

    resume: bool = False
    plain: bool = False
    picture: bool = True
    as_json: bool = False
    probe_dir: Path | None = None


@dataclass(frozen=True)
class Ending:
    """Reason why a run ended, and its exit code."""

    code: int
    reason: str


DONE: Final = Ending(EXIT_DONE, "the trainer is done")


def up(config: RunConfig, options: UpOptions) -> int:
    """Run to the end and return the exit code. Blocks; call it from the main thread.

    Raises:
        ConfigError: The configuration is invalid, or a model or data set cannot be fetched from its hub; nothing was
            started.
        RunDirInUseError, AddressInUseError: Another process holds the run directory or a port.
        NotPrivateError: The run directory belongs to another user, or others may write in it.
        UnusablePathError: The run directory cannot be read or written.
        RecordVersionError: Another version wrote the run directory; nothing was started.
        MissingError: The run is for a cluster, and there is none.
    """
    probes = ProbeFiles(options.probe_dir) if options.probe_dir is not None else None
    known = sources_of(RunLayout(config.run.dir)) if options.resume else []
    found = check(config, known=known, tell=tell)
    for failure in found.failures:
        tell(f"warning: {failure}")
    for each in found.advice:
        tell(f"advice: {each}")
    config = found.config
    cluster = looked_at(config)
    fetch(config, found.sources, tell=tell)
    token = secrets.token_hex(8)
    with claimed(config.run.dir, token, resume=options.resume) as layout, contextlib.ExitStack() as ending:
        os.close(private_fd(layout.log("up"), os.O_WRONLY | os.O_CREAT))
        set_up_logging(layout.log("up"))
        for each in (*found.failures, *found.advice):
            logger.warning("configuration advice=%s", each)
        for one in found.sources:
            logger.info("from a hub key=%s name=%s commit=%s", one.key, one.name, one.commit)
        if found.sources:
            write_json(layout.hub, found.sources)
        config = opened(config, layout, token, cluster)
        ending.callback(closed, config, layout, token)
        if gpus := reserved(config, layout, token):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # for trainer and first engine
        config = with_own_token(config, layout)
        write_json(layout.config, config)
        with (
            _listener(config, layout, as_json=options.as_json) as listener,
            page_of(config, layout, token, as_json=options.as_json) as page,
        ):
            view = make_view(config, plain=options.plain, as_json=options.as_json)
            launcher = Launcher(config, layout, token, view, listener, options, page, probes)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(launcher.run()).code


def tell(text: str) -> None:
    """Tell the user something while nothing is shown yet."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def _listener(
    config: RunConfig, layout: RunLayout, *, as_json: bool = False
) -> Iterator[socket.socket | None]:
    """Hold the gateway's socket, so that its clients queue while the gateway restarts.

    Raises:
        AddressInUseError: Another process listens on the port.
        ConfigError: The address cannot be bound.
    """
    if not (config.gateway.enabled and config.gateway.listen):
        yield None
        return
    with bind(config.gateway, port_before(layout)) as bound:
        bound.listen(BACKLOG)
        host, port = bound.getsockname()[:2]
        with contextlib.suppress(OutputFailedError), reader_may_leave():
            serving = f"serving http://{host}:{port} (API documentation: /docs)"
            told = json.dumps({"event": "serving", "url": f"http://{host}:{port}"}) if as_json else serving
            sys.stdout.write(f"{told}\n")
        yield bound


class Launcher:
    """The processes of one run, from start to end."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        token: str,
        view: LiveView | PlainView,
        listener: socket.socket | None = None,
        options: UpOptions = UpOptions(),
        page: PageOnDemand | None = None,
        probes: ProbeFiles | None = None,
    ) -> None:
        self._config = config
        self._page = page
        self._options = options
        self._listener = listener
        self._layout = layout
        self._token = token
        self._view = view
        limits = config.orchestrator
        self._supervisor = Supervisor(
            token,
            Backoff(limits.backoff_s, limits.backoff_max_s, limits.crash_limit, limits.stable_s),
            identities=layout.processes,
            on_change=self._note_crash,
            seed=config.run.seed,
        )
        self._crashes = CrashNotes(layout)
        self._probes = probes
        self._roles: dict[str, Role] = {}
        self._killed = self._is_over = False

    async def run(self) -> Ending:
        """Start, watch and end the run, and report its result; the second signal kills everything at once."""
        stop, began = Stop(), time.time()
        with _signals(stop, self._kill):
            with living(self._layout):
                ending = await self._live(stop)
            # These calls block the loop, so that a signal cannot interrupt the summary.
            clear(self._layout)
            trim_journal(self._layout)
            report, as_json = failure_report(self._layout, ending.reason, began), self._options.as_json
            if report and as_json:  # the line of the end is the last one
                sys.stdout.write(json.dumps({"event": "failure", "text": report}) + "\n")
            conclude(
                self._config, self._layout, ending.reason, picture=self._options.picture, as_json=as_json
            )
            if report and not as_json:
                sys.stdout.write(f"\n{report}")
        return ending

    async def _live(self, stop: Stop) -> Ending:
        """Start the processes and watch them until they have ended."""
        shown = asyncio.Event()
        with self._view:
            async with self._supervisor, asyncio.TaskGroup() as tasks:
                tasks.create_task(watch(self._layout, self._view, shown), name="view")
                beside = [tasks.create_task(self._rotation().run(), name="logs")]
                if self._probes is not None:
                    beside += self._shown(self._probes, tasks)
                if self._page is not None:
                    beside.append(tasks.create_task(self._page.run(), name="page"))
                for spec in plan(self._config, self._layout, sys.executable):
                    self._roles[spec.name] = spec.role
                    self._supervisor.start(self._with_listener(spec))
                ending = await self._ended(stop)
                await self._stop(ending.reason)
                for task in beside:
                    task.cancel()
                shown.set()
        end_marked(f"{self._token}/")
        return Ending(EXIT_INTERRUPTED, "killed by a second signal") if self._killed else ending

    def _shown(self, probes: ProbeFiles, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin to show probes whether the run lives, which it does not while its broker hangs, and is ready."""

        def pid() -> int:
            identity = self._supervisor.identity(Role.BROKER.value)
            return identity.pid if identity is not None else 0

        watch = BrokerWatch()
        showing = keep_probes(probes, lambda: watch.answers, lambda: not watch.hangs(time.monotonic()))
        asking = keep_asking(watch, self._layout, pid)
        return [tasks.create_task(showing, name="probes"), tasks.create_task(asking, name="broker watch")]

    def _note_crash(self, view: ProcessView) -> None:
        self._crashes.take(view, time.time())

    def _with_listener(self, spec: ProcessSpec) -> ProcessSpec:
        if self._listener is None or spec.role is not Role.GATEWAY:
            return spec
        fd = self._listener.fileno()
        return msgspec.structs.replace(spec, env={**spec.env, LISTEN_FD: str(fd)}, fds=(fd,))

    def _rotation(self) -> Rotation:
        """Return the log rotation of the services; the orchestrator rotates the logs of its workers."""
        run, logs = self._config.run, self._layout.logs
        limits = LogLimits(run.log_bytes, run.log_files)
        return Rotation(limits, lambda: [log for log in logs.glob("*.log") if not env_of(log.stem)])

    async def _ended(self, stop: Stop) -> Ending:
        """Wait for the first reason to end the run."""
        asked = asyncio.create_task(stop.wait())
        over = asyncio.create_task(self._supervisor.until(lambda views: _verdict(views) is not None))
        watched = [asyncio.create_task(watch) for watch in self._watches()]
        try:
            await asyncio.wait({asked, over, *watched}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (asked, over, *watched):
                task.cancel()
        if verdict := _verdict(self._supervisor.views()):
            return verdict
        found = next((task.result() for task in watched if task.done()), None)
        if stop.reason is None and found is not None:
            return found
        return Ending(EXIT_INTERRUPTED, f"interrupted by {stop.reason}")

    def _watches(self) -> Iterator[Coroutine[None, None, Ending]]:
        """Yield what else may end this run."""
        if self._config.health.stop_on:
            yield self._unhealthy()
        own = self._config.trainer
        if own.steps and not own.enabled:
            yield trained(self._layout, own.steps)

    async def _unhealthy(self) -> Ending:
        """Wait for a finding of `health.stop_on`, and return it as the end of the run."""
        findings = StopOn(self._config)
        async with EventFeed(self._layout, [topics.telemetry("health", "")]) as feed:
            while True:
                event = await feed.next(LISTEN_S)
                with contextlib.suppress(WireError):
                    found = codec.decode_event(event[1]) if event is not None else None
                    ending = findings.take(found) if isinstance(found, HealthFinding) else None
                    if ending is not None:
                        return ending

    async def _stop(self, reason: str) -> None:
        limits = self._config.orchestrator
        workers_s = limits.end_s + limits.term_grace_s + SERVICE_GRACE_S
        grace_s = {
            role: workers_s if Role.ORCHESTRATOR in roles else SERVICE_GRACE_S
            for roles in STOP_ORDER
            for role in roles
        }
        telling = asyncio.create_task(self._tell_end(grace_s), name="end notice")
        for roles in STOP_ORDER:
            if Role.BROKER in roles:
                await self._release_joined()
            names = [name for name, role in self._roles.items() if role in roles]
            await self._supervisor.stop(names, term_ladder(max(grace_s[role] for role in roles)), reason)
        telling.cancel()
        self._view.board.notice = ""

    async def _tell_end(self, grace_s: Mapping[Role, float]) -> None:
        """Let the view, and `down`, say what the end waits for, once it lasts."""
        drain_s = self._config.orchestrator.end_s
        await asyncio.sleep(END_TOLD_S)
        while True:
            views, board = self._supervisor.views().values(), self._view.board
            board.notice = end_notice(views, board.workers(), grace_s, drain_s, time.monotonic())
            self._write_notice()
            await asyncio.sleep(END_AGAIN_S)

    async def _release_joined(self) -> None:
        """Let the engines and relays of other hosts end, before the broker does."""
        if not self._config.broker.listen:
            return
        self._is_over = True
        self._write_notice()
        await until_joined_end(self._layout, lambda: self._killed)

    def _write_notice(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep the run from its end
            write_json(self._layout.ending, EndNotice(self._view.board.notice, self._is_over))

    def _kill(self) -> None:
        """Kill everything now, but let the broker save its queues; `run` notices and continues from there."""
        self._killed = True
        for name, view in self._supervisor.views().items():
            ladder = term_ladder(SAVE_GRACE_S) if view.role is Role.BROKER else KILL_LADDER
            self._supervisor.retire(name, ladder, "killed by a second signal")


def _verdict(views: Mapping[str, ProcessView]) -> Ending | None:
    """Return how the run ended, or None while it is running."""
    for view in views.values():
        if view.phase is Phase.FATAL:
            return Ending(EXIT_FAILED, cause_of(f"{view.name}: {view.reason}"))
    trainers = [view for view in views.values() if view.role is Role.TRAINER]
    if trainers and all(view.phase in OVER for view in trainers):
        return DONE
    for view in views.values():
        if view.phase in OVER and view.role is not Role.TRAINER:
            return Ending(EXIT_FAILED, f"{view.name} ended: {view.reason}")
    return None


class StopOn:
    """The findings of `health.stop_on`, and which of them ends the run. Pure.

    The first finding of trouble ends it. `solved` is none: the run goes on while another environment has tasks to
    learn. An environment without weight and minimum share only fills up batches: the run does not wait for it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._names = frozenset(config.health.stop_on)
        self._trained = {
            name
            for name, one in config.environment.items()
            if one.split == "train" and (one.weight or one.min_share)
        }
        self._solved: set[str] = set()

    def take(self, found: HealthFinding) -> Ending | None:
        """Take a finding that began, lasts or ended, and return the end of the run; None if the run goes on."""
        if found.finding not in self._names:
            return None
        if found.finding != "solved":
            return None if found.ended else _stopped(EXIT_FAILED, found.env, found)
        if found.ended:
            self._solved.discard(found.env)
            return None
        self._solved.add(found.env)
        if not self._trained <= self._solved:
            return None
        last = f", {found.env} as the last" if len(self._solved) > 1 else ""
        return _stopped(EXIT_DONE, f"{', '.join(sorted(self._solved))}{last}", found)


def _stopped(code: int, envs: str, found: HealthFinding) -> Ending:
    return Ending(code, f"health.stop_on: {found.finding} of {envs}: {found.problem}; {found.remedy}")


async def trained(layout: RunLayout, steps: int) -> Ending:
    """Wait until a trainer of one's own has settled so many steps and has left, and return that end.

    A trainer that has died counts as gone after `broker.silence_s`.
    """
    async with EventFeed(layout, [topics.PRESSURE]) as feed:
        while True:
            event = await feed.next(LISTEN_S)
            with contextlib.suppress(WireError):
                seen = codec.decode_event(event[1]) if event is not None else None
                if isinstance(seen, Pressure) and seen.step >= steps and not seen.trainers:
                    return DONE


@contextlib.contextmanager
def _signals(stop: Stop, kill: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    is_second = False

    def asked(number: signal.Signals) -> None:
        nonlocal is_second
        if is_second:
            kill()
        is_second = True
        stop.request(number.name)

    for number in numbers:
        loop.add_signal_handler(number, asked, number)
    loop.add_signal_handler(END_SIGNAL, stop.request, "down")
    try:
        yield
    finally:
        for number in (*numbers, END_SIGNAL):
            loop.remove_signal_handler(number)
