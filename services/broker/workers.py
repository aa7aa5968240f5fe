"""What workers report of themselves, and which of them were told to drain.

A drain is state: it is repeated on `control.<worker>/` until the worker says that it drains, and it ends with the
process that it was for.
"""

from collections import Counter, defaultdict
from typing import Final

import msgspec

from rolloutmq.schemas.control import Drain, WorkerBeat, WorkerState, WorkerStatus

GONE_S: Final = 30.0
"""How long a worker that left stays in the table, for people who look."""
SILENT_S: Final = 120.0
"""How long a worker that fell silent stays in the table; one that failed stays for good."""
WORKERS_LIMIT: Final = 10_000
"""Workers in the table: a status of so many is 3 MB."""

_CONFIRMED: Final = frozenset({WorkerState.DRAINING, WorkerState.GONE, WorkerState.FAILED})


class _Told(msgspec.Struct):
    drain: Drain
    pid: int = 0
    """The process that it is for; 0 for whichever beats first."""
    confirmed: bool = False
    due: float = 0.0


class Workers:
    """The table of workers, and the drains."""

    def __init__(self) -> None:
        self._beats: dict[str, tuple[WorkerBeat, float]] = {}
        self._told: dict[str, _Told] = {}
        self.late_members: Counter[str] = Counter()
        """Sequences that came too late for their groups, by environment, in this life of the broker."""
        self.blocked_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that rollout slots have waited for credit, likewise."""

    def beat(self, beat: WorkerBeat, now: float) -> bool:
        """Note a beat; False if the table is full."""
        before = self._beats.get(beat.worker)
        if before is None and len(self._beats) >= WORKERS_LIMIT:
            return False
        told = self._told.get(beat.worker)
        other = before is not None and (before[0].pid, before[0].host) != (beat.pid, beat.host)
        if told is not None and (other or told.pid not in {0, beat.pid}):
            del self._told[beat.worker]
            told = None
        if told is not None:
            told.pid = told.pid or beat.pid
        so_far = before[0].late_members if before is not None and not other else 0
        counted = beat.env in self.late_members or len(self.late_members) < WORKERS_LIMIT
        if beat.late_members > so_far and counted:
            self.late_members[beat.env] += beat.late_members - so_far
        if before is not None and not other:
            self._count_blocked(beat.env, beat.blocked_s - before[0].blocked_s)
        self._beats[beat.worker] = beat, now
        if told is not None and beat.state in _CONFIRMED:
            told.confirmed = True
        return True

    def _count_blocked(self, env: str, seconds: float) -> None:
        if seconds > 0.0 and (env in self.blocked_s or len(self.blocked_s) < WORKERS_LIMIT):
            self.blocked_s[env] += seconds

    def last(self, worker: str) -> WorkerBeat | None:
        """Return what a worker last reported."""
        known = self._beats.get(worker)
        return known[0] if known else None

    def tell(self, drain: Drain, pid: int = 0) -> bool:
        """Remember that a worker shall drain; False if it was told before."""
        if drain.worker in self._told:
            return False
        beat = self.last(drain.worker)
        pid = beat.pid if beat is not None else pid
        self._told[drain.worker] = _Told(drain, pid, beat is not None and beat.state in _CONFIRMED)
        return True

    def pid(self, worker: str) -> int:
        """Return the process that a drain is for, or 0."""
        told = self._told.get(worker)
        return told.pid if told is not None else 0

    def untell(self, worker: str) -> bool:
        """Forget a drain; False if there is none."""
        return self._told.pop(worker, None) is not None

    def draining(self, worker: str) -> bool:
        """Whether a worker was told to drain."""
        return worker in self._told

    def due(self, now: float, interval_s: float) -> list[Drain]:
        """Return the drains to repeat now."""
        due = [told for told in self._told.values() if not told.confirmed and told.due <= now]
        for told in due:
            told.due = now + interval_s
        return [told.drain for told in due]

    def next_due(self) -> float:
        """Return when the next repetition is due."""
        return min((t.due for t in self._told.values() if not t.confirmed), default=float("inf"))

    def told(self) -> list[Drain]:
        """Return every drain that stands."""
        return [told.drain for told in self._told.values()]

    def sweep(self, now: float) -> list[str]:
        """Drop who left or fell silent long ago; return whose drains ended with that."""
        ended = []
        for worker, (beat, at) in list(self._beats.items()):
            limit = GONE_S if beat.state is WorkerState.GONE else SILENT_S
            if beat.state is not WorkerState.FAILED and now - at > limit:
                del self._beats[worker]
                if self.untell(worker):
                    ended.append(worker)
        return ended

    def statuses(self, now: float) -> tuple[WorkerStatus, ...]:
        """Return the table, by name."""
        return tuple(
            WorkerStatus(
                worker=worker,
                env=beat.env,
                state=beat.state,
                pid=beat.pid,
                host=beat.host,
                in_hand=beat.in_hand,
                produced=beat.produced,
                abandoned=beat.abandoned,
                blocked_s=beat.blocked_s,
                silent_s=max(0.0, now - at),
                draining=worker in self._told or beat.state is WorkerState.DRAINING,
                error=beat.error,
                late_members=beat.late_members,
                untaught=beat.untaught,
                waits_for=beat.waits_for,
            )
            for worker, (beat, at) in sorted(self._beats.items())
        )

    def clear(self) -> None:
        """Forget the drains; workers report themselves again."""
        self._beats.clear()
        self._told.clear()
