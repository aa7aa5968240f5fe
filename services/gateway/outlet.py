"""The way of an environment's groups to the broker: one producer, opened when its first group comes.

A group is answered for when the broker has acked it. Until it is handed over, the client may go, or time may run out,
and nothing has happened; from then on it arrives, and the answer waits for that. Groups that were never acked are not
saved when the gateway ends: nobody was told that they had come, and their environment sends them again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.producer import Producer
from rolloutmq.schemas.envelope import SEQUENCES_LIMIT
from rolloutmq.schemas.errors import ClosedError, RetryableError, RolloutMQError, UsageError
from rolloutmq.schemas.trajectory import Group

SLOTS: Final = 64
"""Groups of one environment that are on their way at once."""
ON_ITS_WAY_S: Final = 1.0
"""A group that takes longer waits."""
REMEMBERED: Final = 1024
"""Newest acks; the broker's state is asked for long before there are more."""
LEAVE_S: Final = 2.0
"""How long the end waits for acks: who waits for the answer asks again."""
_T = TypeVar("_T")


class NoRoomError(RetryableError):
    """The broker gave no room in time, or the client went before it did; nothing was taken."""

    def __str__(self) -> str:
        return "there is no room for the group yet; send it again"


@dataclass(slots=True, eq=False)
class _Waiting:
    """What of one post is not acked yet."""

    since: float
    groups: int
    sequences: int


class Outlet:
    """Sends the groups of one lane.

    Args:
        where: Run directory.
        lane: Name of the environment on the bus.
        group_size, weight: As the environment registered.
        max_tokens: Longest sequence that it produces.
        share: Returns its minimum share.
    """

    def __init__(
        self,
        where: Where,
        lane: str,
        *,
        group_size: int = 1,
        weight: float = 1.0,
        max_tokens: int = 0,
        share: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._under_way: set[_Waiting] = set()
        self.settled_at = float("-inf")
        """When it was last known what became of groups, monotonic."""
        self._acked: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._where = where
        self._lane = lane
        self._group_size = group_size
        self._weight = max(0.0, weight)
        self._max_tokens = max_tokens
        self._share = share
        self._opening = asyncio.Lock()
        self._open: tuple[Producer, AsyncExitStack] | None = None

    def waiting(self) -> tuple[int, int]:
        """Return how many groups wait for room, and their sequences.

        What is just on its way does not: an environment that hears that enough is queued cancels its workers, those too
        whose group is being taken, and would roll it out again.
        """
        late = time.monotonic() - ON_ITS_WAY_S
        waits = [one for one in self._under_way if one.since < late]
        return sum(one.groups for one in waits), sum(one.sequences for one in waits)

    async def require_sendable(self, groups: Sequence[Group], gone: asyncio.Event, wait_s: float) -> None:
        """Return if each of the groups can be sent, alone. Nothing is sent yet.

        Raises:
            GroupTooLargeError: One of them never can be.
            NoRoomError: The broker is away for that long, or the client went before it was back.
        """
        opening = await _in_time(self._opened(), gone, wait_s)
        if opening.cancelled():
            raise NoRoomError
        for group in groups:
            opening.result().require_sendable(group)

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a group to be taken."""
        return bool(self._under_way)

    async def deliver(
        self, groups: Sequence[Group], gone: asyncio.Event, wait_s: float, came: Callable[[Group], None]
    ) -> None:
        """Return when all groups are acked.

        Args:
            groups: At least one.
            gone: Set when nobody waits for the answer any more.
            wait_s: How long the first may wait for room. Behind it come the others, however long that takes: half
                of them would come twice if they were refused.
            came: Called with each group that is acked.

        Raises:
            NoRoomError: Nothing was taken.
            RolloutMQError: The producer failed or was closed; what was not acked may or may not come.
        """
        waiting = _Waiting(time.monotonic(), len(groups), sum(group.sequences for group in groups))
        self._under_way.add(waiting)

        def note(group: Group, ack: "asyncio.Future[None]") -> None:
            if not ack.cancelled() and ack.exception() is None:
                waiting.groups, waiting.sequences = waiting.groups - 1, waiting.sequences - group.sequences
                self._acked.append((time.monotonic(), group.sequences))
                came(group)

        try:
            producer, ack = await self._first(groups[0], gone, wait_s)
            ack.add_done_callback(partial(note, groups[0]))
            acks = [ack]
            for group in groups[1:]:
                acks.append(ack := await producer.send_acked(group))
                ack.add_done_callback(partial(note, group))
            await asyncio.gather(*acks)
        finally:
            self._under_way.remove(waiting)
            self.settled_at = time.monotonic()

    def acked_since(self, at: float) -> int:
        """Return the sequences that were acked since, as far as it is remembered."""
        return sum(sequences for acked_at, sequences in self._acked if acked_at > at)

    async def close(self) -> None:
        """Close the producer; the next group opens another."""
        async with self._opening:
            await self._shut()

    async def _shut(self) -> None:
        if self._open is not None:
            (_, stack), self._open = self._open, None
            await stack.aclose()

    async def _first(
        self, group: Group, gone: asyncio.Event, wait_s: float
    ) -> tuple[Producer, "asyncio.Future[None]"]:
        until = time.monotonic() + wait_s
        while True:
            sending = await _in_time(self._sent(group), gone, max(0.0, until - time.monotonic()))
            if sending.cancelled():
                break
            if not isinstance(sending.exception(), ClosedError):
                return sending.result()
            # Its producer was closed while it waited, for its environment had vanished: it goes by another.
        # It may have been handed over in the very moment of the cancellation: then it arrives, and is waited for.
        producer = self._open[0] if self._open is not None else None
        ack = producer.handed_over(group.group_id) if producer is not None else None
        if producer is None or ack is None:
            raise NoRoomError
        return producer, ack

    async def _sent(self, group: Group) -> tuple[Producer, "asyncio.Future[None]"]:
        producer = await self._opened()
        try:
            return producer, await producer.send_acked(group)
        except UsageError:
            raise
        except RolloutMQError:
            await self.close()  # a producer that failed fails for ever
            raise

    async def _opened(self) -> Producer:
        async with self._opening:
            if self._open is None:
                stack = AsyncExitStack()
                producer = await stack.enter_async_context(
                    Producer.open(
                        self._where,
                        env=self._lane,
                        producer=f"gateway-{self._lane}"[:64],
                        group_size=min(self._group_size, SEQUENCES_LIMIT),
                        slots=SLOTS,
                        weight=self._weight,
                        min_share=self._share(),
                        max_tokens=self._max_tokens,
                        drain_s=LEAVE_S,
                    )
                )
                self._open = producer, stack
            return self._open[0]


async def _in_time(work: Coroutine[Any, Any, _T], gone: asyncio.Event, wait_s: float) -> "asyncio.Task[_T]":
    """Return a task that is done; it was cancelled if the work took longer, or if the client went before its end."""
    doing = asyncio.create_task(work)
    leaving = asyncio.create_task(gone.wait())
    try:
        await asyncio.wait({doing, leaving}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
    await asyncio.wait({doing})
    return doing
