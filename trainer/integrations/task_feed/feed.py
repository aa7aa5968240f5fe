"""The feed: asks tasks of the bus and hands out their groups, in any order. For one event loop.

    submit -> a worker takes the task -> its group is pulled -> `ask` returns it -> it is held until `settle`

The id of a task is that of its instance and the number of the attempt, so a trainer that comes back asks the same
tasks: what a worker has answered meanwhile, or what the broker delivers again, needs no second rollout. An attempt that
ended without a group in an earlier life is followed by the next one, and so is one whose group the broker has lost.

Nothing is raised for a single task: `ask` returns why there is no group. Only `settle` raises, if another process has
taken the consumer's place, say.

- **Groups that nobody has asked for yet**, such as those of a resumed trainer, are kept. If they fill what the broker
  allows, or are too many, one is filtered, and its instance gets another attempt.
- **Groups that nobody will ask for** are filtered at once.
- **Contents.** With `content_key` a group answers any task of the same key, of an earlier life, say. Then a resumed
  feed submits nothing before it has taken what the broker delivers again, and keeps nothing that comes later and that
  nobody asks for.

Each settlement has a line in the run's `trained.jsonl`, written before it.
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.consumer.groups import GroupConsumer, HeldGroup
from rolloutmq.bus.tasks.client import Task, TaskClient
from rolloutmq.bus.transport.endpoint import Where, is_address
from rolloutmq.schemas.errors import (
    ClosedError,
    InvalidTaskError,
    RefusedError,
    RolloutMQError,
    TasksFullError,
)
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import RunInfo, Settled, Wait
from rolloutmq.schemas.wire.requests import GROUPS_LIMIT, WINDOW_LIMIT
from rolloutmq.schemas.wire.tasks import ASK_LIMIT, REASON_CHARS, TaskState, TaskStatus
from rolloutmq.trainer.integrations.task_feed.answers import Answer, Missing
from rolloutmq.trainer.integrations.task_feed.reports import StepReports
from rolloutmq.trainer.trained_log import TrainedLog

logger = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""Longest wait of one question for ended tasks, and of one pull."""
LOST_S: Final = 15.0
"""A group that answers a task, and that no pull has brought for this long though the queue was empty, is lost."""
GRACE_S: Final = 5.0
"""Time beyond the deadline in which the broker says itself that a task has expired."""
KEPT_GROUPS: Final = 4096
"""Most groups that wait for their request."""
REMEMBERED: Final = 1 << 16
"""Most tasks that are remembered after their answer."""
_ENDED: Final = {
    TaskState.FAILED: Missing.FAILED,
    TaskState.EXPIRED: Missing.DEADLINE,
    TaskState.CANCELLED: Missing.CANCELLED,
}


@dataclass(slots=True, eq=False)
class _Asked:
    """A task under way.

    Attributes:
        submitted: The broker has the task.
        answered_at: When the broker said that it has the group; 0 before.
    """

    key: str
    task: Task
    answer: "asyncio.Future[HeldGroup | Answer]"
    submitted: bool = False
    answered_at: float = 0.0


@dataclass(slots=True)
class Counts:
    """What became of groups that no request got."""

    late: int = 0
    """Groups of tasks that were given up, or whose task had another group."""
    unmatched: int = 0
    """Groups of no task of this training."""
    evicted: int = 0
    """Groups filtered to make room, before they were asked for."""
    asked_again: int = 0
    """Attempts after the first one."""


@dataclass(slots=True)
class Feed:
    """Asks tasks and hands out groups. Make it by `open`.

    Attributes:
        training: Name of the training, the first part of its task ids.
        resumed: An earlier life may have asked the same tasks.
        deadline_s: Longest time from a request to its group, in seconds.
        counts: What became of groups that no request got.
        error: Why no further group comes; None while they do.
        on_step: Called with the report of each step.
        content_key: Returns the key of a task id: the group of a task answers all tasks of its key. None: it answers
            no other.
        find_fault: Returns why the trainer cannot learn from a group, or an empty string.
    """

    training: str
    resumed: bool
    deadline_s: float
    split: Split
    consumer: GroupConsumer
    tasks: TaskClient
    trained_log: TrainedLog
    counts: Counts = field(default_factory=Counts)
    error: RolloutMQError | None = None
    on_step: Callable[[StepDone], None] = lambda _event: None
    content_key: Callable[[str], str] | None = None
    find_fault: Callable[[Group], str] = lambda _group: ""
    _reports: StepReports = field(default_factory=StepReports)
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _kept: OrderedDict[str, HeldGroup] = field(default_factory=OrderedDict)
    _over: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Tasks that had their answer, or were given up."""
    _attempts: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _out: dict[str, list[HeldGroup]] = field(default_factory=dict)
    """Groups handed out and not settled, by the key of their request."""
    _empty_at: float = 0.0
    """When a pull last found an empty queue."""
    _caught_up: asyncio.Event = field(default_factory=asyncio.Event)
    """A pull has found no further group: what the broker delivers again has come."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        where: Where,
        *,
        training: str,
        batch_sequences: int,
        deadline_s: float,
        split: Split = Split.TRAIN,
        resume: PolicyVersion | None = None,
        resumed: bool = False,
        content_key: Callable[[str], str] | None = None,
        find_fault: Callable[[Group], str] | None = None,
        info: RunInfo | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator["Feed"]:
        """Join the bus; leaving the block returns the groups that are not settled to the queue.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            training: Name of the training: of its consumer, and the first part of its task ids.
            batch_sequences: Sequences of one optimizer step.
            deadline_s: Longest time from a request to its group, in seconds.
            split: Split of the tasks: train or eval.
            resume: Policy from which the trainer continues.
            resumed: An earlier life may have asked the same tasks.
            content_key, find_fault: See the attributes.
            info: Description of the run.
            timeout_s: Longest wait for the broker, in seconds.

        Raises:
            WaitTimeoutError: The broker has not answered after `timeout_s`.
            RefusedError: The broker does not accept this consumer.
        """
        name = training if split is Split.TRAIN else f"{training}-eval"
        consuming = GroupConsumer.open(
            where,
            batch_sequences=batch_sequences,
            window=WINDOW_LIMIT,
            groups=GROUPS_LIMIT,
            consumer=name,
            group=name,
            split=split,
            info=info,
            resume=resume,
            timeout_s=timeout_s,
        )
        async with TaskClient.open(where, timeout_s=timeout_s) as tasks, consuming as consumer:
            # The log comes after the consumer, which fences an earlier life: a log has one writer.
            with closing(TrainedLog(_log(where, split))) as trained_log:
                if resumed:
                    trained_log.write(SettledBatch(at=time.time(), version=consumer.version, resumed=True))
                made = cls(training, resumed, deadline_s, split, consumer, tasks, trained_log)
                made.content_key = content_key
                made.find_fault = find_fault or made.find_fault
                async with made._running():
                    yield made

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Pull groups and ask for tasks until the block ends."""
        work = [
            asyncio.create_task(self._guarded(self._pull()), name=f"pulls of {self.training}"),
            asyncio.create_task(self._guarded(self._poll_tasks()), name=f"tasks of {self.training}"),
        ]
        try:
            yield
        finally:
            self._end(ClosedError())
            for one in work:
                one.cancel()
            await asyncio.wait(work)

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            logger.exception("no further group comes training=%s", self.training)
            self._end(_typed(error))

    def _end(self, error: RolloutMQError) -> None:
        self._closed, self.error = True, self.error or error
        self._caught_up.set()
        for one in list(self._asked.values()):
            self._resolve(one, Answer(missing=Missing.CLOSED, detail=str(error)))

    # Requests

    async def ask(self, key: str, name: str, env: str, payload: Any, size: int) -> Answer:
        """Return the group of an instance, or why there is none. Never raises RolloutMQError.

        Waits up to `deadline_s`, and up to twice `GRACE_S` more while the broker is away.

        Cancelled: a group that comes later is filtered.

        Args:
            key: What `settle` calls the group.
            name: Id of its task without the attempt.
            env: Environment of the bus.
            payload: Content of the task.
            size: Sequences of the group.
        """
        began = time.monotonic()
        until = began + self.deadline_s
        if self._catching_up:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.deadline_s):
                    await self._caught_up.wait()
        while True:
            attempt = self._next_attempt(name)
            task = Task(
                env=env,
                payload=payload,
                id=f"{name}~{attempt}",
                split=self.split,
                size=size,
                deadline_s=self.deadline_s,
            )
            found, again = await self._attempt(key, task, until)
            if again and time.monotonic() < until and not self._closed:
                continue
            waited_s = time.monotonic() - began
            if isinstance(found, Answer):
                logger.warning(
                    "no group for a prompt task=%s reason=%s detail=%s", task.id, found.missing, found.detail
                )
                return replace(found, waited_s=waited_s)
            return self._judged(task.id, found, waited_s)

    def _judged(self, task_id: str, held: HeldGroup, waited_s: float) -> Answer:
        """Return a group, or why the trainer cannot learn from it; both ways it is settled by its key."""
        fault = self.find_fault(held.group)
        if not fault:
            return Answer(held.group, waited_s=waited_s, staleness=held.staleness(self.consumer.version))
        logger.warning("group unusable task=%s group=%s reason=%s", task_id, held.group_id, fault)
        return Answer(missing=Missing.UNUSABLE, detail=fault, waited_s=waited_s)

    def _next_attempt(self, name: str) -> int:
        attempt = self._attempts.pop(name, 0)
        self._attempts[name] = attempt + 1
        while len(self._attempts) > REMEMBERED:
            self._attempts.popitem(last=False)
        self.counts.asked_again += attempt > 0
        return attempt

    async def _attempt(self, key: str, task: Task, until: float) -> tuple[HeldGroup | Answer, bool]:
        """Ask one task; return what came, and whether another attempt may bring more."""
        if self._closed:
            return Answer(missing=Missing.CLOSED, detail=str(self.error)), False
        kept = self._take_kept(task.id)
        if kept is not None:
            self._remember(task.id)
            self._out.setdefault(key, []).append(kept)
            return kept, False
        asked = _Asked(key, task, asyncio.get_running_loop().create_future())
        self._asked[task.id] = asked
        try:
            ended = await self._submitted(asked, until)
            if ended is not None:
                return ended
            asked.submitted = True
            self._changed.set()
            async with asyncio.timeout(max(0.0, until + GRACE_S - time.monotonic())):
                found = await asked.answer
        except TimeoutError:
            self._forget(asked)  # a group that comes from now on is late
            await self._cancel(task.id, "deadline of the trainer")
            found = Answer(missing=Missing.DEADLINE, detail=f"no group after {self.deadline_s:.0f} s")
        finally:
            self._forget(asked)
        return found, isinstance(found, Answer) and found.missing is Missing.LOST

    async def _cancel(self, task_id: str, reason: str) -> None:
        """Cancel a task whose group is not needed; a broker that is away is not waited for."""
        with suppress(RolloutMQError, TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.tasks.cancel([task_id], reason[:REASON_CHARS])

    def _take_kept(self, task_id: str) -> HeldGroup | None:
        """Return the kept group that answers a task, and keep it no longer."""
        if task_id in self._kept or self.content_key is None:
            return self._kept.pop(task_id, None)
        alike = self.content_key(task_id)
        found = next((one for one in self._kept if self.content_key(one) == alike), None)
        return None if found is None else self._kept.pop(found)

    async def _submitted(self, asked: _Asked, until: float) -> tuple[Answer, bool] | None:
        """Submit a task; return why that was in vain, and whether the next attempt may do."""
        task = asked.task
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self.tasks.submit([task], max(0.0, until - time.monotonic()))
                if not self.resumed:
                    return None
                [status] = await self.tasks.results([task.id], 0.0)
        except RefusedError as error:
            return Answer(missing=Missing.REFUSED, detail=str(error)), error.code is ErrorCode.CONFLICT
        except (InvalidTaskError, TasksFullError) as error:
            return Answer(missing=Missing.REFUSED, detail=str(error)), False
        except TimeoutError:
            return Answer(missing=Missing.DEADLINE, detail="the broker did not answer"), False
        except RolloutMQError as error:
            return Answer(missing=Missing.CLOSED, detail=str(error)), False
        if status.state in _ENDED:  # in an earlier life
            return Answer(missing=_ENDED[status.state], detail=status.reason), True
        return None

    def _resolve(self, asked: _Asked, found: HeldGroup | Answer) -> None:
        if not asked.answer.done():
            asked.answer.set_result(found)
        self._forget(asked)

    def _forget(self, asked: _Asked) -> None:
        if self._asked.pop(asked.task.id, None) is not None:
            self._remember(asked.task.id)

    def _remember(self, task_id: str) -> None:
        self._over[task_id] = None
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    # Groups

    async def _pull(self) -> None:
        while True:
            held = await self.consumer.get(POLL_S)
            if held is None:
                if self.resumed and not self._caught_up.is_set():
                    self._caught_up.set()
                    continue  # what was kept may be asked for now
                if self.consumer.wait is Wait.UNSETTLED:
                    await self._make_room()
                elif self.consumer.wait is Wait.NO_BATCH:
                    self._empty_at = time.monotonic()
                continue
            await self._route(held)

    @property
    def _catching_up(self) -> bool:
        """Whether requests wait until all that the broker delivers again has come."""
        return self.resumed and self.content_key is not None and not self._caught_up.is_set()

    async def _route(self, held: HeldGroup) -> None:
        task_id = held.group.task
        asked = self._asked.get(task_id) or self._asked_alike(task_id)
        if asked is not None and not asked.answer.done():
            self._out.setdefault(asked.key, []).append(held)
            self._resolve(asked, held)
            if asked.task.id != task_id:
                self._remember(task_id)
                await self._cancel(asked.task.id, f"answered by the group of {task_id}")
            return
        if not task_id.startswith(f"{self.training}/"):
            self.counts.unmatched += 1
        elif task_id in self._over or task_id in self._kept or self._is_of_the_past(held):
            self.counts.late += 1
        else:
            self._kept[task_id] = held
            if len(self._kept) <= KEPT_GROUPS:
                return
            await self._make_room()
            return
        await self._settle([], [held], None)

    def _is_of_the_past(self, held: HeldGroup) -> bool:
        """Return whether a task of an earlier life has come to its end, when all that is delivered again is there."""
        return self.content_key is not None and self._caught_up.is_set() and not held.rewound

    def _asked_alike(self, task_id: str) -> _Asked | None:
        """Return a task under way that the group of another task answers, too."""
        if self.content_key is None or task_id in self._over:
            return None
        alike = self.content_key(task_id)
        return next((one for name, one in self._asked.items() if self.content_key(name) == alike), None)

    async def _make_room(self) -> None:
        """Filter the newest group that nobody has asked for: groups come again in the order of their steps, so the
        oldest is the one that is needed next."""
        if self._kept:
            _, held = self._kept.popitem()
            self.counts.evicted += 1
            logger.warning("group filtered before it was asked for task=%s", held.group.task)
            await self._settle([], [held], None)

    # Tasks

    async def _poll_tasks(self) -> None:
        """Ask for the outcome of the open tasks until cancelled."""
        while True:
            waiting = [name for name, one in self._asked.items() if one.submitted and not one.answered_at]
            if not waiting:
                await self._change()
            for start in range(0, len(waiting), ASK_LIMIT):
                part = waiting[start : start + ASK_LIMIT]
                found = await self.tasks.results(part, POLL_S, 1)
                for status in found:
                    await self._on_status(status)
                if any(status.state is TaskState.UNKNOWN for status in found):
                    await asyncio.sleep(POLL_S)
            self._give_up_the_lost()

    async def _change(self) -> None:
        """Wait for a change, or for a moment."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()

    async def _on_status(self, status: TaskStatus) -> None:
        asked = self._asked.get(status.id)
        if asked is None:
            return
        if status.state is TaskState.DONE:
            asked.answered_at = time.monotonic()
        elif status.state in _ENDED:
            self._resolve(asked, Answer(missing=_ENDED[status.state], detail=status.reason))
        elif status.state is TaskState.UNKNOWN:  # a broker without a journal has forgotten it
            with suppress(InvalidTaskError, TasksFullError, RefusedError):
                await self.tasks.submit([asked.task])

    def _give_up_the_lost(self) -> None:
        now = time.monotonic()
        for one in list(self._asked.values()):
            if one.answered_at and self._empty_at > one.answered_at and now - one.answered_at > LOST_S:
                self._resolve(one, Answer(missing=Missing.LOST, detail="the broker has no group of its task"))

    # Settlement

    def keys(self) -> list[str]:
        """Return the keys of the groups that were handed out and are not settled."""
        return list(self._out)

    def group_ids(self, keys: Iterable[str]) -> list[str]:
        """Return the ids of the groups that were handed out for keys and are not settled."""
        return [held.group_id for key in keys for held in self._out.get(key, ())]

    async def settle(
        self,
        trained: Iterable[str],
        filtered: Iterable[str],
        version: PolicyVersion | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Settled | None:
        """Report the outcome of groups; None if no group belongs to the keys. Waits for the broker.

        Cancelled or late: the groups may or may not be settled, and are still handed out; repeat the call.

        Args:
            trained: Keys of groups that an optimizer step used.
            filtered: Keys of groups without a learning signal.
            version: Policy after the step.
            timeout_s: Longest wait in seconds; None waits without a limit.

        Raises:
            WaitTimeoutError: There is no answer after `timeout_s`.
            ConsumerFencedError: Another process has taken the consumer's place.
            RefusedError: `version` is behind the last settlement.
            ClosedError: The feed is closed.
        """
        if self.error is not None:
            raise self.error
        used, unused = self._take(trained), self._take(filtered)
        if not used and not unused:
            return None
        learned = self.consumer.version
        try:
            settled = await self._settle(_groups(used), _groups(unused), version, timeout_s=timeout_s)
        except BaseException:
            for key, held in (*used, *unused):
                self._out.setdefault(key, []).append(held)
            raise
        self._reports.add_filtered(_groups(unused))
        if used:
            run, after = self.consumer.info.run, self.consumer.version
            self.on_step(self._reports.step(_groups(used), learned, after, run))
        return settled

    def _take(self, keys: Iterable[str]) -> list[tuple[str, HeldGroup]]:
        """Return the groups that were handed out for keys, and note them as handed out no longer."""
        return [(key, held) for key in keys for held in self._out.pop(key, ())]

    async def _settle(
        self,
        trained: list[HeldGroup],
        filtered: list[HeldGroup],
        version: PolicyVersion | None,
        *,
        timeout_s: float | None = None,
    ) -> Settled:
        self.trained_log.write(self._line(trained, filtered, version))
        return await self.consumer.settle(trained, filtered=filtered, version=version, timeout_s=timeout_s)

    def _line(
        self, trained: list[HeldGroup], filtered: list[HeldGroup], version: PolicyVersion | None
    ) -> SettledBatch:
        """Return the line of a settlement in the log."""
        learned, every = self.consumer.version, (*trained, *filtered)
        after = version or msgspec.structs.replace(learned, step=learned.step + bool(trained))
        return SettledBatch(
            at=time.time(),
            version=after,
            trained=tuple(held.group_id for held in trained),
            filtered=tuple(held.group_id for held in filtered),
            staleness=tuple(held.staleness(learned) for held in trained),
            rewards=tuple(held.group.rewards().mean for held in every),
            rewound=any(held.rewound for held in every),
        )


def _groups(taken: Iterable[tuple[str, HeldGroup]]) -> list[HeldGroup]:
    return [held for _, held in taken]


def _typed(error: Exception) -> RolloutMQError:
    """Return the error that ended a feed as one that callers expect."""
    if isinstance(error, RolloutMQError):
        return error
    ended = ClosedError(
        f"task feed: {type(error).__name__}: {error}; remove the cause, such as a full disk, and resume the trainer"
    )
    ended.__cause__ = error
    return ended


def _log(where: Where, split: Split) -> Path:
    """Return the file for the log of the settlements: that of a local run, for its training."""
    local = split is Split.TRAIN and not is_address(where)
    return RunLayout(Path(str(where))).trained if local else Path(os.devnull)
