"""The worker's side of tasks: take them under a lease, and give back what comes to nothing."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.opaque import check_values
from rolloutmq.bus.tasklink import TaskLink
from rolloutmq.bus.tasks import PAUSE_S, POLL_S
from rolloutmq.schemas.delivery import Reply
from rolloutmq.schemas.errors import ErrorCode, LimitExceededError, RefusedError, WireError
from rolloutmq.schemas.tasks import REASON_CHARS, HandBack, TakenTask, TakenTasks, TakeTasks


@dataclass(frozen=True, slots=True)
class LeasedTask:
    """A task that is this worker's until it is answered, handed back, or `left_s` seconds of its deadline are over.

    Attributes:
        size: Sequences wanted, 0 if that is left to the environment.
        left_s: Seconds to its deadline when it was taken, 0 if there is none.
        deliveries: How many times it was handed out, this time included.
    """

    id: str
    payload: Any
    size: int
    left_s: float
    deliveries: int


class TaskTaker:
    """Takes tasks for one producer. Made by `TaskTaker.open`; any number of tasks of one loop may take at once.

    The group that answers a task names it in `Group.task` and is sent by the producer as any other; that settles it.
    """

    def __init__(self, where: Where, producer: str, session: Callable[[], int], lease_s: float) -> None:
        self._link = TaskLink(where)
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
        """Take tasks for as long as the block lasts; what is leased when it is left goes back with the producer.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            producer: Name of the producer.
            session: Returns its present session.
            lease_s: A task that is not answered within that goes to another worker.
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
        """Take up to `count` tasks; waits for the first one, until the event is set, unless told not to `wait`.

        Cancelled: a task that was just leased comes back with the end of its lease or of the producer.

        Raises:
            SessionFencedError: The producer's name has another session.
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
                taken = ()  # a broker that has just come back will know the session soon
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
        """Ask; if the event is set meanwhile, ask again for what was got by then, and give that back untried."""
        if until is None:
            return _taken(await self._link.ask(request, request.wait_s))
        asking = asyncio.create_task(self._link.ask(request, request.wait_s), name="take")
        stopping = asyncio.create_task(until.wait(), name="ear for the stop")
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
            await self.hand_back(task.id, f"its payload cannot be decoded: {error}")
            return None
        return LeasedTask(task.id, payload, task.size, task.left_s, task.deliveries)

    async def hand_back(self, task_id: str, reason: str, *, tried: bool = True) -> None:
        """Give a task back that came to nothing; one that is over, or another's by now, is left as it is."""
        back = HandBack(
            producer=self._producer,
            session=self._session(),
            id=task_id,
            reason=reason[:REASON_CHARS],
            tried=tried,
        )
        with suppress(RefusedError):  # a broker that does not know the session has taken it back already
            await self._link.ask(back)


def _taken(reply: Reply) -> tuple[TakenTask, ...]:
    if not isinstance(reply, TakenTasks):
        raise WireError(f"the broker answered {type(reply).__name__} to TakeTasks")
    return reply.tasks
