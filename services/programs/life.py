"""The life of a program at the gateway, told from its requests. Pure; the caller passes the clock.

A program of somebody else's sends no heartbeat. The gateway sends it in the program's place:

    starting    its process runs, and has neither asked for the queue (`/status-env`) nor posted a group
    ready       it has
    draining    it must start nothing more, and delivers what it has
    gone        it has delivered everything: nothing was posted for `drain_quiet_s`, and no post is in progress

A draining program gets no answer to `/status-env` until it has delivered: Atropos' environments start rollouts only
after an answer, but cancel the running ones when they hear of a full queue.

Atropos' environments run at most as many rollouts as groups are missing from `enough_batches`. The rest of their
concurrency waits, and so does each post without room: both count as `blocked_s`, as the wait for credit of our own
workers does. Without that, a program that waits would look slow, and the autoscaler would never end it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.wire.control import WorkerBeat, WorkerState

ON_ITS_WAY_S: Final = 1.0
"""Time after which a post in progress counts as waiting for room."""


@dataclass(slots=True, eq=False)
class ProgramLife:
    """One life of one program, from its start to its end.

    Attributes:
        worker: Name of the worker.
        env: Its environment.
        section: Configuration of that.
        pid: Process id.
        spoke: It asked for the queue or posted.
        held_back: Rollout slots that may start nothing now, because enough is queued.
        posts: Times at which the posts in progress began, by number.
        begun: Posts so far.
        produced: Accepted groups.
        blocked_s: Seconds of waiting over all slots, until `counted_at`.
        draining_at: Time of the order to drain.
        quiet_since: Time of the last sign that it delivers.
    """

    worker: str
    env: str
    section: EnvironmentConfig
    pid: int
    counted_at: float
    spoke: bool = False
    held_back: int = 0
    posts: dict[int, float] = field(default_factory=dict)
    begun: int = 0
    produced: int = 0
    blocked_s: float = 0.0
    draining_at: float = math.inf
    quiet_since: float = -math.inf

    @property
    def draining(self) -> bool:
        """Return whether it was ordered to drain."""
        return self.draining_at < math.inf

    def drain(self, now: float) -> None:
        """Order it to drain; only the first order counts."""
        if not self.draining:
            self.draining_at, self.quiet_since = now, max(now, self.quiet_since)

    def begin(self, now: float) -> int:
        """Record that it posts; return the number of the post."""
        self._count(now)
        self.spoke, self.begun = True, self.begun + 1
        self.posts[self.begun] = now
        return self.begun

    def end(self, post: int, groups: int, now: float) -> None:
        """Record the end of a post, with the number of accepted groups."""
        self._count(now)
        del self.posts[post]
        self.produced += groups
        self.quiet_since = now

    def told(self, queued_groups: int, batch_sequences: int, group_size: int, now: float) -> None:
        """Record what it was told of the queue, in groups of its own size."""
        self._count(now)
        slots, enough = self.section.concurrency, self.enough(batch_sequences, group_size)
        self.held_back = slots - min(max(enough - queued_groups, 0), slots) if batch_sequences else 0

    def enough(self, batch_sequences: int, group_size: int) -> int:
        """Return the number of groups in the queue at which it starts no more rollouts."""
        return self.section.enough_batches * batch_sequences // max(1, group_size)

    def delivers_for_s(self, now: float) -> float:
        """Return how much longer it must be quiet to have delivered everything; 0 if it has, infinite while unknown."""
        if not self.draining or self.posts:
            return math.inf
        return max(0.0, self.quiet_since + self.section.drain_quiet_s - now) if self.spoke else 0.0

    def state(self, now: float) -> WorkerState:
        """Return its state."""
        if self.draining:
            return WorkerState.DRAINING if self.delivers_for_s(now) else WorkerState.GONE
        return WorkerState.READY if self.spoke else WorkerState.STARTING

    def beat(self, host: str, now: float) -> WorkerBeat:
        """Return its heartbeat."""
        self._count(now)
        return WorkerBeat(
            worker=self.worker,
            env=self.env,
            state=self.state(now),
            pid=self.pid,
            host=host,
            in_hand=len(self.posts),
            produced=self.produced,
            blocked_s=self.blocked_s,
        )

    def _count(self, now: float) -> None:
        """Add the waits since the last count."""
        slots = self.section.concurrency
        waited = self.held_back * (now - self.counted_at)
        for began in self.posts.values():
            waited += max(0.0, now - max(self.counted_at, began + ON_ITS_WAY_S))
        self.blocked_s += min(waited, slots * (now - self.counted_at))
        self.counted_at = now


class ProgramTable:
    """The living programs of a run, by worker.

    Args:
        environments: Environments with a command, by name.
    """

    def __init__(self, environments: Mapping[str, EnvironmentConfig]) -> None:
        self._environments = environments
        self._lives: dict[str, ProgramLife] = {}

    def __bool__(self) -> bool:
        """Return whether the run has programs at all."""
        return bool(self._environments)

    def env_of(self, worker: str) -> str | None:
        """Return the environment of a worker if that has a command."""
        env, dash, number = worker.rpartition("-")
        return env if dash and number.isdecimal() and env in self._environments else None

    def get(self, worker: str) -> ProgramLife | None:
        """Return the life of a worker, if its process is known to run."""
        return self._lives.get(worker)

    def lives(self) -> list[ProgramLife]:
        """Return the living programs."""
        return list(self._lives.values())

    def see(self, running: Mapping[str, int], now: float) -> list[ProgramLife]:
        """Record the running processes, pid by worker; return the lives that ended since."""
        over = [life for life in self._lives.values() if running.get(life.worker) != life.pid]
        for life in over:
            del self._lives[life.worker]
        for worker, pid in running.items():
            env = self.env_of(worker)
            if env is not None and worker not in self._lives:
                self._lives[worker] = ProgramLife(worker, env, self._environments[env], pid, now)
        return over
