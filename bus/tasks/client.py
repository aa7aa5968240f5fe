"""The task client: a trainer submits tasks and gets their outcome.

    async with TaskClient.open(run_dir) as tasks:
        ids = await tasks.submit([Task(env="sort3", payload=[3, 1, 2], size=8)])
        for status in await tasks.results(ids):
            print(status.state, status.group_id)

A `Consumer` pulls the groups that answer tasks like all others; `Group.task` has the id of the task. The client repeats
requests and reconnects to a restarted broker. An acknowledged submission survives what the run's durability promises;
an unacknowledged one is repeated under the same id.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import msgspec

from rolloutmq.bus.blocking import Facade, OfOneProcess
from rolloutmq.bus.encoding.opaque_columns import check_values
from rolloutmq.bus.tasks.connection import TaskConnection
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.time_limit import time_limit, within
from rolloutmq.schemas.errors import InvalidTaskError, LimitExceededError, TasksFullError, WireError
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import InfoReply, Reply
from rolloutmq.schemas.wire.requests import GetInfo
from rolloutmq.schemas.wire.tasks import (
    ASK_LIMIT,
    GIVEN,
    PAYLOAD_LIMIT_BYTES,
    REASON_CHARS,
    SUBMIT_LIMIT,
    AwaitTasks,
    CancelTasks,
    NewTask,
    SubmitTasks,
    TasksFull,
    TaskStates,
    TaskStatus,
)

POLL_S: Final = 3.0
"""Wait of one request at the broker before its repetition; within it a dead broker is noticed."""
PAUSE_S: Final = 0.05
"""Least time between two requests without a result."""
REQUEST_BYTES: Final = 512 << 10
"""Most payload bytes of one request, half of the broker's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A submitted task.

    Attributes:
        env: Environment of its workers.
        payload: Any msgpack value, at most 256 KiB encoded; only the environment reads it. Unused with an index.
        id: Unique in the run, at most 128 characters. Empty: `submit` makes one.
        split: Split of its group: train or eval.
        size: Number of sequences; 0 uses the environment's `group_size`.
        deadline_s: Seconds after the submission at which the task expires; 0 is never.
        priority: Tasks of higher priority are taken first.
        index: Number of the task in the environment's task space, instead of a payload: the environment draws the
            task by a generator seeded with it, always the same. `GIVEN`: the payload is the task.
        greedy: Sample with temperature 0, whatever the environment asks for.
    """

    env: str
    payload: Any = None
    id: str = ""
    split: Split = Split.TRAIN
    size: int = 0
    deadline_s: float = 0.0
    priority: int = 0
    index: int = GIVEN
    greedy: bool = False


class TaskClient(OfOneProcess):
    """Submits tasks and reports their outcome.

    Open one with `TaskClient.open`, or with `TaskClient.blocking` in code without an event loop. A broker that is away
    is waited for without a limit; a cancelled call may be repeated.
    """

    def __init__(self, where: Where) -> None:
        self._link = TaskConnection(where)
        self._nonce = os.urandom(8).hex()
        self._numbers = count(1)

    @classmethod
    @asynccontextmanager
    async def open(cls, where: Where, *, timeout_s: float | None = None) -> AsyncIterator["TaskClient"]:
        """Connect to the broker of a run directory or an address.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            timeout_s: Longest wait when opening, in seconds; None waits without a limit.

        Raises:
            WaitTimeoutError: The broker has not answered after `timeout_s`.
        """
        limit_s = time_limit("timeout_s", timeout_s)
        made = cls(where)
        try:
            connecting = made._link.connect()
            await within(limit_s, "opening of the task client", connecting, lambda: made._link.problem)
            yield made
        finally:
            await made._link.close()

    @staticmethod
    def blocking(where: Where, *, timeout_s: float | None = None) -> "BlockingTaskClient":
        """Return a blocking client with the options of `open`: `with TaskClient.blocking(where) as tasks`."""
        return BlockingTaskClient(lambda: TaskClient.open(where, timeout_s=timeout_s), "rolloutmq tasks")

    async def submit(self, tasks: Iterable[Task], wait_s: float = 0.0) -> list[str]:
        """Submit tasks and return their ids in order.

        Submitting the same task with the same id again changes nothing. Many tasks need several requests, so an error
        may leave the first of them submitted; it is safe to submit all of them again with the same ids.

        Args:
            tasks: Tasks to submit.
            wait_s: Longest wait for room while too many tasks are open, in seconds.

        Raises:
            InvalidTaskError: A payload is not msgpack or too large, or a field is out of range; nothing was submitted.
            TasksFullError: Too many tasks are open; `retry_s` is the time until there may be room.
            RefusedError: The environment does not exist, or the id belongs to a different task.
            ClosedError: The client is closed.
        """
        until = time.monotonic() + wait_s
        new = [self._new(task) for task in tasks]
        for request in _requests(new):
            await self._submit(request, until)
        return [task.id for task in new]

    async def environments(self) -> tuple[str, ...]:
        """Return the names of the environments that a task may be for; none means any.

        Raises:
            ClosedError: The client is closed.
        """
        reply = await self._link.ask(GetInfo())
        if not isinstance(reply, InfoReply):
            raise WireError(f"broker: wrong type of reply to GetInfo (got {type(reply).__name__})")
        return reply.environments

    async def _submit(self, request: SubmitTasks, until: float) -> None:
        while True:
            reply = await self._link.ask(request)
            if not isinstance(reply, TasksFull):
                _states(reply)
                return
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TasksFullError(reply.retry_s, reply.detail)
            await asyncio.sleep(min(left_s, reply.retry_s))

    def _new(self, task: Task) -> NewTask:
        name = task.id or f"{self._nonce}-{next(self._numbers)}"
        payload = b""
        try:
            payload = msgspec.msgpack.encode(task.payload)
            check_values([payload])
            new = NewTask(
                id=name,
                env=task.env,
                payload=payload,
                split=task.split,
                size=task.size,
                deadline_s=task.deadline_s,
                priority=task.priority,
                index=task.index,
                greedy=task.greedy,
            )
            msgspec.convert(msgspec.to_builtins(new), NewTask)
        except LimitExceededError as error:
            raise InvalidTaskError(name, str(error)) from None
        except msgspec.ValidationError as error:
            big = f"payload is too large (got {len(payload)} bytes, limit {PAYLOAD_LIMIT_BYTES}); store it elsewhere"
            raise InvalidTaskError(name, big if len(payload) > PAYLOAD_LIMIT_BYTES else str(error)) from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidTaskError(name, f"payload is not msgpack: {error}") from None
        return new

    async def results(
        self, ids: Sequence[str], wait_s: float | None = None, enough: int | None = None
    ) -> list[TaskStatus]:
        """Wait until tasks have ended, and return the status of each, in the order of `ids`.

        Args:
            ids: Ids of the tasks. An unknown or forgotten task is `UNKNOWN`.
            wait_s: Longest wait in seconds; 0 does not wait, None waits without a limit.
            enough: Required number of ended tasks; None: all.

        Returns:
            The status of every task, open ones included.

        Raises:
            ClosedError: The client is closed.
        """
        until = None if wait_s is None else time.monotonic() + wait_s
        wanted = len(ids) if enough is None else min(enough, len(ids))
        while True:
            left_s = POLL_S if until is None else max(0.0, min(POLL_S, until - time.monotonic()))
            began = time.monotonic()
            found = await self._look(ids, wanted, left_s)
            over = sum(status.over for status in found)
            if over >= wanted or (until is not None and time.monotonic() >= until):
                return found
            await asyncio.sleep(max(0.0, PAUSE_S - (time.monotonic() - began)))

    async def _look(self, ids: Sequence[str], wanted: int, wait_s: float) -> list[TaskStatus]:
        """Ask once for each part of the ids; the broker waits only for a single part."""
        parts = [tuple(ids[at : at + ASK_LIMIT]) for at in range(0, len(ids), ASK_LIMIT)]
        if len(parts) == 1:
            asked = AwaitTasks(ids=parts[0], enough=wanted, wait_s=wait_s)
            return list(_states(await self._link.ask(asked, wait_s)))
        found: list[TaskStatus] = []
        for part in parts:
            found += _states(await self._link.ask(AwaitTasks(ids=part)))
        return found

    async def cancel(self, ids: Sequence[str], reason: str = "asked") -> list[TaskStatus]:
        """Cancel the open tasks, and return the status of all of them.

        A worker that has already taken a task continues, and its group then counts as late. It cancels the rollout of
        an evaluation.

        Raises:
            ClosedError: The client is closed.
        """
        found: list[TaskStatus] = []
        for at in range(0, len(ids), ASK_LIMIT):
            asked = CancelTasks(ids=tuple(ids[at : at + ASK_LIMIT]), reason=reason[:REASON_CHARS])
            found += _states(await self._link.ask(asked))
        return found


class BlockingTaskClient(Facade[TaskClient]):
    """`TaskClient` for code without an event loop: the same names, and every call blocks until it is done.

    Open it with `with TaskClient.blocking(where) as tasks`.
    """

    def submit(self, tasks: Iterable[Task], wait_s: float = 0.0) -> list[str]:
        """See `TaskClient.submit`."""
        return self._run(self._object.submit(tasks, wait_s))

    def environments(self) -> tuple[str, ...]:
        """See `TaskClient.environments`."""
        return self._run(self._object.environments())

    def results(
        self, ids: Sequence[str], wait_s: float | None = None, enough: int | None = None
    ) -> list[TaskStatus]:
        """See `TaskClient.results`."""
        return self._run(self._object.results(ids, wait_s, enough))

    def cancel(self, ids: Sequence[str], reason: str = "asked") -> list[TaskStatus]:
        """See `TaskClient.cancel`."""
        return self._run(self._object.cancel(ids, reason))


def _requests(new: Sequence[NewTask]) -> Iterator[SubmitTasks]:
    """Divide submissions into requests within the broker's limits."""
    part: list[NewTask] = []
    nbytes = 0
    for task in new:
        if part and (len(part) >= SUBMIT_LIMIT or nbytes + len(task.payload) > REQUEST_BYTES):
            yield SubmitTasks(tasks=tuple(part))
            part, nbytes = [], 0
        part.append(task)
        nbytes += len(task.payload)
    if part:
        yield SubmitTasks(tasks=tuple(part))


def _states(reply: Reply) -> tuple[TaskStatus, ...]:
    if not isinstance(reply, TaskStates):
        raise WireError(f"broker: wrong type of reply to a request about tasks (got {type(reply).__name__})")
    return reply.tasks
