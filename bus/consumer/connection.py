"""The connection of one consumer: one socket for requests, another for heartbeats, and reconnection.

A heartbeat shows that the process is alive, with its progress; it continues while requests wait. When the broker does
not answer, the connection looks for it again. When the broker has restarted or does not know the consumer, the consumer
registers again with its generation. A broker with that memory returns the same generation, and leases continue. A new
generation starts a new `life`: earlier leases are lost. A live broker with a slow disk gets the same request again and
gives the same answer.

If another process registers under the name of this consumer, it takes over the batches. This one is fenced then: every
further call raises ConsumerFencedError, and it registers no more.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import msgspec

from rolloutmq.bus.transport.discovery import Search, insist, lives, reach
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.request_client import BrokerClient, Frames
from rolloutmq.bus.transport.sockets import make_context
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ClosedError,
    ConsumerFencedError,
    ForkedError,
    LeaseLostError,
    RefusedError,
    RolloutMQError,
    WireError,
)
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.replies import ConsumerRegistered, Reply
from rolloutmq.schemas.wire.requests import (
    Commit,
    ConsumerBeat,
    LogFigures,
    Pull,
    RegisterConsumer,
    Release,
    Request,
    SettleGroups,
    TrainerPause,
)

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
"""Time between two heartbeats; without ten of them the broker treats the consumer as dead."""
PATIENCE_S: Final = 3.0
"""Silence of the broker after which the connection looks for it again."""
REPEAT_S: Final = 0.5
"""Pause before an unanswered request is sent again."""
RELEASE_S: Final = 1.0
"""Longest wait for the answer to a release; without it the lease expires later."""


_Stamped = Pull | SettleGroups | Release | ConsumerBeat | LogFigures
"""Requests that name the generation of the registration."""


class _Sockets(NamedTuple):
    client: BrokerClient
    heart: BrokerClient
    stack: AsyncExitStack


class ConsumerConnection:
    """Connection of one consumer to the current broker.

    Args:
        where: Run directory or address of `serve`.
        register: Registration of the consumer. `resume` is sent until one broker has answered; later registrations
            do not rewind.
    """

    def __init__(self, where: Where, register: RegisterConsumer) -> None:
        self.register = register
        self.registered: ConsumerRegistered | None = None
        """Answer to the last registration."""
        self.life = 0
        """Number of registrations with a new generation."""
        self.progress = 0
        """Counter that grows with each sign of progress."""
        self._waits_s: dict[TrainerPause, float] = {}
        self.idle: Callable[[], bool] = lambda: False
        """Returns whether the leased batch waits to be pulled, so missing progress does not mean a hang."""
        self._where = where
        self._search = Search(where)
        self._looking = False
        self._context = make_context()
        self._sockets: _Sockets | None = None
        self._turn = asyncio.Lock()
        self._key = os.urandom(8).hex()
        """Identifies the present attempt to register, however often its request is sent."""
        self._fenced: ConsumerFencedError | None = None
        self._closed = False
        self._owner = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one that made the connection."""
        return os.getpid() != self._owner

    @property
    def problem(self) -> str:
        """What a request without an answer waits for."""
        if self._looking or self._sockets is None:
            return self._search.problem
        return f"no answer from {self._sockets.client.address}"

    async def connect(self) -> None:
        """Find the broker and register, unless connected; waits without a limit.

        Raises:
            RefusedError: The broker does not accept this consumer.
            ConsumerFencedError: Another process took over the name.
            ForkedError: This process is a forked child.
        """
        if self.forked:
            raise ForkedError(f"consumer {self.register.consumer}", self._owner)
        if self._fenced is not None:
            raise self._fenced.with_traceback(None)
        if self._sockets is None or self._turn.locked():
            await self._connect(None)

    async def _connect(self, lost: BrokerClient | None) -> None:
        """Replace the connection `lost`, unless another task has done so."""
        async with self._turn:
            if self._sockets is not None and self._sockets.client is not lost:
                return
            while not self._closed:
                self._looking = True
                try:
                    found = await self._reach()
                except BrokerUnavailableError as error:
                    logger.warning("broker lost while connecting error=%s", error)
                else:
                    self._looking = False
                    # Heartbeats use the old sockets until here: the broker may receive them and only not answer.
                    lost_too, self._sockets = self._sockets, found
                    await _close(lost_too)
                    return
            raise ClosedError

    async def _reach(self) -> _Sockets:
        client, place = await reach(self._where, self._context, self._search)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            heart = await stack.enter_async_context(BrokerClient(client.address, self._context, client.keys))
            if not self.register.run_id:
                self.register = msgspec.structs.replace(self.register, run_id=place.run_id)
            if place.epoch != self._epoch:
                await self._register(client, place.epoch)
            return _Sockets(client, heart, stack.pop_all())

    @property
    def _epoch(self) -> int:
        return self.registered.epoch if self.registered else 0

    async def _register(self, client: BrokerClient, epoch: int) -> None:
        known = self.registered.generation if self.registered else 0
        asked = msgspec.structs.replace(self.register, generation=known, key=self._key)
        reply, _ = await insist(client, asked, epoch, PATIENCE_S, REPEAT_S)
        if not isinstance(reply, ConsumerRegistered):
            raise WireError(f"broker: wrong type of reply to RegisterConsumer (got {type(reply).__name__})")
        self.register = msgspec.structs.replace(self.register, resume=None)
        self._key = os.urandom(8).hex()
        if reply.epoch != self._epoch:
            self._waits_s = {}  # another life of the broker has counted what was told before
        self.registered = reply
        self.life += reply.generation != known
        logger.info("registered consumer=%s life=%d epoch=%d", self.register.consumer, self.life, reply.epoch)
        if reply.deleted_steps:
            logger.warning(
                "resume: is before the last commit, the groups of %d later steps were deleted and do not come again "
                "consumer=%s resume=%s; resume at the last committed checkpoint",
                reply.deleted_steps, self.register.consumer, asked.resume,
            )  # fmt: skip

    async def _register_again(self, client: BrokerClient, life: int) -> None:
        """Replace the registration of `life`, unless another task has done so."""
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
        """Send a request until there is an answer; reconnect and register again automatically.

        Args:
            message: The request.
            wait_s: Longest wait of the broker before its answer, in seconds.
            lease: Number and life of the request's lease.

        Raises:
            LeaseLostError: The lease is lost.
            RefusedError: The broker refused the request.
            ConsumerFencedError: Another process took over the name.
            ClosedError: The consumer is closed.
            ForkedError: This process is a forked child.
        """
        while True:
            await self.connect()
            assert self._sockets is not None
            client, life = self._sockets.client, self.life
            message = self._stamped(message)
            if lease is not None and lease[1] != life:
                raise LeaseLostError(lease[0], "the broker forgot the consumer, which registered again")
            try:
                repeat_s = max(REPEAT_S, wait_s + PATIENCE_S / 2)
                patience_s = wait_s + PATIENCE_S
                return await insist(client, message, self._epoch, patience_s, repeat_s, self._wait_on)
            except BrokerUnavailableError as error:
                logger.warning("broker lost, reconnecting error=%s", error)
                await self._connect(client)
            except ClosedError:
                # Another task reconnects. If the consumer itself is closed, `connect` raises.
                continue
            except ConsumerFencedError as error:
                self._take_fencing(error, life)
            except LeaseLostError:
                # The lease of a fenced consumer is lost too, but pulling again would not help.
                await self._heard(self._sockets)
                if self._fenced is not None:
                    raise self._fenced from None
                raise
            except RefusedError as error:
                if error.code is not ErrorCode.UNKNOWN:
                    raise
                await self._register_again(client, life)

    async def commit(self, version: PolicyVersion) -> None:
        """Report a durable checkpoint of this consumer's group; see `ask`."""
        about = self.register
        await self.ask(
            Commit(consumer=about.consumer, group=about.group, run=about.info.run, version=version)
        )

    def _stamped(self, message: Request) -> Request:
        """Return the request with the generation of the present registration, if it has a place for it."""
        if isinstance(message, _Stamped) and self.registered is not None:
            return msgspec.structs.replace(message, generation=self.registered.generation)
        return message

    def waited(self, reason: TrainerPause, seconds: float) -> None:
        """Count seconds in which the trainer asked for no batch; the next heartbeat tells them. Never waits."""
        self._waits_s[reason] = self._waits_s.get(reason, 0.0) + seconds

    def _take_fencing(self, error: ConsumerFencedError, life: int) -> None:
        """Note that another process took over the name; a request of an earlier life of this consumer says nothing."""
        if life == self.life and self._fenced is None:
            logger.error("consumer fenced error=%s", error)
            self._fenced = error

    def _wait_on(self) -> None:
        # A consumer that waits for a slow broker does not hang: the reply with its batch may be under way.
        self.progress += 1

    async def beat(self) -> None:
        """Send heartbeats until cancelled, also while the connection looks for the broker."""
        looking: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while self._fenced is None:
                await asyncio.sleep(BEAT_S)
                if self._sockets is None:
                    continue
                client = self._sockets.client
                if not await self._heard(self._sockets) and (looking is None or looking.done()):
                    logger.warning(
                        "broker lost, reconnecting error=no answer to heartbeats address=%s", client.address
                    )
                    # This also ends the request in progress, which is then sent to the broker that is found.
                    looking = tasks.create_task(self._come_back(self._connect(client)), name="reconnect")

    async def _heard(self, sockets: _Sockets) -> bool:
        """Send one heartbeat; return whether the broker answered and has not restarted."""
        life, epoch = self.life, self._epoch
        try:
            await sockets.heart.request(self._heartbeat(), PATIENCE_S, REPEAT_S)
            return await lives(sockets.heart, epoch, PATIENCE_S)
        except ClosedError:
            return True
        except ConsumerFencedError as error:
            self._take_fencing(error, life)
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

    def _heartbeat(self) -> Request:
        self.progress += self.idle()
        name, waits_s = self.register.consumer, dict(self._waits_s)
        return self._stamped(ConsumerBeat(consumer=name, progress=self.progress, waits_s=waits_s))

    async def close(self) -> None:
        """Release the leased batch and close the sockets. `beat` has ended before."""
        self._closed = True
        if self._sockets is not None and self._fenced is None:
            name, waits_s = self.register.consumer, dict(self._waits_s)
            release = self._stamped(Release(consumer=name, reason="closed", leaves=True, waits_s=waits_s))
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
