"""Tasks that a trainer submitted: a queue for each environment, leases, and what became of each.

    submit ──> QUEUED ──take──> LEASED ──a group names it──> DONE
                 │  ^             │
                 │  └─ given back ┤   a lease that ends, a worker that fails, dies or leaves
                 │                └─ given back for the last time ──> FAILED
                 └── deadline, cancel: EXPIRED, CANCELLED; from LEASED too

Higher priority goes first, then what was submitted first; what comes back takes its old place. A group settles the task
that it names whoever has it, and is accepted whatever became of the task: too late a group is counted as `late`, a
second one as `extra`. Both are facts of the group's acceptance, so that the two can never disagree after a restart.
What is over is remembered, without its payload, until too many others have ended after it.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from msgspec.structs import replace

from rolloutmq.schemas.tasks import REASON_CHARS, NewTask, TaskCounts, TaskState, TaskStatus
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.taskfacts import (
    TaskEnded,
    TaskItem,
    TaskReturned,
    TasksItem,
    TaskSubmitted,
    TaskTaken,
)
from rolloutmq.services.broker.log import Log
from rolloutmq.services.broker.taskrecord import Line, StoredTask, digest_of, fact_of, new_of

TaskFact = TaskSubmitted | TaskTaken | TaskReturned | TaskEnded | TasksItem | TaskItem
TASK_FACTS: Final = (TaskSubmitted, TaskTaken, TaskReturned, TaskEnded, TasksItem, TaskItem)
_SLACK: Final = 64
"""A heap may hold that many entries of what has left it, beside as many as are in it."""


class Tasks:
    """Every task that is open or remembered. Each change leaves a fact, unless a group's acceptance tells of it."""

    def __init__(self, log: Log, *, remembered: int, max_deliveries: int) -> None:
        self._log = log
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
        """Of the payloads of all open tasks."""
        self.ended: list[str] = []
        """Tasks that came to an end since somebody looked and cleared it."""
        self.returned: set[Line] = set()
        """Queues to which a task came since somebody looked and cleared it."""

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def find(self, task_id: str) -> StoredTask | None:
        """Return a task that is open or remembered."""
        return self._open.get(task_id) or self._over.get(task_id)

    def status(self, task_id: str) -> TaskStatus:
        """Say how a task stands; UNKNOWN if it is not known."""
        task = self.find(task_id)
        return task.status() if task is not None else TaskStatus(id=task_id, state=TaskState.UNKNOWN)

    def counts(self) -> TaskCounts:
        """Count the tasks, and the groups that did not settle one."""
        leased = sum(map(len, self._leased.values()))
        return TaskCounts(queued=len(self._open) - leased, leased=leased, **self._counts)

    def queued(self, line: Line) -> int:
        """Return how many tasks wait for a worker of that environment and split."""
        return self._queued[line]

    # From the trainer.

    def submit(self, new: NewTask, now: float, wall: float) -> None:
        """Queue a task that is not known."""
        self._submitted(fact_of(new, wall), digest_of(new), now, wall)

    def _submitted(self, fact: TaskSubmitted, digest: bytes, now: float, wall: float) -> None:
        task = StoredTask(submitted=fact, order=self._next_order, digest=digest)
        self._next_order += 1
        self._log.add(fact)
        self._hold(task, now, wall)

    def _hold(self, task: StoredTask, now: float, wall: float) -> None:
        """Count an open task in, and queue it or put it into its lease."""
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
        """End a task, if it is not over."""
        task = self._open.get(task_id)
        if task is not None:
            self.end(task, TaskState.CANCELLED, reason)

    # From workers.

    def take(
        self, line: Line, worker: str, session: int, slot: int, number: int, *, lease_s: float, now: float
    ) -> StoredTask | None:
        """Lease the first task of a queue; None if there is none, or none that is still of use."""
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

    def _take(self, fact: TaskTaken, now: float) -> None:
        task = self._open[fact.id]
        self._log.add(fact)
        self._unqueue(task)
        task.state = TaskState.LEASED
        task.deliveries += 1
        task.worker, task.session, task.slot, task.number = fact.worker, fact.session, fact.slot, fact.number
        task.lease_s, task.lease_until = fact.lease_s, now + fact.lease_s
        self._leased.setdefault(fact.session, {})[task.id] = task

    def held(self, session: int, slot: int, number: int) -> list[StoredTask]:
        """Return what a session still has of what one of its requests got."""
        own = self._leased.get(session, {}).values()
        return [task for task in own if (task.slot, task.number) == (slot, number)]

    def holds(self, task_id: str, session: int) -> StoredTask | None:
        """Return a task that is leased to this session."""
        return self._leased.get(session, {}).get(task_id)

    def give_back(self, task: StoredTask, reason: str, *, tried: bool = True) -> None:
        """End a lease without an answer: the task is queued again, or failed if it was tried as often as may be."""
        reason = reason[:REASON_CHARS]
        failed = tried and task.deliveries >= self._max_deliveries
        self._give_back(TaskReturned(task.id, reason, tried, failed))

    def _give_back(self, fact: TaskReturned) -> None:
        task = self._open[fact.id]
        if task.state is not TaskState.LEASED:
            raise ValueError(f"task {fact.id} is not leased")
        self._log.add(fact)
        if not fact.tried:
            task.deliveries -= 1
        if fact.failed:
            self._end(task, TaskState.FAILED, fact.reason)
            return
        self._unlease(task)
        task.state, task.reason = TaskState.QUEUED, fact.reason
        self._queue(task)

    def left(self, session: int, why: str) -> None:
        """Take back all that a session has."""
        for task in list(self._leased.get(session, {}).values()):
            self.give_back(task, f"{task.worker} {why}")

    def holders(self) -> Iterable[int]:
        """Return the sessions that have tasks."""
        return list(self._leased)

    # From groups.

    def answered(self, group: StoredGroup) -> None:
        """Note a group that was just accepted and names a task."""
        name, group_id = group.header.task, group.header.group_id
        task = self.find(name)
        if task is None or task.line != (group.env, group.split):
            self._counts["unmatched"] += 1
        elif name in self._open:
            task.group_id, task.worker = group_id, group.producer
            self._end(task, TaskState.DONE, "")
        elif task.group_id != group_id:
            self._counts["extra" if task.state is TaskState.DONE else "late"] += 1
            task.group_id = task.group_id or group_id

    # From time.

    def expire(self, now: float) -> None:
        """End what is past its deadline."""
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
        """Take back what was not answered within its lease."""
        for own in list(self._leased.values()):
            for task in list(own.values()):
                if task.lease_until <= now:
                    self.give_back(task, f"{task.worker} did not answer within {task.lease_s:g} s")

    def end(self, task: StoredTask, state: TaskState, reason: str) -> None:
        """End an open task that nobody answers any more."""
        self._log.add(TaskEnded(task.id, state, reason))
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
        """End all that is open: the run was forgotten. A fact of its own tells of it."""
        for task in list(self._open.values()):
            self._end(task, TaskState.CANCELLED, "the run was reset")

    # The containers.

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
        """Count a task out of its queue; what the queue still has of it is passed over."""
        self._queued[task.line] -= 1
        if not self._queued[task.line]:
            del self._queued[task.line]
            self._queues.pop(task.line, None)

    def _unlease(self, task: StoredTask) -> None:
        own = self._leased[task.session]
        del own[task.id]
        if not own:
            del self._leased[task.session]

    # From an earlier life.

    def items(self) -> Iterator[TasksItem | TaskItem]:
        """Yield all of it for a snapshot."""
        yield TasksItem(self._next_order, {name: n for name, n in sorted(self._counts.items()) if n})
        yield from (task.item() for task in self._over.values())
        yield from (task.item() for task in sorted(self._open.values(), key=lambda task: task.order))

    def apply(self, fact: TaskFact, now: float, wall: float) -> None:
        """Change what a fact says has changed; KeyError or ValueError if it does not fit."""
        match fact:
            case TaskSubmitted():
                self._submitted(fact, digest_of(new_of(fact)), now, wall)
            case TaskTaken():
                self._take(fact, now)
            case TaskReturned():
                self._give_back(fact)
            case TaskEnded():
                self._end(self._open[fact.id], fact.state, fact.reason)
            case TasksItem():
                self._next_order = fact.next_order
                self._counts = Counter(fact.counts)
            case TaskItem():
                self._restore(fact, now, wall)

    def _restore(self, item: TaskItem, now: float, wall: float) -> None:
        task = StoredTask(**{name: getattr(item, name) for name in TaskItem.__struct_fields__})
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
