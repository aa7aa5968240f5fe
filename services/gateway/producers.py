"""Producers of the gateway: one for each environment, opened at its first group.

An open producer has `DESCRIPTORS` descriptors. Half of those that the process may have are for producers: when that
many are open, the one that has been idle longest closes, and opens again at its next group.

A post is answered once the broker has acked its groups. Before the hand-over the client may leave or time out, without
effect; after it the group arrives, and the reply waits for that. Unacked groups are not saved when the gateway ends:
their clients have no reply, and send them again.
"""

import asyncio
import logging
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.schemas.errors import (
    ClosedError,
    RefusedError,
    RetryableError,
    RolloutMQError,
    UnackedError,
    UsageError,
)
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import SEQUENCES_LIMIT, ErrorCode
from rolloutmq.services.gateway.registry import Environment, Registry

logger = logging.getLogger(__name__)

SLOTS: Final = 64
"""Groups of one environment in flight at once."""

ON_ITS_WAY_S: Final = 1.0
"""Time after which a group in flight counts as waiting."""

REMEMBERED: Final = 1024
"""Remembered newest acks; the broker's status is refreshed long before there are more."""

DESCRIPTORS: Final = 8
"""Descriptors of an open producer: two for each of its three sockets, and those of its arena."""

LEAVE_S: Final = 2.0
"""Longest wait for acks at the end: a client without a reply sends again."""

_T = TypeVar("_T")


class NoRoomError(RetryableError):
    """The broker had no room in time, or the client left before; nothing was accepted."""

    def __init__(self, reason: str = "no room for the group yet") -> None:
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}; send it again"


@dataclass(slots=True, eq=False)
class _Waiting:
    """Unacked groups of one post."""

    since: float
    groups: int
    sequences: int


class EnvProducer:
    """Sends the groups of one lane.

    Args:
        where: Run directory.
        lane: Name of the environment on the bus.
        name: Name of the producer.
        group_size, weight: As registered.
        max_tokens: Longest sequence of the environment.
        share: Returns its minimum share.
        admitted: Called before it opens; may raise NoRoomError.
    """

    def __init__(
        self,
        where: Where,
        lane: str,
        *,
        name: str = "",
        group_size: int = 1,
        weight: float = 1.0,
        max_tokens: int = 0,
        share: Callable[[], float] = lambda: 0.0,
        admitted: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._under_way: set[_Waiting] = set()
        self.settled_at = float("-inf")
        """Time when the state of its groups was last known, monotonic."""
        self._acked: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._where = where
        self.lane = lane
        self._name = (name or f"gateway-{lane}")[:64]
        self._group_size = group_size
        self._weight = max(0.0, weight)
        self._max_tokens = max_tokens
        self._share = share
        self._admitted = admitted
        self._opening = asyncio.Lock()
        self.is_open = False
        """Whether it has descriptors, or is about to."""
        self._open: tuple[Producer, AsyncExitStack] | None = None

    def waiting(self) -> tuple[int, int]:
        """Return how many groups wait for room, and their sequences.

        Groups just sent are excluded: an environment that learns of a full queue cancels its workers, also those whose
        group is being accepted, and would repeat the rollout.
        """
        late = time.monotonic() - ON_ITS_WAY_S
        waits = [one for one in self._under_way if one.since < late]
        return sum(one.groups for one in waits), sum(one.sequences for one in waits)

    async def require_sendable(self, groups: Sequence[Group], gone: asyncio.Event, wait_s: float) -> None:
        """Return if each group can be sent on its own. Sends nothing yet.

        Raises:
            GroupTooLargeError: A group can never be sent.
            NoRoomError: The broker is away for `wait_s`, or the client left before it was back.
        """
        opening = await _in_time(self._opened(), gone, wait_s)
        if opening.cancelled():
            raise NoRoomError
        for group in groups:
            opening.result().require_sendable(group)

    @property
    def busy(self) -> bool:
        """Return whether a group waits for acceptance."""
        return bool(self._under_way)

    async def deliver(
        self, groups: Sequence[Group], gone: asyncio.Event, wait_s: float, came: Callable[[Group], None]
    ) -> None:
        """Return when all groups are acked.

        Args:
            groups: At least one.
            gone: Set when nobody waits for the reply any more.
            wait_s: Longest wait of the first group for room. The others follow without a limit: if they were refused,
                the client would send half of them twice.
            came: Called with each acked group.

        Raises:
            NoRoomError: Nothing was accepted.
            RolloutMQError: The producer failed or was closed; unacked groups may or may not arrive.
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
        """Return the sequences acked since then, as far as remembered."""
        return sum(sequences for acked_at, sequences in self._acked if acked_at > at)

    async def close(self) -> None:
        """Close the producer; the next group opens a new one."""
        async with self._opening:
            await self._shut()

    async def _shut(self) -> None:
        if self._open is not None:
            (_, stack), self._open = self._open, None
            try:
                await stack.aclose()
            except UnackedError as error:
                # Their clients got no success, and send them again.
                logger.warning("groups not acked lane=%s error=%s", self.lane, error)
            finally:
                self.is_open = False

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
            # Its producer was closed meanwhile, because its environment left: use another one.
        # The group may have been handed over just as it was cancelled: then it arrives, and we wait for it.
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
            await self.close()  # a failed producer stays failed
            raise

    async def _opened(self) -> Producer:
        async with self._opening:
            if self._open is None:
                self._open = await self._connected()
            return self._open[0]

    async def _connected(self) -> tuple[Producer, AsyncExitStack]:
        if self._admitted is not None:
            await self._admitted()
        stack, self.is_open = AsyncExitStack(), True
        try:
            producer = await stack.enter_async_context(
                Producer.open(
                    self._where,
                    env=self.lane,
                    producer=self._name,
                    group_size=min(self._group_size, SEQUENCES_LIMIT),
                    slots=SLOTS,
                    weight=self._weight,
                    min_share=self._share(),
                    max_tokens=self._max_tokens,
                    drain_s=LEAVE_S,
                )
            )
        except BaseException as error:
            self.is_open = False
            if isinstance(error, RefusedError) and error.code is ErrorCode.LIMIT:
                raise NoRoomError(error.detail) from None
            raise
        return producer, stack


async def _in_time(work: Coroutine[Any, Any, _T], gone: asyncio.Event, wait_s: float) -> "asyncio.Task[_T]":
    """Return a finished task; cancelled if the work took too long, or if the client left first."""
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


def most_open() -> int:
    """Return how many producers may be open with the process's limit of descriptors."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2 // DESCRIPTORS)


NOBODY = "unregistered"
"""Lane of groups without an environment."""


class EnvProducers:
    """The producers of one gateway.

    Args:
        where: Run directory.
        registry: Registered environments and their claims.
        most_open: Producers that may be open at once.
    """

    def __init__(self, where: Where, registry: Registry, most_open: int) -> None:
        self._where = where
        self._registry = registry
        self._most_open = most_open
        self._by_name: dict[str, EnvProducer] = {}

    def __iter__(self) -> Iterator[EnvProducer]:
        return iter(self._by_name.values())

    def get(self, env: Environment) -> EnvProducer | None:
        """Return the producer of an environment, if there is one."""
        return self._by_name.get(_name_of(env))

    def of(self, env: Environment | None) -> EnvProducer:
        """Return the producer of an environment, or of the unregistered ones."""
        name = _name_of(env) if env is not None else NOBODY
        if name not in self._by_name:
            self._by_name[name] = self._made(env)
        return self._by_name[name]

    def _made(self, env: Environment | None) -> EnvProducer:
        if env is None:
            return EnvProducer(self._where, NOBODY, admitted=self._make_room)
        return EnvProducer(
            self._where,
            env.lane,
            name=f"program-{env.worker}" if env.worker else "",
            group_size=env.group_size,
            weight=env.weight,
            max_tokens=env.max_tokens,
            share=lambda: self._registry.share(env),
            admitted=self._make_room,
        )

    async def _make_room(self) -> None:
        """Close the producer that has been idle longest, if as many are open as may be."""
        while sum(producer.is_open for producer in self) >= self._most_open:
            idle = [producer for producer in self if producer.is_open and not producer.busy]
            if not idle:
                raise NoRoomError(f"all {self._most_open} producers that the descriptors allow are in use")
            await min(idle, key=lambda producer: producer.settled_at).close()

    async def drop_forgotten(self) -> None:
        """Close and drop the producers of environments that the registry has forgotten."""
        known = {NOBODY, *map(_name_of, self._registry.book.environments)}
        for name in self._by_name.keys() - known:
            if not self._by_name[name].busy:
                await self._by_name.pop(name).close()

    def waiting_groups(self) -> int:
        """Return how many groups wait for room."""
        return sum(producer.waiting()[0] for producer in self)

    def sequences_since(self, at: float) -> dict[str, int]:
        """Return the sequences that wait for room, or were acked since, by lane."""
        found: Counter[str] = Counter()
        for producer in self:
            found[producer.lane] += producer.waiting()[1] + producer.acked_since(at)
        return found

    async def close(self) -> None:
        """Close all producers; the next group of each opens a new one."""
        async with asyncio.TaskGroup() as tasks:
            for producer in self:
                tasks.create_task(producer.close())


def _name_of(env: Environment) -> str:
    """Return the name of an environment's producer: several workers share a lane. No lane has such a name."""
    return f"program:{env.worker}" if env.worker else env.lane
