"""The sockets of one consumer: requests on one, heartbeats on another, and the way back when the broker went.

A heartbeat says that the process lives, and how much progress it made. When the broker does not know the consumer (it
has a new life, or heard nothing for too long), the consumer registers again, which begins a new `life`: leases of the
one before are lost. When it does not answer at all, it is looked for again; only a broker in another life makes a new
registration needed.
"""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import msgspec

from rolloutmq.bus.client import BrokerClient, Frames
from rolloutmq.bus.discovery import reach
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
        register: What the consumer says of itself. `resume` is said once: a later registration brings nothing back.
    """

    def __init__(self, where: Where, register: RegisterConsumer) -> None:
        self.register = register
        self.registered: ConsumerRegistered | None = None
        """The last answer to a registration."""
        self.life = 0
        """How many times the consumer registered."""
        self.progress = 0
        """Grows with whatever the consumer achieves."""
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
            while True:
                await self._disconnect()
                if self._closed:
                    raise ClosedError
                try:
                    self._sockets = await self._reach()
                except BrokerUnavailableError as error:
                    logger.warning("broker lost while connecting error=%s", error)
                else:
                    return

    async def _reach(self) -> _Sockets:
        client, place = await reach(self._where, self._context)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            heart = await stack.enter_async_context(BrokerClient(client.address, self._context))
            if self.registered is None or place.epoch != self.registered.epoch:
                await self._register(client)
            return _Sockets(client, heart, stack.pop_all())

    async def _register(self, client: BrokerClient) -> None:
        reply = await client.request(self.register, PATIENCE_S, REPEAT_S)
        if not isinstance(reply, ConsumerRegistered):
            raise WireError(f"the broker answered {type(reply).__name__} to RegisterConsumer")
        self.register = msgspec.structs.replace(self.register, resume=None)
        self.registered = reply
        self.life += 1
        logger.info("registered consumer=%s life=%d epoch=%d", self.register.consumer, self.life, reply.epoch)

    async def _register_again(self, client: BrokerClient, life: int) -> None:
        """Register in place of `life`, unless another task did so meanwhile."""
        async with self._turn:
            if self.life == life:
                await self._register(client)

    async def ask(
        self, message: Request, timeout_s: float = PATIENCE_S, *, lease: tuple[int, int] | None = None
    ) -> tuple[Reply, Frames]:
        """Ask until there is an answer; finds the broker again and registers again by itself.

        Args:
            message: The request.
            timeout_s: How long one broker may take to answer, before it is looked for again.
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
                return await client.request_frames(
                    message, timeout_s, max(REPEAT_S, timeout_s - PATIENCE_S / 2)
                )
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

    async def beat(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self._sockets is None:
                continue
            client, heart, _ = self._sockets
            life = self.life
            try:
                await heart.request(self._heartbeat(), PATIENCE_S, REPEAT_S)
            except ClosedError:
                continue
            except BrokerUnavailableError:
                # Ends the request that waits for the broker, too, which then finds it again.
                await self._come_back(self._connect(client))
            except RolloutMQError as error:
                logger.warning("heartbeat refused consumer=%s error=%s", self.register.consumer, error)
                await self._come_back(self._register_again(client, life))

    async def _come_back(self, way: Awaitable[None]) -> None:
        try:
            await way
        except RolloutMQError as error:
            logger.warning("registering again failed consumer=%s error=%s", self.register.consumer, error)

    def _heartbeat(self) -> ConsumerBeat:
        return ConsumerBeat(consumer=self.register.consumer, progress=self.progress)

    async def _disconnect(self) -> None:
        sockets, self._sockets = self._sockets, None
        if sockets is not None:
            await sockets.stack.aclose()

    async def close(self) -> None:
        """Give back what is leased and close the sockets; `beat` has ended before."""
        self._closed = True
        if self._sockets is not None:
            release = Release(consumer=self.register.consumer, reason="closed")
            try:
                await self._sockets.client.request(release, RELEASE_S, REPEAT_S)
            except RolloutMQError as error:
                logger.warning("release failed consumer=%s error=%s", self.register.consumer, error)
        await self._disconnect()
        self._context.term()
