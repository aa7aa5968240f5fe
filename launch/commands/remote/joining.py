"""Programs that join a run of another host: the process that holds them, from its start to its end.

    directory   the mirror keeps this host's directory of the run fresh; the programs read it like a run directory
    programs    supervised: restarted after a crash, adopted after the death of this process
    drain       by name from anywhere, over the bus; a drained program is not started again, and with the last of them
                this process ends with 0
    SIGTERM     drain all; what still runs after the grace gets SIGTERM, then SIGKILL. A second SIGTERM kills
    change      another configuration of the run: drain all, check it, start again; a refused one ends this process
    end         with that of the run: workers are drained by it, engines and relays hear that it needs them no more
    fresh run   the address serves another run of the same name: end all, set aside what they have of the old one, and
                start again; a trainer ends with an error, since it would go on from its own step

    hang        a worker silent for longer than its `liveness_s` is killed and restarted, as on the run's own host
    probes      live: this process runs; ready: its programs are at work, and the broker answers

Nothing gives up while the broker is away: the programs wait with their groups, and a lasting wait is logged.
"""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.lifecycle import IN_USE
from rolloutmq.bus.producer.resend import resend_spools
from rolloutmq.bus.producer.spool_file import SET_ASIDE
from rolloutmq.bus.rundir import OWN_CONFIG
from rolloutmq.bus.transport.keys.bundle import OWN_KEY
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.bus.transport.mirror.run_copy import Accept
from rolloutmq.launch.commands.remote.earlier_run import EarlierRun
from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.errors import ConfigError, RolloutMQError, UsageError
from rolloutmq.schemas.files import Connection, RunLayout
from rolloutmq.schemas.process import PERMANENT_FAILURE, ProcessSpec, Role, Step, python_command
from rolloutmq.services.monitor.probes.probe_files import ProbeFiles, keep_probes
from rolloutmq.services.monitor.probes.signs import LOOK_S, Signs
from rolloutmq.services.orchestrator.supervision.core import (
    OVER,
    Backoff,
    Ladder,
    Phase,
    ProcessView,
    Rung,
    term_ladder,
)
from rolloutmq.services.orchestrator.supervision.supervisor import Supervisor, identities_of
from rolloutmq.services.process.lock import only_one
from rolloutmq.services.process.logbook import LogLimits, Rotation
from rolloutmq.services.process.runner import Stop, run_service

logger = logging.getLogger(__name__)

RESEND_S: Final = 5.0
"""Time between two looks for groups that ended workers have left."""

Beside = Callable[[Mirror, RunLayout], Awaitable[None]]
"""Runs beside the programs until it is cancelled."""


@dataclass(frozen=True)
class Joining:
    """What joins, and how.

    Attributes:
        name: Name of all of it on this host; a second one of this name in the directory is refused.
        programs: Name, role and command words of each program.
        connection: How this host reaches the run.
        accept: Checks the configuration of the run.
        directory: Directory of this host; None for the usual one.
        grace_s: Time for the programs to end in order after SIGTERM.
        beside: What runs beside them, if anything.
    """

    name: str
    programs: tuple[tuple[str, Role, tuple[str, ...]], ...]
    connection: Connection
    accept: Accept
    directory: Path | None = None
    grace_s: float = 25.0
    beside: Beside | None = None
    serves: bool = False
    """It has an HTTP server, which with a key asks for tokens."""
    own: tuple[str, ...] = ()
    """What its programs have in the directory of the run's state: set aside once another run is there."""
    follows: bool = True
    """It goes on with a fresh run of the same name."""
    is_needed_by_run: bool = False
    """It ends once the run needs it no more. Workers are drained by the run, and a trainer ends by itself."""
    probe_dir: Path | None = None
    """Directory for the files of probes; None for none."""
    is_alone: bool = False
    """It shares its usual directory with no others. Trainer and engines of a host share one, for the weights."""


def join(joining: Joining) -> int:
    """Join a run until all programs have ended, or until a signal; return the exit code. Blocks."""
    crew: Crew | None = None
    probes = ProbeFiles(joining.probe_dir) if joining.probe_dir is not None else None

    async def serve(stop: Stop) -> None:
        nonlocal crew
        mirror = Mirror(
            joining.connection,
            joining.accept,
            joining.directory,
            apart=joining.name if joining.is_alone else "",
            asks=joining.is_alone,
            serves=joining.serves,
            name=joining.name,
            pauses=True,
        )
        refreshing = asyncio.create_task(mirror.run(), name="mirror")
        beside = {refreshing}
        if probes is not None:
            showing = keep_probes(probes, lambda: crew is not None and crew.is_ready())
            beside.add(asyncio.create_task(showing, name="probes"))
        try:
            if await _first(stop, refreshing, mirror.ready()):
                crew = Crew(joining, mirror)
                await crew.run(stop, refreshing)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)

    def kill() -> None:
        if crew is not None:
            crew.kill()

    code = run_service(joining.name, serve, on_force=kill)
    return PERMANENT_FAILURE if crew is not None and crew.is_hopeless else code


class CrewFailedError(UsageError):
    """A program that joined a run of another host was given up, or failed while it ended."""

    def __init__(self, name: str, reason: str, log: str, how: str = "was given up") -> None:
        self.name, self.reason, self.log, self.how = name, reason, log, how

    def __str__(self) -> str:
        return f"{self.name}: {self.how}: {self.reason}; its log is {self.log}"


class Crew:
    """The programs of one `Joining`. For one event loop."""

    def __init__(self, joining: Joining, mirror: Mirror) -> None:
        self._joining = joining
        self._mirror = mirror
        self._layout = mirror.layout
        config = mirror.config
        self._limits = config.orchestrator
        self._earlier = EarlierRun(self._layout, joining.name, joining.own)
        self._identities = self._layout.root / f"joined-{joining.name}.json"
        previous = identities_of(self._identities)
        token = previous[0].marker.partition("/")[0] if previous else secrets.token_hex(8)
        self._previous = previous
        self._programs = Supervisor(token, _backoff(self._limits), identities=self._identities)
        self._rotation = Rotation(LogLimits(config.run.log_bytes, config.run.log_files), self._logs)
        self._signs = Signs(dict(self._sign_files()))

    def kill(self) -> None:
        """Kill all programs now."""
        self._programs.kill()

    async def run(self, stop: Stop, refreshing: "asyncio.Task[None]") -> None:
        """Run the programs until they have ended.

        Raises:
            RunDirInUseError: Another process of this host holds programs of these names.
            ConfigError: The run has another configuration by now, which this host does not accept.
            CrewFailedError: A program was given up, or failed while it ended.
        """
        lock = self._layout.root / f"{self._joining.name}.lock"
        what = f"program of the name {self._joining.name}"
        with only_one(lock, what, "end that process with SIGTERM, or give this one another --name"):
            async with self._programs, asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._rotation.run(), name="logs")]
                beside.append(tasks.create_task(self._bring_home(), name="left spools"))
                beside.append(tasks.create_task(self._watch(), name="signs of life"))
                if self._joining.beside is not None:
                    beside.append(tasks.create_task(_until_cancelled(self._joining.beside, self._mirror)))
                try:
                    await self._govern(stop, refreshing)
                finally:
                    for task in beside:
                        task.cancel()
        self._tell_left()

    async def _govern(self, stop: Stop, refreshing: "asyncio.Task[None]") -> None:
        self._programs.adopt(
            [(one, spec) for one in self._previous for spec in self._specs() if spec.name == one.name]
        )
        self._end_surplus()
        if self._earlier.is_of_another(self._mirror.run_id):  # adopted programs are of that one
            await self._end_now("the run is gone")
        self._earlier.begin(self._mirror.run_id)
        self._start()
        logger.info("joined run=%s directory=%s", self._mirror.run_name, self._layout.root)
        known = self._mirror.changes
        while not self._are_over():
            over = self._programs.until(lambda _: self._are_over())
            if not await _first(stop, refreshing, over, self._mirror.changed()):
                await self._end("asked to end")
                self._require_orderly_end()
                return
            if self._mirror.refused is not None:
                await self._end("the run has another configuration")
                raise self._mirror.refused
            if self._mirror.over and self._joining.is_needed_by_run:
                logger.info("the run has ended run=%s", self._mirror.run_name)
                await self._end("the run has ended")
                return
            if self._mirror.replaced:
                if not await self._turn_over(stop, refreshing):
                    return
                known = self._mirror.changes
            elif self._mirror.changes != known and not self._are_over():
                known = self._mirror.changes
                logger.info("the run has another configuration, starting again")
                await self._end("the run has another configuration")
                self._start()
        self._require_success()

    async def _turn_over(self, stop: Stop, refreshing: "asyncio.Task[None]") -> bool:
        """Begin anew with a fresh run of the same name; False if the process is asked to end.

        Raises:
            ConfigError: These programs do not go on with it; or the configuration is not accepted.
        """
        mirror, known = self._mirror, self._mirror.changes
        logger.warning("the run is gone, a fresh one of its name is there run=%s", mirror.run_name)
        await self._end_now("the run is gone")
        if not self._joining.follows:
            raise ConfigError(
                "--connect",
                f"the run {mirror.run_name} is gone, and a fresh one of its name began there; "
                "start the command again to train that one from its beginning",
            )
        mirror.follow()
        while mirror.changes == known:
            if not await _first(stop, refreshing, mirror.changed()):
                return False
            if mirror.refused is not None:
                raise mirror.refused
        self._earlier.begin(mirror.run_id)
        self._start()
        logger.info("joined run=%s directory=%s", mirror.run_name, self._layout.root)
        return True

    def _start(self) -> None:
        views = self._programs.views()
        for spec in self._specs():
            if spec.name in views and views[spec.name].phase not in OVER:
                continue
            if spec.name in views:
                self._programs.forget(spec.name)
            self._programs.start(spec)

    def _specs(self) -> list[ProcessSpec]:
        module, run_dir = "rolloutmq.launch.service_process", str(self._layout.root)
        key = self._joining.connection.key
        own = {OWN_CONFIG: str(self._layout.own_config(self._joining.name).absolute())}
        own |= {OWN_KEY: key} if key else {}
        return [
            ProcessSpec(
                name=name,
                role=role,
                argv=python_command(sys.executable, module, words[0], "--run-dir", run_dir, *words[1:]),
                log=str(self._layout.log(name)),
                # Who lost its place to a process of another host would only take it back, and both without end.
                hopeless=(2, PERMANENT_FAILURE, IN_USE),
                env=own,
            )
            for name, role, words in self._joining.programs
        ]

    def _end_surplus(self) -> None:
        """End what an earlier command of this name has left beyond these programs, as with a lower --count."""
        wanted = {name for name, _, _ in self._joining.programs}
        left = [
            (one, ProcessSpec(name=one.name, role=one.role, argv=(), log=str(self._layout.log(one.name))))
            for one in self._previous
            if one.name not in wanted
        ]
        ladder = end_ladder(self._joining.grace_s, self._limits.term_grace_s)
        for name in self._programs.adopt(left):
            self._programs.retire(name, ladder, "fewer are wanted")

    def _are_over(self) -> bool:
        return all(view.phase in OVER for view in self._programs.views().values())

    async def _end_now(self, reason: str) -> None:
        """End the programs without a drain: nobody takes what they would finish."""
        ladder = Rung(0.0, Step.TERM), Rung(self._limits.term_grace_s, Step.KILL)
        await self._programs.stop(list(self._programs.views()), ladder, reason)

    async def _end(self, reason: str) -> None:
        ladder = end_ladder(self._joining.grace_s, self._limits.term_grace_s)
        await self._programs.stop(list(self._programs.views()), ladder, reason)

    def _require_success(self) -> None:
        failed = self._failed()
        if failed:
            raise CrewFailedError(failed[0].name, failed[0].reason, str(self._layout.log(failed[0].name)))

    def _require_orderly_end(self) -> None:
        """Raise if a program could not do what was left for it to do: its groups may be lost."""
        for view in self._programs.views().values():
            if view.phase is Phase.ENDED and view.code is not None and view.code > 0:
                log = str(self._layout.log(view.name))
                raise CrewFailedError(view.name, view.reason, log, "failed while it ended")

    @property
    def is_hopeless(self) -> bool:
        """Whether a program was given up at once, since no restart can help it, and not after many crashes."""
        return any(view.crashes < self._limits.crash_limit for view in self._failed())

    def is_ready(self) -> bool:
        """Return whether all programs are at work, as far as they tell, and the broker answers."""
        views = self._programs.views().values()
        are_running = bool(views) and all(view.phase is Phase.RUNNING for view in views)
        return are_running and not self._mirror.problem and self._signs.are_at_work()

    async def _watch(self) -> None:
        """Look for the signs of life of the programs; a worker that hangs is killed and restarted."""
        ladder = term_ladder(self._limits.term_grace_s)
        while True:
            views = self._programs.views()
            found = {name: self._programs.identity(name) for name in views}
            pids = {name: identity.pid for name, identity in found.items() if identity is not None}
            self._signs.look(pids, time.monotonic())
            for name, view in views.items():
                if view.phase is Phase.RUNNING and (reason := self._hang_of(view)):
                    logger.warning("worker hangs worker=%s reason=%s", name, reason)
                    self._programs.hang(name, ladder, reason)
            await asyncio.sleep(LOOK_S)

    def _hang_of(self, view: ProcessView) -> str:
        """Return why a program counts as hanging; empty if it does not."""
        env = view.name.rpartition("-")[0]
        section = self._mirror.config.environment.get(env) if view.role is Role.WORKER else None
        silent_s = self._signs.silent_s(view.name)
        if section is None or section.liveness_s is None or silent_s <= section.liveness_s:
            return ""
        return f"hangs: no sign of life for {silent_s:.0f} s (environment.{env}.liveness_s: {section.liveness_s:g})"

    def _sign_files(self) -> Iterator[tuple[str, Path]]:
        """Yield where each program shows its life; ranks and relays do not."""
        for name, role, _ in self._joining.programs:
            if role is Role.WORKER:
                yield name, self._layout.sign(name)
            elif role is Role.INFERENCE:
                yield name, self._layout.engine(name)

    def _failed(self) -> list[ProcessView]:
        return [view for view in self._programs.views().values() if view.phase is Phase.FATAL]

    def _logs(self) -> list[Path]:
        return [self._layout.log(name) for name, _, _ in self._joining.programs]

    async def _bring_home(self) -> None:
        """Send the groups that ended workers of these names have left, except those that a fenced one set aside.

        Another host has the name of a fenced worker, and to send its groups would fence that host's worker. The next
        worker of the name on this host sends them as it starts.
        """
        told = ""
        while True:
            await asyncio.sleep(RESEND_S)
            living = {name for name, view in self._programs.views().items() if view.phase not in OVER}
            try:
                await resend_spools(
                    self._layout.root,
                    self._layout.spools,
                    ack_logs=self._layout.acks,
                    living=_Others(self._joining.name, living),
                )
                told = ""
            except RolloutMQError as error:
                if str(error) != told:
                    logger.warning("spools not sent error=%s", error)
                told = str(error)

    def _tell_left(self) -> None:
        """Say which groups wait on this host for the next start."""
        left = [
            path.name for path in self._layout.spools.glob("*") if path.name.startswith(self._joining.name)
        ]
        if left:
            logger.warning(
                "unsent groups are kept files=%s directory=%s; start again under this name to send them",
                ", ".join(left),
                self._layout.spools,
            )


class _Others:
    """The producers whose groups are not to be sent by this process: those of others, and those that live."""

    def __init__(self, name: str, living: set[str]) -> None:
        self._name = name
        self._living = living

    def __contains__(self, producer: object) -> bool:
        is_mine = (
            isinstance(producer, str) and producer.startswith(f"{self._name}.") and SET_ASIDE not in producer
        )
        return not is_mine or any(
            producer == one or str(producer).startswith(f"{one}.") for one in self._living
        )


async def _until_cancelled(beside: Beside, mirror: Mirror) -> None:
    await beside(mirror, mirror.layout)


async def _first(stop: Stop, refreshing: "asyncio.Task[None]", *waits: Awaitable[Any]) -> bool:
    """Wait for the first of some waits; False if the process is asked to end. Raises what the mirror raises."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({*tasks, stopping, refreshing}, return_when=asyncio.FIRST_COMPLETED)
        if refreshing.done():
            refreshing.result()
        for task in tasks:
            if task.done():
                task.result()
        return not stopping.done()
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.wait({*tasks, stopping})


def end_ladder(grace_s: float, term_grace_s: float) -> Ladder:
    """Return how programs end: drain at once, SIGTERM after the grace, then SIGKILL."""
    return Rung(0.0, Step.USR1), Rung(grace_s, Step.TERM), Rung(grace_s + term_grace_s, Step.KILL)


def _backoff(limits: OrchestratorConfig) -> Backoff:
    return Backoff(limits.backoff_s, limits.backoff_max_s, limits.crash_limit, limits.stable_s)
