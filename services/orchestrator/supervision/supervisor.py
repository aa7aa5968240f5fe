"""The supervisor: runs processes and applies the decisions of the supervision state machine.

It owns the processes, their pidfds in the event loop, one timer, and the file of their identities. It decides nothing:
every event goes to `SupervisorCore`, and every action comes from there. It uses only callbacks, without a task of its
own. The orchestrator uses it for workers, the launcher for services.

    async with Supervisor(token, Backoff(), identities=path) as supervisor:
        supervisor.start(spec)
        await supervisor.until(lambda views: views["trainer"].phase in OVER)
        await supervisor.stop(["trainer"], term_ladder(5.0), "the run is over")
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Step
from rolloutmq.services.orchestrator.supervision.core import (
    KILL_LADDER,
    OVER,
    Action,
    Backoff,
    EarlierLife,
    GiveUp,
    Ladder,
    ProcessView,
    SignalProcess,
    StartProcess,
    SupervisorCore,
)
from rolloutmq.services.process.child import Child, LocalSpawner, Spawner
from rolloutmq.services.process.ending import noted_code
from rolloutmq.services.process.logbook import last_lines, last_message
from rolloutmq.services.process.stacks import fault_in

logger = logging.getLogger(__name__)

FAULT_LINES: Final = 1000
"""Most lines of a log in which the stacks of a fatal signal are looked for."""
Drain = Callable[[str, str], None]
"""Called with name and reason to drain a process over the bus; must not block."""
Change = Callable[[ProcessView], None]
"""Called with each process whose phase or reason changed; must not block or raise."""


def identities_of(path: Path) -> list[ProcessIdentity]:
    """Return the identities of an earlier life; a damaged file is moved aside, and markers replace it."""
    try:
        return read_json(path, list[ProcessIdentity]) or []
    except msgspec.MsgspecError as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        logger.error("identities unreadable path=%s error=%s kept=%s", path, error, aside)
        return []


class Supervisor:
    """Processes by name. Belongs to one event loop; every method but `stop` and `until` returns at once.

    Args:
        token: Run token, first half of the marker of every process.
        backoff: Restart back-off.
        identities: File with the identities of the running processes; None for none.
        drain: Sends a drain over the bus; without it that rung does nothing.
        on_change: Called after each change.
        seed: Seed of the jitter.
        spawner: Where the processes run; None for this host.
    """

    def __init__(
        self,
        token: str,
        backoff: Backoff,
        *,
        identities: Path | None = None,
        drain: Drain | None = None,
        on_change: Change | None = None,
        seed: int = 0,
        spawner: Spawner | None = None,
    ) -> None:
        self._token = token
        self._core = SupervisorCore(backoff, seed)
        self._identities = identities
        self._drain = drain
        self._on_change = on_change
        self._spawner = spawner or LocalSpawner()
        self._processes: dict[str, Child] = {}
        self._specs: dict[str, ProcessSpec] = {}
        self._seen: dict[str, ProcessView] = {}
        self._written: list[ProcessIdentity] | None = None
        self._failures = LogThrottle()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Kill the remaining processes; for an orderly end call `stop` inside the block."""
        try:
            await self.stop(list(self.views()), KILL_LADDER, "the supervisor ends")
        finally:
            self._release()

    def views(self) -> Mapping[str, ProcessView]:
        """Return every process by name, ended ones included."""
        return self._core.views()

    def identity(self, name: str) -> ProcessIdentity | None:
        """Return the identity of the running process, or None; also while a cluster finds no host for it."""
        process = self._processes.get(name)
        return None if process is None or not process.identity.pid else process.identity

    def start(self, spec: ProcessSpec) -> None:
        """Run this process from now on; ValueError if one of its name is not over."""
        self._core.want(spec, time.monotonic())
        self._specs[spec.name] = spec
        self._advance()

    def adopt(
        self,
        found: Iterable[tuple[ProcessIdentity, ProcessSpec]],
        earlier: Mapping[str, EarlierLife] | None = None,
    ) -> list[str]:
        """Take over running processes, each as its spec; return the names of those found alive.

        Args:
            found: Identities and specs.
            earlier: What the earlier supervisor knew of them, by name.
        """
        adopted, known = [], earlier or {}
        for identity, spec in found:
            if (process := self._spawner.adopt(identity)) is None:
                continue
            self._core.adopt(spec, time.monotonic(), known.get(spec.name, EarlierLife()))
            self._specs[spec.name] = spec
            self._hold(process)
            adopted.append(spec.name)
            logger.info("adopted name=%s pid=%d", spec.name, identity.pid)
        self._advance()
        return adopted

    def keep_fatal(
        self, spec: ProcessSpec, since: float, reason: str, earlier: EarlierLife = EarlierLife()
    ) -> None:
        """Show a process that an earlier supervisor gave up, since when and why; it is not started."""
        self._core.keep_fatal(spec, since, reason, earlier)
        self._advance()

    def ready(self, name: str, silent_s: float) -> None:
        """Record that a process is ready, and heard last so many seconds ago; repeat it while it is."""
        self._core.ready(name, time.monotonic(), silent_s)

    def prove(self, kind: str) -> None:
        """Record that a process of this kind has done work: no end of one is hopeless from now on."""
        if not self._core.is_proven(kind):
            logger.info("proven kind=%s", kind)
            self._core.prove(kind)

    def is_proven(self, kind: str) -> bool:
        """Return whether a process of this kind has done work."""
        return self._core.is_proven(kind)

    def retire(self, name: str, ladder: Ladder, reason: str) -> None:
        """Start to end a process for good. Repeating it, or with a shorter ladder, is harmless."""
        self._core.retire(name, ladder, reason, time.monotonic())
        self._advance()

    def hold(self, name: str, held: bool) -> None:
        """Hold back the restart of a process, or release it."""
        self._core.hold(name, held)
        self._advance()

    def forget(self, name: str) -> None:
        """Remove an ended process from the views."""
        self._core.forget(name)
        self._advance()

    def fail(self, name: str, ladder: Ladder, reason: str) -> None:
        """End a process that reports a failure: it becomes FATAL with this reason; of a proven kind, a crash."""
        self._core.fail(name, ladder, reason, time.monotonic())
        self._advance()

    def hang(self, name: str, ladder: Ladder, reason: str) -> None:
        """End a process that hangs, and restart it like a crashed one. Repeating it is harmless."""
        self._core.hang(name, ladder, reason, time.monotonic())
        self._advance()

    async def stop(self, names: Iterable[str], ladder: Ladder, reason: str) -> None:
        """Retire these processes together and wait for their end, at most as long as the ladder."""
        wanted = [name for name in names if name in self.views()]
        for name in wanted:
            self.retire(name, ladder, reason)
        await self.until(lambda views: all(views[name].phase in OVER for name in wanted))

    async def until(self, condition: Callable[[Mapping[str, ProcessView]], bool]) -> None:
        """Wait until the condition holds; it is checked after each change. Cancellation is safe."""
        while not condition(self.views()):
            await self._changed.wait()

    def kill(self) -> None:
        """Kill everything now without waiting, after a second Ctrl-C."""
        for name, process in self._processes.items():
            process.send_group(signal.SIGKILL)
            self._spawner.end_marked(process.identity.marker)
            logger.warning("killed name=%s", name)

    def _advance(self) -> None:
        """Apply due actions, report changes, and set the timer to the next one."""
        while actions := self._core.tick(time.monotonic()):
            for action in actions:
                self._carry_out(action)
        self._save()
        self._set_timer()
        self._tell()

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartProcess(spec):
                self._start(spec)
            case SignalProcess(name, step):
                self._end(name, step)
            case GiveUp(name, reason):
                logger.error("gave up name=%s reason=%s", name, reason)
                self._let_go(self._processes[name])

    def _start(self, spec: ProcessSpec) -> None:
        try:
            process = self._spawner.spawn(spec, self._token)
        except OSError as error:
            logger.error("not started name=%s error=%s", spec.name, error)
            self._core.start_failed(spec.name, f"cannot be started: {error}", time.monotonic())
            return
        logger.info("started name=%s pid=%d", spec.name, process.identity.pid)
        self._hold(process)
        self._core.started(spec.name, time.monotonic())

    def _end(self, name: str, step: Step) -> None:
        logger.info("ending name=%s step=%s reason=%s", name, step, self.views()[name].reason)
        process = self._processes[name]
        match step:
            case Step.DRAIN:
                if self._drain is not None:
                    self._drain(name, self.views()[name].reason)
            case Step.USR1:
                process.send(signal.SIGUSR1)
            case Step.TERM:
                process.send_group(signal.SIGTERM)
                # A stopped process would receive the signal only later.
                process.send_group(signal.SIGCONT)
            case Step.KILL:
                process.send_group(signal.SIGKILL)

    def _hold(self, process: Child) -> None:
        self._processes[process.identity.name] = process
        self._loop.add_reader(process.fileno(), self._ended, process)

    def _ended(self, process: Child) -> None:
        found = process.poll()
        if found is None:
            self._save()  # a cluster has found a host: its identity is another one
            return
        name = process.identity.name
        self._let_go(process)
        noted = noted_code(Path(self._specs[name].log), process.identity)
        found = replace(found, code=noted) if found.code is None else found
        why = str(found)
        if found.code is not None and found.code > 0 and (line := self._last_message(name)):
            why = f"{found}: {line}"
        elif found.code is not None and found.code < 0 and (place := self._fault(name)):
            why = f"{found} at {place}"
        logger.info("ended name=%s pid=%d how=%s", name, process.identity.pid, found)
        self._core.exited(name, found.code, why, time.monotonic())
        self._advance()

    def _last_message(self, name: str) -> str:
        return last_message(Path(self._specs[name].log))

    def _fault(self, name: str) -> str:
        """Return the place of the user's code at a fatal signal, from the end of the log."""
        return fault_in("\n".join(last_lines(Path(self._specs[name].log), FAULT_LINES)))

    def _let_go(self, process: Child) -> None:
        self._loop.remove_reader(process.fileno())
        del self._processes[process.identity.name]
        process.close()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._core.due()
        # The loop's clock has millisecond resolution: add one, or the timer could fire early.
        wait_s = None if due is None else max(0.0, due - time.monotonic()) + 1e-3
        self._timer = None if wait_s is None else self._loop.call_later(wait_s, self._advance)

    def _tell(self) -> None:
        views = dict(self.views())
        news = [view for name, view in views.items() if self._seen.get(name) != view]
        self._seen = views
        if not news:
            return
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._on_change is not None:
            for view in news:
                self._on_change(view)

    def _save(self) -> None:
        identities = [process.identity for process in self._processes.values()]
        if self._identities is None or identities == self._written:
            return
        try:
            write_json(self._identities, identities)
        except OSError as error:
            # Supervision continues; only an adoption after our own death would miss the change.
            if self._failures.is_due(str(error), time.monotonic()):
                logger.error("identities not written path=%s error=%s", self._identities, error)
            return
        self._written = identities

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for process in list(self._processes.values()):
            self._let_go(process)
