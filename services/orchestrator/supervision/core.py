"""The supervision state machine. Pure: desired and observed processes in, actions out.

A process is WAITING for its (re)start, RUNNING, STOPPING down a ladder, ENDED, or FATAL.

    exit 0, unasked      the work is done: ENDED; with Restart.ALWAYS a crash
    any other end        a crash: restart after a back-off that doubles, with jitter; FATAL with the
                         reason after `crash_limit` crashes in a row, that is without `stable_s` of
                         uptime between two of them. With Restart.NEVER the first crash is FATAL, as
                         is an exit code that the spec lists as hopeless. A spare process may be
                         killed (SIGKILL) any number of times: that alone never makes it FATAL.
                         An observer crashes any number of times: from `crash_limit` crashes in a row
                         on it is restarted once in `OBSERVER_PAUSE_S`.
    a kind               processes that run the same program, whose readiness is reported (`ready`).
                         Their uptime counts from READY, not from the start: a process that dies on
                         its way to READY, however slowly, is in a crash loop. Once one of them has
                         done work (`prove`), no end of any of them is hopeless: what worked before
                         may work again, so it is a crash like any other.
    retired              a ladder of timed rungs: DRAIN (over the bus), SIGUSR1, SIGTERM and SIGCONT
                         to the group, SIGKILL to the group. No end on the ladder is a crash. A
                         second ladder can only bring rungs forward. A foreign program gets no SIGUSR1.
    failed               like retired, but FATAL: it can never work, so it is not restarted. Of a
                         proven kind, a crash.
    hung                 SIGTERM and SIGKILL like retired, but a crash with the given reason. The silence before it
                         is no uptime: a process that hangs right after READY is in a crash loop, however
                         long its silence is watched.
    MISSED_FELLOW        a crash that accuses others: processes of its crew that lived as long as it
                         waited count as hanging unless they end within `FELLOW_S`: SIGKILL to the
                         group, a crash like any other.

The caller passes the clock, in seconds of any monotonic origin. This module touches no process.
"""

import math
import random
import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from rolloutmq.schemas.process import MISSED_FELLOW, ProcessSpec, Restart, Role, Step

JITTER: Final = 0.25
"""Random part taken off a back-off, so that processes that died together restart apart."""
OBSERVER_PAUSE_S: Final = 60.0
"""Least time between two starts of an observer that crashes on and on."""
UNKILLABLE_S: Final = 10.0
"""Time after SIGKILL at which a process still alive is given up."""

FELLOW_S: Final = 10.0
"""Time within which all processes waiting for a hanging one have timed out, too."""


class Phase(StrEnum):
    """Life-cycle phase of a process."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"
    FATAL = "fatal"


OVER: Final = frozenset({Phase.ENDED, Phase.FATAL})


@dataclass(frozen=True, slots=True)
class Rung:
    """Stop action, and its delay in seconds after the request."""

    after_s: float
    step: Step


Ladder = tuple[Rung, ...]
Schedule = tuple[tuple[float, Step], ...]
"""Remaining steps of a ladder with their absolute times, soonest first."""

KILL_LADDER: Final[Ladder] = (Rung(0.0, Step.KILL),)


def term_ladder(grace_s: float) -> Ladder:
    """Return the ladder of services: SIGTERM at once, SIGKILL after `grace_s`."""
    return Rung(0.0, Step.TERM), Rung(grace_s, Step.KILL)


def drain_ladder(confirm_s: float, deadline_s: float, grace_s: float) -> Ladder:
    """Return the drain ladder: over the bus, SIGUSR1 after `confirm_s`, SIGTERM at `deadline_s`, then SIGKILL."""
    return (
        Rung(0.0, Step.DRAIN),
        Rung(confirm_s, Step.USR1),
        Rung(deadline_s, Step.TERM),
        Rung(deadline_s + grace_s, Step.KILL),
    )


@dataclass(frozen=True, slots=True)
class Backoff:
    """Restart back-off. Fields as in `OrchestratorConfig`."""

    first_s: float = 0.5
    max_s: float = 30.0
    crash_limit: int = 5
    stable_s: float = 10.0

    def pause_s(self, crashes: int, chance: float) -> float:
        """Return the pause after `crashes` early crashes in a row, for a `chance` in [0, 1)."""
        pause = min(self.max_s, self.first_s * 2.0 ** min(max(crashes, 1) - 1, 62))
        return pause * (1.0 - JITTER * chance)


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start the process; reply with `started` or `start_failed`."""

    spec: ProcessSpec


@dataclass(frozen=True, slots=True)
class SignalProcess:
    """Apply this rung of the ladder to the process."""

    name: str
    step: Step


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop watching the process: it survives every signal."""

    name: str
    reason: str


Action = StartProcess | SignalProcess | GiveUp


@dataclass(frozen=True, slots=True)
class ProcessView:
    """Public state of one process.

    Attributes:
        since: Start of the phase, on the supervisor's clock.
        due: Time of its next start, if WAITING.
        crashes: Crashes in a row.
        restarts: Starts after the first.
        reason: Reason of the phase; how the last life ended.
        failing: It will be FATAL, or is already.
        born: Time since which it is supervised.
        ready_at: Time at which its present life was ready; None before, and if it has none.
        was_ready: This life or an earlier one was ready.
        adopted: Its present life began under an earlier supervisor.
        returns: It is being ended for a failure, and starts again.
        rungs: Remaining steps, if it is being ended.
        code: Exit code of the last life, or minus the signal that killed it; None before its end, or if it is unknown.
    """

    name: str
    role: Role
    phase: Phase
    since: float
    due: float
    crashes: int
    restarts: int
    reason: str
    failing: bool = False
    born: float = 0.0
    ready_at: float | None = None
    was_ready: bool = False
    adopted: bool = False
    returns: bool = False
    rungs: Schedule = ()
    code: int | None = None

    @property
    def ends(self) -> float | None:
        """Return the time of its SIGTERM, or else of its SIGKILL, if it is being ended."""
        return next((at for at, step in self.rungs if step in {Step.TERM, Step.KILL}), None)


@dataclass(frozen=True, slots=True)
class EarlierStop:
    """How an earlier supervisor was ending a process.

    Attributes:
        since: Time of the request.
        reason: Reason of the request.
        rungs: Remaining steps.
        failing: It is FATAL once it has ended.
        returns: Its end is a crash.
    """

    since: float
    reason: str
    rungs: Schedule = ()
    failing: bool = False
    returns: bool = False


@dataclass(frozen=True, slots=True)
class EarlierLife:
    """What an earlier supervisor knew of a process: was it ready, now or before, its crashes in a row, its birth, and
    how it was being ended."""

    ready: bool = False
    was_ready: bool = False
    crashes: int = 0
    born: float = math.inf
    stop: EarlierStop | None = None


@dataclass(slots=True)
class _Slot:
    spec: ProcessSpec
    phase: Phase
    since: float
    born: float
    due: float = 0.0
    crashes: int = 0
    starts: int = 0
    reason: str = ""
    doomed: str = ""
    """Reason for FATAL once the process has ended."""
    failed: str = ""
    """Reason of the crash that its requested end counts as."""
    ready_at: float | None = None
    heard_at: float = -math.inf
    """Last time at which its present life, if ready, was heard."""
    was_ready: bool = False
    adopted: bool = False
    rungs: list[tuple[float, Step]] = field(default_factory=list)
    """Remaining rungs with absolute times, soonest first."""
    killed_at: float | None = None
    held: bool = False
    """Its restart waits for a release, too."""
    missed: str = ""
    """Reason of the kill if it does not end soon."""
    overdue: float = math.inf
    """Time of that kill."""
    code: int | None = None
    """How the last life ended."""

    @property
    def is_killed(self) -> bool:
        """Return whether it is being ended because it hangs."""
        return bool(self.missed) and self.overdue == math.inf

    def view(self) -> ProcessView:
        return ProcessView(
            self.spec.name,
            self.spec.role,
            self.phase,
            self.since,
            self.due,
            self.crashes,
            max(0, self.starts - 1),
            self.reason,
            bool(self.doomed),
            self.born,
            self.ready_at,
            self.was_ready,
            self.adopted,
            bool(self.failed),
            tuple(self.rungs),
            self.code,
        )


class SupervisorCore:
    """State machine from desired and observed processes to actions. Not thread-safe."""

    def __init__(self, backoff: Backoff, seed: int = 0) -> None:
        self._backoff = backoff
        self._chance = random.Random(seed)
        self._slots: dict[str, _Slot] = {}
        self._proven: set[str] = set()

    def views(self) -> dict[str, ProcessView]:
        """Return every process, by name, except the forgotten."""
        return {name: slot.view() for name, slot in self._slots.items()}

    def want(self, spec: ProcessSpec, now: float) -> None:
        """Run this process from now on. ValueError if one of its name is not over yet."""
        self._open(spec, Phase.WAITING, now).due = now

    def adopt(self, spec: ProcessSpec, now: float, earlier: EarlierLife = EarlierLife()) -> None:
        """Supervise a process that already runs; one that was being ended is ended at the times of before."""
        slot = self._open(spec, Phase.RUNNING, now)
        slot.starts, slot.adopted, slot.born = 1, True, min(earlier.born, now)
        slot.ready_at = now if earlier.ready else None
        slot.was_ready = earlier.ready or earlier.was_ready
        slot.crashes = min(earlier.crashes, self._backoff.crash_limit - 1)
        if earlier.stop is not None:
            self._go_on_stopping(slot, earlier.stop, now)

    def keep_fatal(self, spec: ProcessSpec, since: float, reason: str, earlier: EarlierLife) -> None:
        """Remember a process that an earlier supervisor gave up at that time."""
        slot = self._open(spec, Phase.FATAL, since)
        slot.starts, slot.reason, slot.doomed = 1, reason, reason
        slot.born, slot.was_ready = min(earlier.born, since), earlier.was_ready
        slot.crashes = min(earlier.crashes, self._backoff.crash_limit)

    def ready(self, name: str, now: float, silent_s: float = 0.0) -> None:
        """Record that a running process is ready; repeat it, since after `stable_s` its crashes are forgotten.

        Args:
            name: The process.
            now: Time.
            silent_s: Time since it was heard last.
        """
        slot = self._slots[name]
        if slot.phase is not Phase.RUNNING or slot.is_killed:
            return
        slot.ready_at = now if slot.ready_at is None else slot.ready_at
        slot.heard_at = max(slot.heard_at, now - silent_s)
        slot.was_ready = True
        if slot.crashes and self._is_stable(slot, slot.heard_at):
            slot.crashes, slot.reason = 0, ""

    def prove(self, kind: str) -> None:
        """Record that a process of this kind has done work."""
        self._proven.add(kind)

    def is_proven(self, kind: str) -> bool:
        """Return whether a process of this kind has done work."""
        return kind in self._proven

    def forget(self, name: str) -> None:
        """Forget a process that is over."""
        if self._slots[name].phase in OVER:
            del self._slots[name]

    def retire(self, name: str, ladder: Ladder, reason: str, now: float) -> None:
        """End a process for good. Does nothing if it is over."""
        slot = self._slots[name]
        if slot.phase in OVER:
            return
        if slot.phase is Phase.WAITING:
            self._over(slot, reason, now)
            return
        slot.failed = ""
        if slot.phase is Phase.RUNNING:
            self._enter(slot, Phase.STOPPING, reason, now)
            skipped = Step.USR1 if slot.spec.foreign else None
            rungs = [(now + rung.after_s, rung.step) for rung in ladder if rung.step is not skipped]
            slot.rungs = _sooner(slot.rungs, ladder, now) if slot.rungs else rungs
        else:
            slot.rungs = _sooner(slot.rungs, ladder, now)

    def hold(self, name: str, held: bool) -> None:
        """Hold back the restart of a waiting process, or release it; other phases ignore it."""
        slot = self._slots[name]
        slot.held = held and slot.phase is Phase.WAITING

    def fail(self, name: str, ladder: Ladder, reason: str, now: float) -> None:
        """End a process that reports a failure: FATAL once it has ended, with the reason; of a proven kind a crash."""
        slot = self._slots[name]
        if slot.phase is Phase.FATAL:
            return
        if slot.spec.kind in self._proven:
            if slot.phase is Phase.RUNNING:
                self.retire(name, ladder, reason, now)
                slot.failed = reason
            return
        slot.doomed = slot.doomed or reason
        if slot.phase is Phase.ENDED:
            self._over(slot, reason, now)
        self.retire(name, ladder, reason, now)

    def hang(self, name: str, ladder: Ladder, reason: str, now: float) -> None:
        """End a process that hangs: a crash if it runs, and sooner if it is being ended. Harmless if repeated."""
        slot = self._slots[name]
        if slot.phase is Phase.STOPPING:
            slot.rungs = _sooner(slot.rungs, ladder, now)
        elif slot.phase is Phase.RUNNING and not slot.is_killed:
            slot.missed = slot.reason = reason
            slot.overdue = math.inf
            slot.rungs = [(now + rung.after_s, rung.step) for rung in ladder]

    def started(self, name: str, now: float) -> None:
        """Record that the process of a `StartProcess` runs."""
        slot = self._slots[name]
        slot.starts += 1
        slot.adopted = False
        self._enter(slot, Phase.RUNNING, slot.reason, now)

    def start_failed(self, name: str, why: str, now: float) -> None:
        """Record that the process of a `StartProcess` could not be started: counts as an immediate crash."""
        slot = self._slots[name]
        slot.starts += 1
        slot.since = now
        self._crashed(slot, why, now)

    def exited(self, name: str, code: int | None, why: str, now: float) -> None:
        """Record the end of a process.

        Args:
            name: The process.
            code: Exit code, or minus the signal that killed it, or None if unknown.
            why: The same as text, with its last log line.
            now: Time.
        """
        slot = self._slots[name]
        slot.code = code
        is_done = code == 0 and slot.spec.restart is not Restart.ALWAYS and not slot.is_killed
        if slot.failed:
            self._crashed(slot, why if code and code > 0 else slot.failed, now, code)
            return
        if slot.phase is Phase.STOPPING or is_done:
            self._over(slot, why, now)
            return
        is_hopeless = code in slot.spec.hopeless and slot.spec.kind not in self._proven
        if is_hopeless and not slot.is_killed:
            slot.doomed = why
        if code == MISSED_FELLOW:
            self._suspect_fellows(slot, now)
        self._crashed(slot, slot.missed if slot.is_killed else why, now, code)

    def tick(self, now: float) -> list[Action]:
        """Return the due actions. Call it after every event and at `due()`."""
        actions: list[Action] = []
        for name, slot in self._slots.items():
            if slot.phase is Phase.WAITING and slot.due <= now and not slot.held:
                actions.append(StartProcess(slot.spec))
            while slot.rungs and slot.rungs[0][0] <= now:
                step = slot.rungs.pop(0)[1]
                slot.killed_at = now if step is Step.KILL else slot.killed_at
                actions.append(SignalProcess(name, step))
            if slot.overdue <= now:
                slot.overdue, slot.killed_at, slot.reason = math.inf, now, slot.missed
                actions.append(SignalProcess(name, Step.KILL))
            if slot.killed_at is not None and slot.killed_at + UNKILLABLE_S <= now:
                slot.doomed = "survived SIGKILL"
                self._over(slot, slot.doomed, now)
                actions.append(GiveUp(name, slot.doomed))
        return actions

    def due(self) -> float | None:
        """Return the time of the next action of `tick`, or None if only an event can cause one."""
        return min((at for slot in self._slots.values() for at in _times(slot)), default=None)

    def validate(self) -> None:
        """Raise AssertionError if a slot contradicts itself; for tests."""
        for name, slot in self._slots.items():
            assert name == slot.spec.name
            assert not slot.rungs or slot.phase is Phase.STOPPING or slot.is_killed, (name, slot.phase)
            assert slot.rungs == sorted(slot.rungs, key=lambda rung: rung[0]), name
            assert (slot.phase is Phase.FATAL) <= bool(slot.reason), name
            assert not slot.held or slot.phase is Phase.WAITING, (name, slot.phase)
            assert (slot.overdue < math.inf) <= bool(slot.missed and slot.phase is Phase.RUNNING), name
            assert not slot.failed or slot.phase is Phase.STOPPING, (name, slot.phase)
            assert slot.ready_at is None or slot.phase in {Phase.RUNNING, Phase.STOPPING}, (name, slot.phase)
            assert slot.crashes <= self._backoff.crash_limit, name

    def _open(self, spec: ProcessSpec, phase: Phase, now: float) -> _Slot:
        old = self._slots.get(spec.name)
        if old is not None and old.phase not in OVER:
            raise ValueError(f"process {spec.name} is {old.phase}")
        self._slots[spec.name] = slot = _Slot(spec, phase, now, now)
        return slot

    def _go_on_stopping(self, slot: _Slot, stop: EarlierStop, now: float) -> None:
        self._enter(slot, Phase.STOPPING, stop.reason, min(stop.since, now))
        # A step that was taken may not have arrived: an order to drain ends with its sender.
        steps = {step for _, step in stop.rungs}
        again = Step.DRAIN if Step.TERM in steps else Step.KILL
        repeated = [] if again in steps else [(now, again)]
        slot.rungs = sorted([*repeated, *stop.rungs], key=lambda rung: rung[0])
        slot.doomed = stop.reason if stop.failing else ""
        slot.failed = stop.reason if stop.returns else ""

    def _suspect_fellows(self, accuser: _Slot, now: float) -> None:
        """Mark the processes of a crew that one of them may have waited for; young ones are excluded."""
        name, crew, patience_s = accuser.spec.name, accuser.spec.crew, accuser.spec.crew_patience_s
        for slot in self._slots.values():
            fellow = slot.spec.crew == crew and slot is not accuser and slot.phase is Phase.RUNNING
            if fellow and crew and not slot.missed and now - slot.since >= patience_s:
                slot.missed = f"hangs: {name} gave up after waiting {patience_s:g} s for it"
                slot.overdue = now + FELLOW_S

    def _crashed(self, slot: _Slot, why: str, now: float, code: int | None = None) -> None:
        backoff = self._backoff
        until = slot.heard_at if slot.is_killed and slot.spec.kind else now
        slot.crashes = 0 if self._is_stable(slot, until) else slot.crashes + 1
        if slot.spec.spare and code == -signal.SIGKILL:
            slot.crashes = min(slot.crashes, backoff.crash_limit - 1)
        pause_s = backoff.pause_s(slot.crashes, self._chance.random())
        if slot.spec.restart is Restart.NEVER:
            slot.doomed = slot.doomed or why
        elif slot.spec.observer and slot.crashes >= backoff.crash_limit:
            slot.crashes, pause_s = backoff.crash_limit, max(pause_s, OBSERVER_PAUSE_S)
        elif slot.crashes >= backoff.crash_limit:
            stable = f"{backoff.stable_s:g} s"
            when = f"before it was ready for {stable}" if slot.spec.kind else f"within {stable} of its start"
            slot.doomed = (
                slot.doomed or f"crashed {slot.crashes} times in a row, each {when}; the last: {why}"
            )
        if slot.doomed:
            self._over(slot, slot.doomed, now)
            return
        slot.ready_at = None
        self._enter(slot, Phase.WAITING, why, now)
        slot.due = now + pause_s

    def _is_stable(self, slot: _Slot, until: float) -> bool:
        """Return whether the present life was up, and ready if that is reported, for `stable_s` until this time."""
        up_at = slot.ready_at if slot.spec.kind else slot.since
        return up_at is not None and until - up_at >= self._backoff.stable_s

    def _over(self, slot: _Slot, reason: str, now: float) -> None:
        slot.ready_at = None
        phase = Phase.FATAL if slot.doomed else Phase.ENDED
        self._enter(slot, phase, slot.doomed or reason, now)

    @staticmethod
    def _enter(slot: _Slot, phase: Phase, reason: str, now: float) -> None:
        slot.phase, slot.reason, slot.since = phase, reason, now
        slot.held, slot.missed, slot.overdue, slot.killed_at = False, "", math.inf, None
        slot.failed = ""
        if phase is not Phase.STOPPING:
            slot.heard_at = -math.inf
            slot.rungs.clear()


def _times(slot: _Slot) -> list[float]:
    if slot.phase is Phase.WAITING:
        return [] if slot.held else [slot.due]
    times = [at for at, _ in slot.rungs[:1]]
    times += [slot.overdue] if slot.overdue < math.inf else []
    return times if slot.killed_at is None else [*times, slot.killed_at + UNKILLABLE_S]


def _sooner(rungs: list[tuple[float, Step]], ladder: Ladder, now: float) -> list[tuple[float, Step]]:
    """Bring rungs forward to the times of a second ladder, and drop those it overtakes."""
    left = {step: at for at, step in rungs}
    for rung in ladder:
        if rung.step in left:
            left[rung.step] = min(left[rung.step], now + rung.after_s)
    order = list(Step)
    # A rung after a harder one would come too late.
    kept = [
        (at, step)
        for step, at in left.items()
        if all(at < left[harder] for harder in order[order.index(step) + 1 :] if harder in left)
    ]
    return sorted(kept, key=lambda rung: rung[0])
