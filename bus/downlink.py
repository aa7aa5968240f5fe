"""The sockets of one consumer: requests on one, heartbeats on another, and the way back when the broker went.

A heartbeat says that the process lives, and how much progress it made; it goes on whatever else waits. When the broker
does not answer at all, it is looked for again. When it is in another life, or does not know the consumer, the consumer
registers again with the generation that it had: a broker that remembers gives the same one, and everything goes on, the
open leases too. Another generation begins a new `life`: leases of the one before are lost. A broker that lives and is
slow to answer, because its disk is, is asked again and again for the same, and has the same answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import msgspec

from rolloutmq.bus.client import BrokerClient, Frames
from rolloutmq.bus.discovery import insist, lives, reach
from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.sockets import make_context
from rolloutmq.schemas.delivery import (
    ConsumerBeat,
    ConsumerRegistered,
    RegisterConsumer,
    Release,
    Reply,
    Request,
)
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ClosedError,
    ErrorCode,
    LeaseLostError,
    RefusedError,
    RolloutMQError,
    WireError,
)

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
"""Time between two heartbeats; a broker takes silence of ten of them for death."""
PATIENCE_S: Final = 3.0
"""A broker that answers nothing for that long is looked for again."""
REPEAT_S: Final = 0.5
"""Pause after which an unanswered request is sent again."""
RELEASE_S: Final = 1.0
"""How long the last word may take; silence has the same effect, later."""


class _Sockets(NamedTuple):
    client: BrokerClient
    heart: BrokerClient
    stack: AsyncExitStack


class Downlink:
    """Connection of one consumer to whatever broker is there.

    Args:
        where: Run directory or address of `serve`.
        register: What the consumer says of itself. `resume` is said until one broker has answered: a later
            registration brings nothing back.
    """

    def __init__(self, where: Where, register: RegisterConsumer) -> None:
        self.register = register
        self.registered: ConsumerRegistered | None = None
        """The last answer to a registration."""
        self.life = 0
        """How many times the consumer registered and was not known before."""
        self.progress = 0
        """Grows with whatever the consumer achieves."""
        self.idle: Callable[[], bool] = lambda: False
        """Whether nobody works at what is leased, so that no lack of progress says that the consumer hangs."""
        self._where = where
        self._context = make_context()
        self._sockets: _Sockets | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def connect(self) -> None:
        """Find the broker and register, if that is not done; waits as long as it takes.

        Raises:
            RefusedError: The broker does not take this consumer.
        """
        await self._connect(None)

    async def _connect(self, lost: BrokerClient | None) -> None:
        """Connect in place of `lost`, unless another task did so meanwhile."""
        async with self._turn:
            if self._sockets is not None and self._sockets.client is not lost:
                return
            while not self._closed:
                try:
                    found = await self._reach()
                except BrokerUnavailableError as error:
                    logger.warning("broker lost while connecting error=%s", error)
                else:
                    # The old ones stay until here, for the heartbeats: the broker may hear, and only not answer.
                    lost_too, self._sockets = self._sockets, found
                    await _close(lost_too)
                    return
            raise ClosedError

    async def _reach(self) -> _Sockets:
        client, place = await reach(self._where, self._context)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            heart = await stack.enter_async_context(BrokerClient(client.address, self._context))
            if place.epoch != self._epoch:
                await self._register(client, place.epoch)
            return _Sockets(client, heart, stack.pop_all())

    @property
    def _epoch(self) -> int:
        return self.registered.epoch if self.registered else 0

    async def _register(self, client: BrokerClient, epoch: int) -> None:
        known = self.registered.generation if self.registered else 0
        asked = msgspec.structs.replace(self.register, generation=known)
        # Sent once: each may begin a new generation, and the first answer would name one that is over.
        reply, _ = await insist(client, asked, epoch, PATIENCE_S, PATIENCE_S)
        if not isinstance(reply, ConsumerRegistered):
            raise WireError(f"the broker answered {type(reply).__name__} to RegisterConsumer")
        self.register = msgspec.structs.replace(self.register, resume=None)
        self.registered = reply
        self.life += reply.generation != known
        logger.info("registered consumer=%s life=%d epoch=%d", self.register.consumer, self.life, reply.epoch)

    async def _register_again(self, client: BrokerClient, life: int) -> None:
        """Register in place of `life`, unless another task did so meanwhile."""
        async with self._turn:
            if self.life != life or self._sockets is None or self._sockets.client is not client:
                return
            try:
                await self._register(client, self._epoch)
            except BrokerUnavailableError as error:
                logger.warning("broker lost while registering again error=%s", error)

    async def ask(
        self, message: Request, wait_s: float = 0.0, *, lease: tuple[int, int] | None = None
    ) -> tuple[Reply, Frames]:
        """Ask until there is an answer; finds the broker again and registers again by itself.

        Args:
            message: The request.
            wait_s: How long the broker waits by agreement before it answers.
            lease: Number and life of the lease that the request is about.

        Raises:
            LeaseLostError: The life of the lease is over, or the broker says that it is lost.
            RefusedError: The broker said no.
            ClosedError: The consumer is closed.
        """
        while True:
            await self.connect()
            assert self._sockets is not None
            client, life = self._sockets.client, self.life
            if lease is not None and lease[1] != life:
                raise LeaseLostError(lease[0], "the consumer had to register again")
            try:
                repeat_s = max(REPEAT_S, wait_s + PATIENCE_S / 2)
                patience_s = wait_s + PATIENCE_S
                return await insist(client, message, self._epoch, patience_s, repeat_s, self._wait_on)
            except BrokerUnavailableError as error:
                logger.warning("broker lost, looking for it again error=%s", error)
                await self._connect(client)
            except ClosedError:
                # Another task connects again, unless the consumer itself was closed: `connect` tells.
                continue
            except RefusedError as error:
                if error.code is not ErrorCode.UNKNOWN:
                    raise
                await self._register_again(client, life)

    def _wait_on(self) -> None:
        # Who waits for a slow broker is not hung: the batch of a pull may be leased, and the reply on its way.
        self.progress += 1

    async def beat(self) -> None:
        """Send heartbeats until cancelled, also while the broker is looked for."""
        looking: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(BEAT_S)
                if self._sockets is None:
                    continue
                client = self._sockets.client
                if not await self._heard(self._sockets) and (looking is None or looking.done()):
                    # Ends the request that waits for the broker, too, which is then put to the one that is found.
                    looking = tasks.create_task(self._come_back(self._connect(client)), name="way back")

    async def _heard(self, sockets: _Sockets) -> bool:
        """Send one heartbeat; return whether the broker answered, and is in the life that is known."""
        life, epoch = self.life, self._epoch
        try:
            await sockets.heart.request(self._heartbeat(), PATIENCE_S, REPEAT_S)
            return await lives(sockets.heart, epoch, PATIENCE_S)
        except ClosedError:
            return True
        except BrokerUnavailableError:
            return False
        except RolloutMQError as error:
            logger.warning("heartbeat refused consumer=%s error=%s", self.register.consumer, error)
            await self._come_back(self._register_again(sockets.client, life))
            return True

    async def _come_back(self, way: Awaitable[None]) -> None:
        try:
            await way
        except RolloutMQError as error:
            logger.warning("registering again failed consumer=%s error=%s", self.register.consumer, error)

    def _heartbeat(self) -> ConsumerBeat:
        self.progress += self.idle()
        return ConsumerBeat(consumer=self.register.consumer, progress=self.progress)

    async def close(self) -> None:
        """Give back what is leased and close the sockets; `beat` has ended before."""
        self._closed = True
        if self._sockets is not None:
            release = Release(consumer=self.register.consumer, reason="closed")
            try:
                await self._sockets.client.request(release, RELEASE_S, REPEAT_S)
            except RolloutMQError as error:
                logger.warning("release failed consumer=%s error=%s", self.register.consumer, error)
        last, self._sockets = self._sockets, None
        await _close(last)
        self._context.term()


async def _close(sockets: _Sockets | None) -> None:
    if sockets is not None:
        await sockets.stack.aclose()
