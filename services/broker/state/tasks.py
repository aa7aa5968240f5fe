"""Tasks of a trainer: a queue for each environment, leases, and outcomes.

    submit ──> QUEUED ──take──> LEASED ──a group names it──> DONE
                 │  ^             │
                 │  └── returned ─┤   a lease that expires, a worker that fails, dies or leaves
                 │                └── returned for the last time ──> FAILED
                 └── deadline, cancel: EXPIRED, CANCELLED; from LEASED too

Higher priority goes first, then earlier submission; a returned task takes its old place. A group completes the task
it names, whichever worker has the task, and is accepted in any case. A group that is too late counts as `late`, a
second one as `extra`. Both follow from the group's `Accepted` event, so group and task never disagree after a
restart. An ended task is remembered, without its payload, until too many others have ended after it.
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec
from msgspec.structs import replace

from rolloutmq.schemas.wire.envelope import RewardSummary, Split
from rolloutmq.schemas.wire.tasks import REASON_CHARS, NewTask, TaskCounts, TaskState, TaskStatus
from rolloutmq.services.broker.journal.event_buffer import EventBuffer
from rolloutmq.services.broker.journal.format.events import (
    TaskEnded,
    TaskQueueSnapshot,
    TaskReturned,
    TaskSnapshot,
    TaskSubmitted,
    TaskTaken,
)
from rolloutmq.services.broker.journal.stored_group import StoredGroup

Line = tuple[str, Split]
"""Environment and split of a task; only their workers get it."""

_DIGEST_BYTES: Final = 16


class StoredTask(msgspec.Struct, kw_only=True, eq=False):
    """One task; `submitted` loses its payload when the task has ended.

    Attributes:
        order: Number of its submission.
        digest: Of its content: the same id with other content is another task.
        deadline_at, lease_until: Monotonic seconds, infinite if there is none.
        worker, session, slot, number: Its last taker, and the request that took it.
    """

    submitted: TaskSubmitted
    order: int
    digest: bytes
    deadline_at: float = math.inf
    state: TaskState = TaskState.QUEUED
    deliveries: int = 0
    worker: str = ""
    session: int = 0
    slot: int = 0
    number: int = 0
    lease_s: float = 0.0
    lease_until: float = math.inf
    group_id: str = ""
    reason: str = ""
    sequences: int = 0
    rewards: RewardSummary = RewardSummary()

    @property
    def id(self) -> str:
        return self.submitted.id

    @property
    def line(self) -> Line:
        return self.submitted.env, self.submitted.split

    @property
    def nbytes(self) -> int:
        return len(self.submitted.payload)

    @property
    def rank(self) -> tuple[int, int, str]:
        """Its place in the queue: the lowest goes first."""
        return -self.submitted.priority, self.order, self.id

    def status(self) -> TaskStatus:
        return TaskStatus(
            id=self.id,
            state=self.state,
            worker=self.worker,
            deliveries=self.deliveries,
            group_id=self.group_id,
            reason=self.reason,
            sequences=self.sequences,
            rewards=self.rewards,
        )

    def item(self) -> TaskSnapshot:
        return TaskSnapshot(
            submitted=self.submitted,
            order=self.order,
            digest=self.digest,
            state=self.state,
            deliveries=self.deliveries,
            worker=self.worker,
            session=self.session,
            slot=self.slot,
            number=self.number,
            lease_s=self.lease_s,
            group_id=self.group_id,
            reason=self.reason,
            sequences=self.sequences,
            rewards=self.rewards,
        )


def digest_of(new: NewTask) -> bytes:
    """Return the digest of a task's content."""
    return hashlib.blake2b(msgspec.msgpack.encode(new), digest_size=_DIGEST_BYTES).digest()


def event_of(new: NewTask, wall: float) -> TaskSubmitted:
    return TaskSubmitted(
        new.id,
        new.env,
        new.split,
        new.payload,
        new.size,
        new.deadline_s,
        new.priority,
        wall,
        new.index,
        new.greedy,
    )


def new_of(event: TaskSubmitted) -> NewTask:
    return NewTask(
        id=event.id,
        env=event.env,
        payload=event.payload,
        split=event.split,
        size=event.size,
        deadline_s=event.deadline_s,
        priority=event.priority,
        index=event.index,
        greedy=event.greedy,
    )


TaskEvent = TaskSubmitted | TaskTaken | TaskReturned | TaskEnded | TaskQueueSnapshot | TaskSnapshot

TASK_EVENTS: Final = (TaskSubmitted, TaskTaken, TaskReturned, TaskEnded, TaskQueueSnapshot, TaskSnapshot)

_SLACK: Final = 64
"""Stale entries a heap may hold, beyond as many as are live."""


class Tasks:
    """Every task that is open or remembered. Each change adds an event, unless a group's acceptance implies it."""

    def __init__(self, events: EventBuffer, *, remembered: int, max_deliveries: int) -> None:
        self._events = events
        self._remembered = remembered
        self._max_deliveries = max_deliveries
        self._open: dict[str, StoredTask] = {}
        self._over: OrderedDict[str, StoredTask] = OrderedDict()
        self._queues: dict[Line, list[tuple[int, int, str]]] = {}
        self._queued: Counter[Line] = Counter()
        self._leased: dict[int, dict[str, StoredTask]] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._counts: Counter[str] = Counter()
        self._next_order = 1
        self.nbytes = 0
        """Payload bytes of all open tasks."""
        self.ended: list[str] = []
        """Tasks that ended since the reader last cleared it."""
        self.returned: set[Line] = set()
        """Queues that gained a task since the reader last cleared it."""

    def __len__(self) -> int:
        """Return the number of open tasks."""
        return len(self._open)

    def find(self, task_id: str) -> StoredTask | None:
        """Return a task that is open or remembered."""
        return self._open.get(task_id) or self._over.get(task_id)

    def status(self, task_id: str) -> TaskStatus:
        """Return the status of a task; UNKNOWN if it is neither open nor remembered."""
        task = self.find(task_id)
        return task.status() if task is not None else TaskStatus(id=task_id, state=TaskState.UNKNOWN)

    def counts(self) -> TaskCounts:
        """Return the counts of tasks, and of groups without a task."""
        leased = sum(map(len, self._leased.values()))
        return TaskCounts(queued=len(self._open) - leased, leased=leased, **self._counts)

    def queued(self, line: Line) -> int:
        """Return how many tasks wait for a worker of that environment and split."""
        return self._queued[line]

    # Requests of the trainer.

    def submit(self, new: NewTask, now: float, wall: float) -> None:
        """Queue a new task."""
        self._submitted(event_of(new, wall), digest_of(new), now, wall)

    def _submitted(self, event: TaskSubmitted, digest: bytes, now: float, wall: float) -> None:
        task = StoredTask(submitted=event, order=self._next_order, digest=digest)
        self._next_order += 1
        self._events.add(event)
        self._hold(task, now, wall)

    def _hold(self, task: StoredTask, now: float, wall: float) -> None:
        """Count an open task, and queue it or put it into its lease."""
        if task.submitted.deadline_s:
            task.deadline_at = now + task.submitted.at + task.submitted.deadline_s - wall
            heappush(self._deadlines, (task.deadline_at, task.order, task.id))
        self._open[task.id] = task
        self.nbytes += task.nbytes
        if task.state is TaskState.LEASED:
            task.lease_until = now + task.lease_s
            self._leased.setdefault(task.session, {})[task.id] = task
        else:
            self._queue(task)

    def cancel(self, task_id: str, reason: str) -> None:
        """End a task, if it is open."""
        task = self._open.get(task_id)
        if task is not None:
            self.end(task, TaskState.CANCELLED, reason)

    # Requests of workers.

    def take(
        self, line: Line, worker: str, session: int, slot: int, number: int, *, lease_s: float, now: float
    ) -> StoredTask | None:
        """Lease the first task of a queue before its deadline; None if there is none."""
        queue = self._queues.get(line, [])
        while queue:
            task = self._open.get(queue[0][2])
            if task is None or task.rank != queue[0] or task.state is not TaskState.QUEUED:
                heappop(queue)
            elif task.deadline_at <= now:
                self._expire(task)
            else:
                self._take(TaskTaken(task.id, worker, session, slot, number, lease_s), now)
                return task
        self._queues.pop(line, None)
        return None

    def _take(self, event: TaskTaken, now: float) -> None:
        task = self._open[event.id]
        self._events.add(event)
        self._unqueue(task)
        task.state = TaskState.LEASED
        task.deliveries += 1
        task.worker, task.session, task.slot, task.number = (
            event.worker,
            event.session,
            event.slot,
            event.number,
        )
        task.lease_s, task.lease_until = event.lease_s, now + event.lease_s
        self._leased.setdefault(event.session, {})[task.id] = task

    def held(self, session: int, slot: int, number: int) -> list[StoredTask]:
        """Return the tasks a session still holds from one of its requests."""
        own = self._leased.get(session, {}).values()
        return [task for task in own if (task.slot, task.number) == (slot, number)]

    def holds(self, task_id: str, session: int) -> StoredTask | None:
        """Return a task that is leased to this session."""
        return self._leased.get(session, {}).get(task_id)

    def give_back(self, task: StoredTask, reason: str, *, tried: bool = True) -> None:
        """End a lease without an answer: the task is queued again, or failed after its last delivery."""
        reason = reason[:REASON_CHARS]
        failed = tried and task.deliveries >= self._max_deliveries
        self._give_back(TaskReturned(task.id, reason, tried, failed))

    def _give_back(self, event: TaskReturned) -> None:
        task = self._open[event.id]
        if task.state is not TaskState.LEASED:
            raise ValueError(f"task {event.id} is not leased")
        self._events.add(event)
        if not event.tried:
            task.deliveries -= 1
        if event.failed:
            self._end(task, TaskState.FAILED, event.reason)
            return
        self._unlease(task)
        task.state, task.reason = TaskState.QUEUED, event.reason
        self._queue(task)

    def left(self, session: int, why: str) -> None:
        """Return all tasks of a session to their queues."""
        for task in list(self._leased.get(session, {}).values()):
            self.give_back(task, f"{task.worker} {why}")

    def holders(self) -> Iterable[int]:
        """Return the sessions that hold tasks."""
        return list(self._leased)

    # Accepted groups.

    def answered(self, group: StoredGroup) -> None:
        """Note an accepted group that names a task."""
        name, group_id = group.header.task, group.header.group_id
        task = self.find(name)
        if task is None or task.line != (group.env, group.split):
            self._counts["unmatched"] += 1
        elif name in self._open:
            task.group_id, task.worker = group_id, group.producer
            task.sequences, task.rewards = group.header.sequences, group.header.rewards
            self._end(task, TaskState.DONE, "")
        elif task.group_id != group_id:
            self._counts["extra" if task.state is TaskState.DONE else "late"] += 1
            task.group_id = task.group_id or group_id

    # Deadlines.

    def expire(self, now: float) -> None:
        """End the tasks past their deadlines."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, name = heappop(self._deadlines)
            task = self._open.get(name)
            if task is not None and task.order == order:
                self._expire(task)
        if len(self._deadlines) > 2 * len(self._open) + _SLACK:
            self._deadlines = [
                (task.deadline_at, task.order, task.id)
                for task in self._open.values()
                if task.deadline_at < math.inf
            ]
            heapify(self._deadlines)

    def _expire(self, task: StoredTask) -> None:
        where = f"while {task.worker} had it" if task.state is TaskState.LEASED else "in the queue"
        self.end(task, TaskState.EXPIRED, f"its deadline of {task.submitted.deadline_s:g} s passed {where}")

    def end_leases(self, now: float) -> None:
        """Return tasks that were not answered within their leases."""
        for own in list(self._leased.values()):
            for task in list(own.values()):
                if task.lease_until <= now:
                    self.give_back(task, f"{task.worker} did not answer within {task.lease_s:g} s")

    def end(self, task: StoredTask, state: TaskState, reason: str) -> None:
        """End an open task without an answer."""
        self._events.add(TaskEnded(task.id, state, reason))
        self._end(task, state, reason)

    def _end(self, task: StoredTask, state: TaskState, reason: str) -> None:
        del self._open[task.id]
        self.nbytes -= task.nbytes
        if task.state is TaskState.LEASED:
            self._unlease(task)
        else:
            self._unqueue(task)
        task.state, task.reason = state, reason
        task.submitted = replace(task.submitted, payload=b"")
        self._counts[state.value] += 1
        self.ended.append(task.id)
        self._remember(task)

    def _remember(self, task: StoredTask) -> None:
        self._over[task.id] = task
        if len(self._over) > self._remembered:
            self._over.popitem(last=False)

    def reset(self) -> None:
        """End all open tasks: the run was reset. `WasReset` covers them."""
        for task in list(self._open.values()):
            self._end(task, TaskState.CANCELLED, "the run was reset")

    # Queues and leases.

    def _queue(self, task: StoredTask) -> None:
        queue = self._queues.setdefault(task.line, [])
        self._queued[task.line] += 1
        heappush(queue, task.rank)
        if len(queue) > 2 * self._queued[task.line] + _SLACK:
            ranks = {rank for rank in queue if self._is_queued(rank)}
            queue[:] = ranks
            heapify(queue)
        self.returned.add(task.line)

    def _is_queued(self, rank: tuple[int, int, str]) -> bool:
        task = self._open.get(rank[2])
        return task is not None and task.state is TaskState.QUEUED and task.rank == rank

    def _unqueue(self, task: StoredTask) -> None:
        """Count a task out of its queue; its heap entry is skipped later."""
        self._queued[task.line] -= 1
        if not self._queued[task.line]:
            del self._queued[task.line]
            self._queues.pop(task.line, None)

    def _unlease(self, task: StoredTask) -> None:
        own = self._leased[task.session]
        del own[task.id]
        if not own:
            del self._leased[task.session]

    # Snapshot and restore.

    def items(self) -> Iterator[TaskQueueSnapshot | TaskSnapshot]:
        """Yield the snapshot records."""
        yield TaskQueueSnapshot(self._next_order, {name: n for name, n in sorted(self._counts.items()) if n})
        yield from (task.item() for task in self._over.values())
        yield from (task.item() for task in sorted(self._open.values(), key=lambda task: task.order))

    def apply(self, event: TaskEvent, now: float, wall: float) -> None:
        """Apply an event; KeyError or ValueError if it contradicts the state."""
        match event:
            case TaskSubmitted():
                self._submitted(event, digest_of(new_of(event)), now, wall)
            case TaskTaken():
                self._take(event, now)
            case TaskReturned():
                self._give_back(event)
            case TaskEnded():
                self._end(self._open[event.id], event.state, event.reason)
            case TaskQueueSnapshot():
                self._next_order = event.next_order
                self._counts = Counter(event.counts)
            case TaskSnapshot():
                self._restore(event, now, wall)

    def _restore(self, item: TaskSnapshot, now: float, wall: float) -> None:
        task = StoredTask(**{name: getattr(item, name) for name in TaskSnapshot.__struct_fields__})
        if task.status().over:
            self._remember(task)
        else:
            self._hold(task, now, wall)

    def validate(self) -> None:
        """Assert that every index holds the same tasks."""
        leased = {name for own in self._leased.values() for name in own}
        queued = {name for name, task in self._open.items() if task.state is TaskState.QUEUED}
        assert leased | queued == set(self._open)
        assert not leased & queued
        assert not self._open.keys() & self._over.keys()
        assert all(self._leased.values()), "an empty lease is kept"
        assert self.nbytes == sum(task.nbytes for task in self._open.values())
        assert self._queued == Counter(task.line for name, task in self._open.items() if name in queued)
        for name in queued:
            assert self._open[name].rank in self._queues[self._open[name].line]
        assert len(self._over) <= self._remembered
        assert not any(task.nbytes for task in self._over.values())
