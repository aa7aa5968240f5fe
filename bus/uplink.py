"""The sockets and tasks of one producer: they carry out what its `Session` decides.

Three tasks live as long as the connection: `listen` applies published acks, `transmit` sends what has credit,
`keep` asks when the session must. When the broker falls silent or comes back in another life, the sockets are closed,
it is looked for again, and the session is registered anew where needed. What lay in the old pipe is in the spool still.
A broker that lives and is slow to answer, because its disk is, keeps its sockets: each new pipe would fill anew with
groups that it does not read.

PUSH loss argument: see `bus.sockets.producer_push`; nothing counts before its ack.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import zmq

from rolloutmq.bus import codec, topics
from rolloutmq.bus.arena import Arena
from rolloutmq.bus.client import BrokerClient
from rolloutmq.bus.discovery import insist, reach
from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.events import Subscriber
from rolloutmq.bus.session import PACK_GROUPS, Session
from rolloutmq.bus.sockets import Channel, producer_push, shared
from rolloutmq.bus.spool import Entry
from rolloutmq.schemas.delivery import (
    Ack,
    DeclareTables,
    Registered,
    RegisterProducer,
    Reply,
    Request,
    RunInfo,
)
from rolloutmq.schemas.envelope import ColumnTable
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ErrorCode,
    RefusedError,
    RolloutMQError,
    WireError,
)

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""How often the session is asked whether it must sync."""
PATIENCE_S: Final = 3.0
"""A broker that answers nothing for that long is looked for again."""
REPEAT_S: Final = 0.5
"""Pause after which an unanswered request is sent again."""
PAUSE_S: Final = 0.05
"""Least time between two connections, whatever a broker answers."""
BURST: Final = 16
"""Messages that are sent at once before the event loop gets its turn."""


TURN_S: Final = 0.001
"""So long one task may keep the loop with groups that need not wait."""
TURN_BYTES: Final = 1 << 20
"""So much it may keep it for: less than a millisecond of copying."""


class _Lost(Exception):  # noqa: N818 - it never leaves this module
    """The broker, or what it knew of the session, is gone: connect again."""


class _Sockets(NamedTuple):
    client: BrokerClient
    push: Channel
    acks: Subscriber
    stack: AsyncExitStack


class Uplink:
    """Connection of one session to whatever broker is there.

    Args:
        where: Run directory or address of `serve`.
        session: The state that this carries out.
        on_accepted: Called with the groups that an ack covered, possibly none, after each ack.
        waiting: Whether somebody waits for credit.
    """

    def __init__(
        self,
        where: Where,
        session: Session,
        on_accepted: Callable[[list[Entry]], None],
        waiting: Callable[[], bool],
    ) -> None:
        self.info = RunInfo()
        self.max_group_bytes = 0
        self.on_registered: Callable[[], None] = lambda: None
        """Called after each registration, before anything is sent under it."""
        self.leaving = False
        """Set by who cancels `run`: if the broker is lost in that very moment, Python 3.11 tells of the loss alone."""
        self._where = where
        self._session = session
        self._on_accepted = on_accepted
        self._waiting = waiting
        self._context = shared.borrow()
        self._sockets: _Sockets | None = None
        self._turn = asyncio.Lock()
        """Registering and syncing never overlap: a sync that is overtaken would be told that it is fenced."""
        self._look = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._asks = False
        """To be asked whatever the session says."""
        self._work = asyncio.Event()
        self._turn_at = 0.0
        self._turn_groups = self._turn_bytes = 0
        """What was passed on since the last sending, and when the first of it was: the time is the producer's own, not
        that of the others of its loop."""
        self._soon = False
        """The loop will send in its next turn."""

    async def connect(self) -> None:
        """Find the broker and open or go on with the session; waits as long as it takes.

        Raises:
            RefusedError: The broker does not take this producer.
        """
        while True:
            await self._disconnect()
            try:
                async with self._turn:
                    await self._connect()
            except BrokerUnavailableError as error:
                logger.warning("broker lost while connecting error=%s", error)
            else:
                return

    async def _connect(self) -> None:
        producer = self._session.register.producer
        client, place = await reach(self._where, self._context)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            push = Channel(producer_push(self._context, place.ingest))
            stack.callback(push.close)
            acks = Subscriber(place.events, [topics.ack(producer)], self._context)
            await stack.enter_async_context(acks)
            self.max_group_bytes = place.max_group_bytes
            self.info = place.info
            if place.epoch == self._session.epoch:
                self._session.reconnected()
                self._ask()
            else:
                self._offer_arena(client, place.arena_bytes)
                await self._register_at(client, place.epoch)
            self._sockets = _Sockets(client, push, acks, stack.pop_all())
        self._work.set()

    def _offer_arena(self, client: BrokerClient, nbytes: int) -> None:
        """Make an arena for the coming registration, if the broker may be able to read it."""
        self._session.offer(None, "not_offered")
        if not nbytes or not client.address.startswith("ipc://"):
            return
        try:
            self._session.offer(Arena(nbytes))
        except OSError as error:
            self._session.offer(None, "arena_failed")
            logger.warning("no shared memory, groups go as frames error=%s", error)

    async def _register_at(self, client: BrokerClient, epoch: int) -> None:
        """Go on with the session in another life of the broker, or open one."""
        session = self._session
        if session.epoch:
            await self._require_current(client, epoch)
        reply = await self._registered(client, epoch, session.registration())
        if not session.goes_on(reply.ack):
            logger.warning(
                "the broker lost what it had acked producer=%s session=%d",
                session.register.producer,
                session.number,
            )
            reply = await self._registered(client, epoch, session.registration(new=True))
        was = session.number
        accepted = session.registered(reply.ack, time.monotonic())
        if session.without_arena == "arena_unreachable":
            logger.warning("the broker cannot read the arena, groups go as frames")
        self.info = reply.info
        logger.info(
            "registered producer=%s session=%d was=%d epoch=%d unacked=%d",
            session.register.producer,
            session.number,
            was,
            session.epoch,
            len(session.spool),
        )
        self.on_registered()
        self._on_accepted(accepted)

    async def _require_current(self, client: BrokerClient, epoch: int) -> None:
        """Raise SessionFencedError if a newer session took over: to register would fence that one in turn."""
        try:
            await insist(client, self._session.ask(time.monotonic()), epoch, PATIENCE_S, REPEAT_S)
        except RefusedError as error:
            if error.code is not ErrorCode.UNKNOWN:
                raise

    async def _registered(self, client: BrokerClient, epoch: int, asked: RegisterProducer) -> Registered:
        reply, _ = await insist(client, asked, epoch, PATIENCE_S, PATIENCE_S)
        if not isinstance(reply, Registered):
            raise WireError(f"the broker answered {type(reply).__name__} to RegisterProducer")
        return reply

    def renew(self) -> None:
        """Open a new session in place of the present one, which has nothing unacked; `on_registered` tells when."""
        self._session.forget()
        self._ask()

    def _ask(self) -> None:
        self._asks = True
        self._look.set()

    async def run(self) -> None:
        """Listen, transmit and keep until cancelled; connects again by itself.

        Raises:
            SessionFencedError, RefusedError: The session can do nothing more.
        """
        while not self.leaving:
            if self._sockets is None:
                await self.connect()
            try:
                await self._work_on()
            except* (_Lost, BrokerUnavailableError) as lost:
                logger.warning("broker lost, looking for it again error=%s", lost.exceptions[0])
                await self._disconnect()
                await asyncio.sleep(PAUSE_S)

    async def _work_on(self) -> None:
        assert self._sockets is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(self._sockets.acks), name="acks of the producer")
            tasks.create_task(self._transmit(self._sockets), name="groups of the producer")
            tasks.create_task(self._keep(self._sockets.client), name="syncs of the producer")

    async def _listen(self, acks: Subscriber) -> None:
        async for _, payload in acks:
            try:
                ack = codec.decode_ack(payload)
            except WireError as error:
                logger.warning("malformed ack error=%s", error)
                continue
            if self._session.strange(ack):
                self._ask()
            else:
                self._on_accepted(self._session.acked(ack, time.monotonic()))

    async def _transmit(self, sockets: _Sockets) -> None:
        while True:
            self._work.clear()
            entries = self._session.unsent()
            if not entries:
                await self._work.wait()
            elif entries[0].header.table not in self._session.declared:
                await self._declare(sockets.client, entries[0].table)
            elif not self._send(sockets.push, entries):
                await sockets.push.ready(zmq.POLLOUT)
            else:
                self.send()
                await asyncio.sleep(0)

    async def _declare(self, client: BrokerClient, table: ColumnTable) -> None:
        async with self._turn:
            session = self._session
            tables = DeclareTables(
                producer=session.register.producer, session=session.number, tables=(table,)
            )
            await self._granted(client, tables)
            session.declared.add(table.id)

    async def pass_on(self, nbytes: int) -> None:
        """Have a group sent that has come into the spool, and give the loop its turn now and then.

        Acks must be heard, and other tasks must run, but a turn costs as much as a small group. What comes within
        one leaves in one message.
        """
        now = time.monotonic()
        if not self._turn_groups:
            self._turn_at = now
        self._turn_groups += 1
        self._turn_bytes += nbytes
        self.send_soon()
        due = self._turn_groups >= PACK_GROUPS or self._turn_bytes >= TURN_BYTES
        if due or now - self._turn_at >= TURN_S:
            self.send()
            await asyncio.sleep(0)

    def send_soon(self) -> None:
        """Send in the loop's next turn, with what has come by then. Never waits."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self.send)

    def send(self) -> None:
        """Send what can be sent at once; the rest follows by itself. Never waits."""
        self._soon = False
        self._turn_groups = self._turn_bytes = 0
        if self._sockets is None:
            return
        session = self._session
        for _ in range(BURST):
            entries = session.unsent()
            if not entries:
                return
            if entries[0].header.table not in session.declared or not self._send(self._sockets.push, entries):
                break
        self._work.set()

    def _send(self, push: Channel, entries: list[Entry]) -> bool:
        frames, entries = self._session.message(entries)
        if not push.try_send(frames, copy=len(frames) == 1):
            return False
        now = time.monotonic()
        for entry in entries:
            self._session.spool.sent(entry, now)
        return True

    async def _keep(self, client: BrokerClient) -> None:
        self._tick()
        try:
            while True:
                await self._look.wait()
                self._look.clear()
                if self._asks or self._must_ask():
                    self._asks = False
                    if not self._session.number:
                        raise _Lost("a new session is wanted")
                    async with self._turn:
                        await self._sync(client)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _tick(self) -> None:
        """Look after the session now and again: a call and not a task, since there may be many of a loop."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        if self._session.arena is not None:
            self._session.arena.trim(time.monotonic())
        if self._must_ask():
            self._look.set()

    def _must_ask(self) -> bool:
        return self._session.must_ask(time.monotonic(), self._waiting())

    async def _sync(self, client: BrokerClient) -> None:
        asked = self._session.ask(time.monotonic())
        reply = await self._granted(client, asked)
        if not isinstance(reply, Ack):
            raise WireError(f"the broker answered {type(reply).__name__} to Sync")
        if reply.epoch != self._session.epoch:
            raise _Lost("the broker has a new life")
        accepted, again = self._session.synced(reply, asked, time.monotonic())
        if again:
            logger.warning("sending again groups=%d first=%s", len(again), again[0].header.group_id)
        self._on_accepted(accepted)

    async def _granted(self, client: BrokerClient, message: Request) -> Reply:
        """Ask; a broker that does not know the session is as good as another one."""
        try:
            return (await insist(client, message, self._session.epoch, PATIENCE_S, REPEAT_S))[0]
        except RefusedError as error:
            if error.code is not ErrorCode.UNKNOWN:
                raise
            self._session.epoch = 0
            raise _Lost("the broker does not know the session") from None

    async def goodbye(self, timeout_s: float) -> None:
        """Close the session at the broker, if it answers in time."""
        if self._sockets is None:
            return
        try:
            await self._sockets.client.request(self._session.goodbye(), timeout_s, REPEAT_S)
        except RolloutMQError as error:
            logger.warning("goodbye failed producer=%s error=%s", self._session.register.producer, error)

    async def _disconnect(self) -> None:
        sockets, self._sockets = self._sockets, None
        if sockets is not None:
            await sockets.stack.aclose()

    async def close(self) -> None:
        """Close the sockets, and the arena for those who have not opened it. `run` has ended before."""
        await self._disconnect()
        self._session.offer(None, "closed")
        shared.give_back(self._context)


def cause(error: Exception) -> Exception:
    """Return the first error that is not a group of errors."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
