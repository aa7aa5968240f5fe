"""Workers: their heartbeats, and the drains ordered for them.

A drain is state: it is repeated on `control.<worker>/` until the worker confirms it. It is for one process and ends
with it. A later process of the name may subscribe before the broker hears of it, so the order names its process.
"""

from collections import Counter, defaultdict
from math import inf
from typing import Final

import msgspec
from msgspec.structs import replace

from rolloutmq.schemas.config.base import PROCESSES_LIMIT
from rolloutmq.schemas.wire.control import Drain, WorkerBeat, WorkerState, WorkerStatus

GONE_S: Final = 30.0
"""How long a worker that left stays in the table, for people to see."""
SILENT_S: Final = 120.0
"""How long a silent worker stays in the table."""
FAILED_S: Final = 900.0
"""How long a failed worker stays in the table: longer than the pause before it is replaced, and not for ever, since a
replacement that fails is another worker."""
WORKERS_LIMIT: Final = PROCESSES_LIMIT
"""Workers in the table: a status with so many is 3 MB."""

_STAYS_S: Final = {WorkerState.GONE: GONE_S, WorkerState.FAILED: FAILED_S}
_CONFIRMED: Final = frozenset({WorkerState.DRAINING, WorkerState.GONE, WorkerState.FAILED})


class _DrainOrder(msgspec.Struct):
    drain: Drain
    """The order; its process is 0 for the next one that sends a heartbeat."""
    confirmed: bool = False
    due: float = 0.0

    @property
    def pid(self) -> int:
        return self.drain.pid

    def is_for(self, beat: WorkerBeat) -> bool:
        """Return whether the order may be for the process of a heartbeat."""
        return self.drain.pid in {0, beat.pid} and (
            0 in {self.drain.started, beat.started} or self.drain.started == beat.started
        )


def _life(beat: WorkerBeat) -> tuple[int, int, str]:
    return beat.pid, beat.started, beat.host


class Workers:
    """The table of workers, and the drains."""

    def __init__(self) -> None:
        self._beats: dict[str, tuple[WorkerBeat, float]] = {}
        self._drains: dict[str, _DrainOrder] = {}
        self.late_members: Counter[str] = Counter()
        """Sequences that arrived too late for their groups, by environment, in this life of the broker."""
        self.blocked_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that rollout slots waited for credit, by environment, in this life of the broker."""
        self.completions: Counter[str] = Counter()
        self.completion_tokens: Counter[str] = Counter()
        """Completions of training rollouts and their tokens, by environment, in this life of the broker."""

    def beat(self, beat: WorkerBeat, now: float) -> bool:
        """Note a heartbeat; False if the table is full."""
        before = self._beats.get(beat.worker)
        if before is None and len(self._beats) >= WORKERS_LIMIT:
            return False
        order = self._drains.get(beat.worker)
        other = before is not None and _life(before[0]) != _life(beat)
        if order is not None and (other or not order.is_for(beat)):
            del self._drains[beat.worker]
            order = None
        if order is not None:
            order.drain = replace(order.drain, pid=beat.pid, started=beat.started)
        so_far = before[0].late_members if before is not None and not other else 0
        counted = beat.env in self.late_members or len(self.late_members) < WORKERS_LIMIT
        if beat.late_members > so_far and counted:
            self.late_members[beat.env] += beat.late_members - so_far
        if before is not None and not other:
            self._count_blocked(beat.env, beat.blocked_s - before[0].blocked_s)
            self._count_completions(beat, before[0])
        self._beats[beat.worker] = beat, now
        if order is not None and beat.state in _CONFIRMED:
            order.confirmed = True
        return True

    def _count_blocked(self, env: str, seconds: float) -> None:
        if seconds > 0.0 and (env in self.blocked_s or len(self.blocked_s) < WORKERS_LIMIT):
            self.blocked_s[env] += seconds

    def _count_completions(self, beat: WorkerBeat, before: WorkerBeat) -> None:
        completions, tokens = (
            beat.completions - before.completions,
            beat.completion_tokens - before.completion_tokens,
        )
        is_known = beat.env in self.completions or len(self.completions) < WORKERS_LIMIT
        if completions > 0 and tokens > 0 and is_known:
            self.completions[beat.env] += completions
            self.completion_tokens[beat.env] += tokens

    def last(self, worker: str) -> WorkerBeat | None:
        """Return the last heartbeat of a worker."""
        known = self._beats.get(worker)
        return known[0] if known else None

    def order_drain(self, drain: Drain, pid: int = 0, started: int = 0) -> bool:
        """Order a worker to drain; False if it was ordered before.

        Args:
            drain: The order.
            pid: Process of the worker, for one that has sent no heartbeat; 0 if it is unknown.
            started: Its start, as in `WorkerBeat`.
        """
        if drain.worker in self._drains:
            return False
        beat = self.last(drain.worker)
        pid, started = (beat.pid, beat.started) if beat is not None else (pid, started)
        confirmed = beat is not None and beat.state in _CONFIRMED
        self._drains[drain.worker] = _DrainOrder(replace(drain, pid=pid, started=started), confirmed)
        return True

    def life(self, worker: str) -> tuple[int, int]:
        """Return process and start of a drain, each 0 if unknown."""
        order = self._drains.get(worker)
        return (order.pid, order.drain.started) if order is not None else (0, 0)

    def end_drain(self, worker: str) -> bool:
        """Forget a drain; False if there is none."""
        return self._drains.pop(worker, None) is not None

    def draining(self, worker: str) -> bool:
        return worker in self._drains

    def due(self, now: float, interval_s: float) -> list[Drain]:
        """Return the drains to repeat now."""
        if not self._drains:
            return []
        due = [order for order in self._drains.values() if not order.confirmed and order.due <= now]
        for order in due:
            order.due = now + interval_s
        return [order.drain for order in due]

    def next_due(self) -> float:
        """Return when the next repetition is due."""
        if not self._drains:
            return inf
        return min((t.due for t in self._drains.values() if not t.confirmed), default=inf)

    def drains(self) -> list[Drain]:
        """Return every drain in force."""
        return [order.drain for order in self._drains.values()]

    def sweep(self, now: float) -> list[str]:
        """Remove workers that left or fell silent long ago; return those whose drains ended with that."""
        ended = []
        for worker, (beat, at) in list(self._beats.items()):
            limit = _STAYS_S.get(beat.state, SILENT_S)
            if now - at > limit:
                del self._beats[worker]
                if self.end_drain(worker):
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
                draining=worker in self._drains or beat.state is WorkerState.DRAINING,
                error=beat.error,
                late_members=beat.late_members,
                untaught=beat.untaught,
                waits_for=beat.waits_for,
                joined=beat.joined,
                engines_away=beat.engines_away,
            )
            for worker, (beat, at) in sorted(self._beats.items())
        )

    def joined(self) -> list[str]:
        """Return the names of the workers that joined by themselves."""
        return [worker for worker, (beat, _) in self._beats.items() if beat.joined]

    def clear(self) -> None:
        """Forget the table and the drains; workers report again."""
        self._beats.clear()
        self._drains.clear()
