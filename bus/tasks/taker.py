"""The task taker: a worker takes tasks under a lease and hands failed ones back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from rolloutmq.bus.blocking import OfOneProcess
from rolloutmq.bus.encoding.opaque_columns import check_values
from rolloutmq.bus.tasks.client import PAUSE_S, POLL_S
from rolloutmq.bus.tasks.connection import TaskConnection
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.schemas.errors import LimitExceededError, RefusedError, WireError
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import Reply
from rolloutmq.schemas.wire.tasks import (
    GIVEN,
    REASON_CHARS,
    AwaitTasks,
    HandBack,
    TakenTask,
    TakenTasks,
    TakeTasks,
    TaskState,
    TaskStates,
    TaskStatus,
)


@dataclass(frozen=True, slots=True)
class LeasedTask:
    """A task under a lease of this worker, until it is answered, handed back or expired.

    Attributes:
        id: Id of the task; the group that answers it has it as `Group.task`.
        payload: Decoded payload of the task.
        size: Number of sequences; 0 uses the environment's `group_size`.
        left_s: Seconds to its deadline when it was taken; 0 if it has none.
        deliveries: Number of times it was delivered, this one included.
        index: Number of the task in the environment's task space, or `GIVEN`.
        greedy: Sample with temperature 0.
    """

    id: str
    payload: Any
    size: int
    left_s: float
    deliveries: int
    index: int = GIVEN
    greedy: bool = False


class TaskTaker(OfOneProcess):
    """Takes tasks for one producer.

    Open one with `TaskTaker.open`; any number of asyncio tasks of one loop may call it. The producer answers a task by
    sending a group with its id in `Group.task`.
    """

    def __init__(self, where: Where, producer: str, session: Callable[[], int], lease_s: float) -> None:
        self._link = TaskConnection(where)
        self._producer = producer
        self._session = session
        self._lease_s = lease_s
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls, where: Where, producer: str, session: Callable[[], int], lease_s: float = 600.0
    ) -> AsyncIterator["TaskTaker"]:
        """Connect to the broker; waits for it without a limit. Tasks leased at the end return with the producer.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            producer: Name of the producer.
            session: Returns its current session number.
            lease_s: Lease of a task in seconds; without an answer the broker gives it to another worker.
        """
        made = cls(where, producer, session, lease_s)
        try:
            await made._link.connect()
            yield made
        finally:
            await made._link.close()

    async def take(
        self, count: int = 1, *, wait: bool = True, until: asyncio.Event | None = None
    ) -> list[LeasedTask]:
        """Take tasks of the producer's environment and split.

        Cancelled: a task leased meanwhile returns when its lease or the producer ends.

        Args:
            count: Most tasks to take.
            wait: Wait without a limit for the first task; False returns an empty list if there is none.
            until: Event that ends the wait.

        Raises:
            SessionFencedError: A newer producer of the same name took over.
            ClosedError: The taker is closed.
        """
        slot = self._free.pop() if self._free else len(self._numbers)
        try:
            return await self._take(slot, count, wait, until)
        finally:
            self._free.append(slot)

    async def _take(self, slot: int, count: int, wait: bool, until: asyncio.Event | None) -> list[LeasedTask]:
        while True:
            began = time.monotonic()
            request = self._request(slot, count, POLL_S if wait else 0.0)
            try:
                taken = await self._asked(request, until)
            except RefusedError as error:
                if error.code is not ErrorCode.UNKNOWN:
                    raise
                taken = ()  # a broker that has just restarted will know the session soon
            found = [task for one in taken if (task := await self._decoded(one)) is not None]
            if found or not wait or (until is not None and until.is_set()):
                return found
            await asyncio.sleep(max(0.0, PAUSE_S - (time.monotonic() - began)))

    def _request(self, slot: int, count: int, wait_s: float) -> TakeTasks:
        self._numbers[slot] = self._numbers.get(slot, 0) + 1
        return TakeTasks(
            producer=self._producer,
            session=self._session(),
            slot=slot,
            number=self._numbers[slot],
            count=count,
            wait_s=wait_s,
            lease_s=self._lease_s,
        )

    async def _asked(self, request: TakeTasks, until: asyncio.Event | None) -> tuple[TakenTask, ...]:
        """Send a request; if the event is set meanwhile, fetch what was leased by then and hand it back untried."""
        if until is None:
            return _taken(await self._link.ask(request, request.wait_s))
        asking = asyncio.create_task(self._link.ask(request, request.wait_s), name="take")
        stopping = asyncio.create_task(until.wait(), name="wait for the stop")
        try:
            await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            asking.cancel()
            await asyncio.wait({asking, stopping})
        if not asking.cancelled():
            return _taken(asking.result())
        last = msgspec.structs.replace(request, count=0, wait_s=0.0)
        for task in _taken(await self._link.ask(last)):
            await self.hand_back(task.id, "the worker drains", tried=False)
        return ()

    async def _decoded(self, task: TakenTask) -> LeasedTask | None:
        try:
            check_values([task.payload])
            payload = msgspec.msgpack.decode(task.payload)
        except (LimitExceededError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            await self.hand_back(task.id, f"payload does not decode: {error}")
            return None
        return LeasedTask(task.id, payload, task.size, task.left_s, task.deliveries, task.index, task.greedy)

    async def hand_back(self, task_id: str, reason: str, *, tried: bool = True) -> None:
        """Return a failed task to the queue. Does nothing if it has ended or belongs to another worker.

        Args:
            task_id: Id of the task.
            reason: Reason in its status; cut at 500 characters.
            tried: False for an unstarted task: it does not count as delivered.
        """
        back = HandBack(
            producer=self._producer,
            session=self._session(),
            id=task_id,
            reason=reason[:REASON_CHARS],
            tried=tried,
        )
        with suppress(
            RefusedError
        ):  # a broker that does not know the session has already taken the task back
            await self._link.ask(back)

    async def ended(self, task_id: str) -> TaskStatus:
        """Wait until a task has ended, and return its status. Waits without a limit.

        A task that the broker does not know has not ended: its trainer submits it again.

        Raises:
            ClosedError: The taker is closed.
        """
        asked = AwaitTasks(ids=(task_id,), wait_s=POLL_S)
        while True:
            began = time.monotonic()
            reply = await self._link.ask(asked, POLL_S)
            if not isinstance(reply, TaskStates):
                raise WireError(f"broker: wrong type of reply to AwaitTasks (got {type(reply).__name__})")
            (status,) = reply.tasks
            if status.over and status.state is not TaskState.UNKNOWN:
                return status
            # An unknown task and a broker with too many waits are answered at once.
            pause_s = PAUSE_S if status.state is not TaskState.UNKNOWN else POLL_S
            await asyncio.sleep(max(0.0, pause_s - (time.monotonic() - began)))


def _taken(reply: Reply) -> tuple[TakenTask, ...]:
    if not isinstance(reply, TakenTasks):
        raise WireError(f"broker: wrong type of reply to TakeTasks (got {type(reply).__name__})")
    return reply.tasks
