"""Tasks: the trainer's side, which submits them and asks what became of them, and the worker's, which takes them.

    async with TaskClient.open(run_dir) as tasks:
        ids = await tasks.submit([Task("sort3", [3, 1, 2], size=8)])
        for status in await tasks.results(ids):
            print(status.state, status.group_id)

The groups that answer tasks come to a `Consumer` like all others, with the id of their task in `Group.task`. Requests
may arrive twice, and a broker that went is looked for again: a task whose submission was answered survives what the
run's durability says, and one whose submission was not is submitted again under the same id.
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

from rolloutmq.bus.blocking import Facade
from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.opaque import check_values
from rolloutmq.bus.tasklink import TaskLink
from rolloutmq.schemas.delivery import Reply
from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.errors import LimitExceededError, WireError
from rolloutmq.schemas.tasks import (
    ASK_LIMIT,
    PAYLOAD_LIMIT_BYTES,
    REASON_CHARS,
    SUBMIT_LIMIT,
    AwaitTasks,
    CancelTasks,
    InvalidTaskError,
    NewTask,
    SubmitTasks,
    TasksFull,
    TasksFullError,
    TaskStates,
    TaskStatus,
)

POLL_S: Final = 3.0
"""How long one request waits at the broker before it is repeated: so soon is a broker that went missed."""
PAUSE_S: Final = 0.05
"""Least time between two requests that got nothing."""
REQUEST_BYTES: Final = 512 << 10
"""Most bytes of payloads in one submission, half of what the broker takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt of the trainer's own.

    Attributes:
        env: Environment whose workers get it.
        payload: Any msgpack value, at most 256 KiB; only the environment looks into it.
        id: Unique in the run; empty: one is made when it is submitted.
        split: Whether its group is for training or for evaluation.
        size: Sequences wanted; 0 leaves it to the environment's `group_size`.
        deadline_s: Seconds from its submission after which nobody wants it any more; 0 is never.
        priority: The higher goes first.
    """

    env: str
    payload: Any
    id: str = ""
    split: Split = Split.TRAIN
    size: int = 0
    deadline_s: float = 0.0
    priority: int = 0


class TaskClient:
    """Submits tasks. Made by `TaskClient.open`, or by `TaskClient.blocking` for threads."""

    def __init__(self, where: Where) -> None:
        self._link = TaskLink(where)
        self._nonce = os.urandom(8).hex()
        self._numbers = count(1)

    @classmethod
    @asynccontextmanager
    async def open(cls, where: Where) -> AsyncIterator["TaskClient"]:
        """Find the broker of a run directory or an address; waits for it as long as it takes."""
        made = cls(where)
        try:
            await made._link.connect()
            yield made
        finally:
            await made._link.close()

    @staticmethod
    def blocking(where: Where) -> "BlockingTaskClient":
        """Like `open`, for code without an event loop: `with TaskClient.blocking(where) as tasks`."""
        return BlockingTaskClient(lambda: TaskClient.open(where), "rolloutmq tasks")

    async def submit(self, tasks: Iterable[Task], wait_s: float = 0.0) -> list[str]:
        """Submit tasks and return their ids, in their order.

        A task with an id that is known already changes nothing. Where the tasks are more than go into one request, an
        error may leave the first of them submitted; submitting all of them again, with the same ids, is safe.

        Args:
            tasks: What to submit.
            wait_s: How long to wait for room while too many tasks are open, in seconds.

        Raises:
            InvalidTaskError: A payload is not msgpack or too large, or a field is out of bounds.
            TasksFullError: Too many tasks are open; `retry_s` says when there may be room.
            RefusedError: There is no such environment, or the id was used for something else.
        """
        until = time.monotonic() + wait_s
        new = [self._new(task) for task in tasks]
        for request in _requests(new):
            await self._submit(request, until)
        return [task.id for task in new]

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
            )
            msgspec.convert(msgspec.to_builtins(new), NewTask)
        except LimitExceededError as error:
            raise InvalidTaskError(name, str(error)) from None
        except msgspec.ValidationError as error:
            big = f"its payload has {len(payload)} bytes, at most {PAYLOAD_LIMIT_BYTES} can travel"
            raise InvalidTaskError(name, big if len(payload) > PAYLOAD_LIMIT_BYTES else str(error)) from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidTaskError(name, f"its payload is not msgpack: {error}") from None
        return new

    async def results(
        self, ids: Sequence[str], wait_s: float | None = None, enough: int | None = None
    ) -> list[TaskStatus]:
        """Wait until tasks are over, and return how each of them stands, in the order of `ids`.

        Args:
            ids: Which tasks. One that is not known, or over for so long that it is forgotten, is UNKNOWN.
            wait_s: Longest time to wait, in seconds; 0 only looks, None waits for ever.
            enough: How many have to be over; all if not given.
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
        """Ask once for each part of the ids; only a single part can be waited for at the broker."""
        parts = [tuple(ids[at : at + ASK_LIMIT]) for at in range(0, len(ids), ASK_LIMIT)]
        if len(parts) == 1:
            asked = AwaitTasks(ids=parts[0], enough=wanted, wait_s=wait_s)
            return list(_states(await self._link.ask(asked, wait_s)))
        found: list[TaskStatus] = []
        for part in parts:
            found += _states(await self._link.ask(AwaitTasks(ids=part)))
        return found

    async def cancel(self, ids: Sequence[str], reason: str = "asked") -> list[TaskStatus]:
        """Cancel tasks that are not over, and return how all of them stand.

        A worker that has one is not called back from it: should its group come all the same, it is counted as late.
        """
        found: list[TaskStatus] = []
        for at in range(0, len(ids), ASK_LIMIT):
            asked = CancelTasks(ids=tuple(ids[at : at + ASK_LIMIT]), reason=reason[:REASON_CHARS])
            found += _states(await self._link.ask(asked))
        return found


class BlockingTaskClient(Facade[TaskClient]):
    """`TaskClient` for code without an event loop: the same names, and every call blocks until it is done."""

    def submit(self, tasks: Iterable[Task], wait_s: float = 0.0) -> list[str]:
        """See `TaskClient.submit`."""
        return self._run(self._object.submit(tasks, wait_s))

    def results(
        self, ids: Sequence[str], wait_s: float | None = None, enough: int | None = None
    ) -> list[TaskStatus]:
        """See `TaskClient.results`."""
        return self._run(self._object.results(ids, wait_s, enough))

    def cancel(self, ids: Sequence[str], reason: str = "asked") -> list[TaskStatus]:
        """See `TaskClient.cancel`."""
        return self._run(self._object.cancel(ids, reason))


def _requests(new: Sequence[NewTask]) -> Iterator[SubmitTasks]:
    """Cut submissions into requests that the broker takes."""
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
        raise WireError(f"the broker answered {type(reply).__name__} to a question about tasks")
    return reply.tasks
