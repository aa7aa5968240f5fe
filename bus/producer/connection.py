"""The connection of one producer: sockets and tasks for the decisions of its `SessionState`.

Three tasks run during a connection: `listen` applies published acks, `transmit` sends the groups with credit, and
`keep` syncs with the broker when the session must. When the broker falls silent or restarts, the connection finds it
again and registers the session again where needed. Its sockets connect again by themselves: others take their place
only if the broker has moved, or stays silent on an established connection. Groups in a lost pipe are still in the
spool. A live broker with a slow disk keeps its sockets, too: a new pipe would only fill with unread groups.

Loss: see `bus.transport.sockets.producer_push`; a group counts only after its ack.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import ClassVar, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

import zmq

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.producer.session import PACK_GROUPS, SessionState
from rolloutmq.bus.producer.spool import SpoolEntry
from rolloutmq.bus.shm.arena import Arena
from rolloutmq.bus.transport.discovery import Search, insist, reach
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.keys.handshakes import watched
from rolloutmq.bus.transport.pubsub import Subscriber
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.bus.transport.sockets import Channel, producer_push, shared
from rolloutmq.schemas.errors import BrokerUnavailableError, RefusedError, RolloutMQError, WireError
from rolloutmq.schemas.wire.envelope import ColumnTable, ErrorCode
from rolloutmq.schemas.wire.replies import Ack, Registered, Reply, RunInfo
from rolloutmq.schemas.wire.requests import DeclareTables, RegisterProducer, Request

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""Time between two checks whether the session must sync."""
PATIENCE_S: Final = 3.0
"""Silence of the broker after which the connection looks for it again."""
REPEAT_S: Final = 0.5
"""Pause before an unanswered request is sent again."""
PAUSE_S: Final = 0.05
"""Least time between two connections."""
BURST: Final = 16
"""Messages sent at once before the event loop gets its turn."""


TURN_S: Final = 0.001
"""Longest turn of one task with groups ready to send."""
TURN_BYTES: Final = 1 << 20
"""Most bytes of such groups in one turn: less than a millisecond of copying."""


class _Lost(Exception):  # noqa: N818 - it never leaves this module
    """The sockets are of no use: connect others."""


class _Forgotten(_Lost):
    """The broker lives, and does not know the session: register again."""


class _Ticks:
    """Calls methods every `TICK_S`, by one timer for all of an event loop: it may have a thousand producers.

    It keeps neither the loop nor an object of a method alive.
    """

    _of: "ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Ticks]]" = WeakKeyDictionary()

    def __init__(self) -> None:
        self._calls: set[WeakMethod[Callable[[], None]]] = set()
        self._is_due = False

    @classmethod
    def here(cls) -> "_Ticks":
        """Return those of the running loop."""
        loop = asyncio.get_running_loop()
        if (found := cls._of.get(loop)) is None:
            found = cls._of[loop] = cls()
        return found

    def begin(self, call: Callable[[], None]) -> None:
        """Call a method regularly."""
        self._calls.add(WeakMethod(call))
        if not self._is_due:
            self._again()

    def end(self, call: Callable[[], None]) -> None:
        """Call it no more."""
        self._calls.discard(WeakMethod(call))

    def _again(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._is_due = False
        if self._calls:
            self._again()
        for method in tuple(self._calls):
            call = method()
            if call is None:
                self._calls.discard(method)
            elif method in self._calls:  # the one before may have ended it
                try:
                    call()
                except Exception as error:  # noqa: BLE001 - others must not miss their ticks
                    about = {"message": f"tick failed of {call!r}", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(about)


class _Sockets(NamedTuple):
    client: BrokerClient
    places: tuple[str, str]
    """Addresses of `ingest` and `events`."""
    push: Channel
    acks: Subscriber

    def close_others(self) -> None:
        """Close all but the client."""
        self.push.close()
        self.acks.close()


class ProducerConnection:
    """Connection of one session to the current broker.

    Args:
        where: Run directory or address of `serve`.
        session: State of the session.
        on_accepted: Called after each ack with the groups it covers, possibly none.
        waiting: Returns whether a task or a group waits for credit.
    """

    def __init__(
        self,
        where: Where,
        session: SessionState,
        on_accepted: Callable[[list[SpoolEntry]], None],
        waiting: Callable[[], bool],
    ) -> None:
        self.info = RunInfo()
        self.max_group_bytes = 0
        """Most bytes of a group: the broker and the spool take no larger one."""
        self.on_registered: Callable[[], None] = lambda: None
        """Called after each registration, before anything is sent in that session."""
        self.on_tick: Callable[[], None] = lambda: None
        """Called every `TICK_S` while the session lives."""
        self.leaving = False
        """Set before `run` is cancelled: if the broker is lost at that moment, Python 3.11 raises only the loss."""
        self._where = where
        self._search = Search(where)
        self._session = session
        self._on_accepted = on_accepted
        self._waiting = waiting
        self._context = shared.borrow()
        self._sockets: _Sockets | None = None
        """Sockets of a session in use."""
        self._loose: _Sockets | None = None
        """Sockets that may serve the session again."""
        self._ingest = ""
        self._turn = asyncio.Lock()
        """Registrations and syncs never overlap: a sync after a newer registration would be refused as fenced."""
        self._look = asyncio.Event()
        self._asks = False
        """Sync even if the session does not require it."""
        self._asked_anew = False
        """The session ends because its saved groups are delivered; the broker is not lost."""
        self._work = asyncio.Event()
        self._turn_at = 0.0
        self._turn_groups = self._turn_bytes = 0
        """Groups and bytes since the last send, and the time of the first: this producer's own share of the loop."""
        self._soon = False
        """The loop sends in its next turn."""

    @property
    def problem(self) -> str:
        """What is missing for a connection, and where it was looked for; empty while there is one."""
        return self._search.problem if self._sockets is None else ""

    @property
    def address(self) -> str:
        """Address of the broker; empty without a connection."""
        return "" if self._sockets is None else self._sockets.client.address

    async def connect(self) -> None:
        """Find the broker and open or go on with the session; waits as long as it takes.

        Raises:
            RefusedError: The broker does not take this producer.
        """
        while True:
            self._loosen()
            try:
                async with self._turn:
                    await self._connect()
            except BrokerUnavailableError as error:
                logger.warning("broker lost while connecting error=%s", error)
            else:
                return

    async def _connect(self) -> None:
        loose = self._loose
        client, place = await reach(
            self._where, self._context, self._search, loose.client if loose is not None else None
        )
        places = place.ingest, place.events
        is_kept = loose is not None and loose.client is client and loose.places == places
        if not is_kept:
            self._loose = None
            if loose is not None:
                loose.close_others()
            self._loose = await self._opened(client, places)
        self._ingest = place.ingest
        self.max_group_bytes = min(place.max_group_bytes, self._session.spool.capacity_bytes)
        self.info = place.info
        self._session.belongs_to(place.run_id)
        if place.epoch == self._session.epoch:
            self._session.reconnected(is_kept=is_kept)
            self.ask()
        else:
            self._offer_arena(client, place.arena_bytes)
            await self._register_at(client, place.epoch)
        self._sockets, self._loose = self._loose, None
        self._work.set()

    async def _opened(self, client: BrokerClient, places: tuple[str, str]) -> _Sockets:
        """Connect the other sockets; if that fails, close the client."""
        ingest, events = places
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            socket = producer_push(self._context, ingest, client.keys)
            push = Channel(socket, watched(socket, ingest, client.keys))
            stack.callback(push.close)
            topic = topics.ack(self._session.register.producer)
            acks = await stack.enter_async_context(Subscriber(events, [topic], self._context, client.keys))
            stack.pop_all()
        return _Sockets(client, places, push, acks)

    def _offer_arena(self, client: BrokerClient, nbytes: int) -> None:
        """Create an arena for the next registration, if the broker may be able to read it."""
        self._session.offer(None, "not_offered")
        if not nbytes or not client.address.startswith("ipc://"):
            return
        try:
            self._session.offer(Arena(nbytes))
        except OSError as error:
            self._session.offer(None, "arena_failed")
            logger.warning("shared memory unavailable, sending frames error=%s", error)

    async def _register_at(self, client: BrokerClient, epoch: int) -> None:
        """Continue the session with a restarted broker, or open one."""
        session = self._session
        if session.epoch:
            await self._require_current(client, epoch)
        began = time.monotonic()
        reply = await self._registered(client, epoch, session.registration())
        if not session.goes_on(reply.ack):
            logger.warning(
                "acked groups lost by the broker producer=%s session=%d",
                session.register.producer,
                session.number,
            )
            reply = await self._registered(client, epoch, session.registration(new=True))
        was = session.number
        now = time.monotonic()
        accepted = session.registered(reply.ack, now, now - began)
        if session.without_arena == "arena_unreachable":
            logger.warning(
                "shared memory not readable for the broker, sending frames producer=%s: the broker runs as another "
                "user, in another container, or could not open it in time",
                session.register.producer,
            )
        self.info = reply.info
        if session.credit.paused:
            self.ask()
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
        """Raise SessionFencedError if a newer session took over: registering would fence that one in turn."""
        try:
            await insist(client, self._session.ask(time.monotonic()), epoch, PATIENCE_S, REPEAT_S)
        except RefusedError as error:
            if error.code is not ErrorCode.UNKNOWN:
                raise

    async def _registered(self, client: BrokerClient, epoch: int, asked: RegisterProducer) -> Registered:
        reply, _ = await insist(client, asked, epoch, PATIENCE_S, PATIENCE_S)
        if not isinstance(reply, Registered):
            raise WireError(f"broker: wrong type of reply to RegisterProducer (got {type(reply).__name__})")
        return reply

    def renew(self) -> None:
        """Replace the session, which has no unacked groups, by a new one; `on_registered` is called then."""
        self._session.forget()
        self._asked_anew = True
        self.ask()

    def ask(self) -> None:
        """Sync soon, whether the session requires it or not."""
        self._asks = True
        self._look.set()

    async def run(self) -> None:
        """Listen, transmit and keep until cancelled; reconnect automatically.

        Raises:
            SessionFencedError: A newer session took over.
            RefusedError: The broker does not accept the session any more.
        """
        while not self.leaving:
            if self._sockets is None:
                await self.connect()
            try:
                await self._work_on()
            except* (_Lost, BrokerUnavailableError) as lost:
                if self._asked_anew:
                    logger.info("opening a new session producer=%s", self._session.register.producer)
                else:
                    logger.warning("broker lost, reconnecting error=%s", lost.exceptions[0])
                self._asked_anew = False
                if any(type(error) is _Lost for error in lost.exceptions):
                    await self._disconnect()
                self._loosen()
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
                self.ask()
            else:
                self._on_accepted(self._session.acked(ack, time.monotonic()))

    async def _transmit(self, sockets: _Sockets) -> None:
        while True:
            self._work.clear()
            entries = self._session.unsent(self.max_group_bytes)
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

    def fills_turn(self, nbytes: int) -> bool:
        """Note a group that leaves in the loop's next turn; return whether the caller must yield to the loop now.

        Acks must be received and other tasks must run, but a turn of the loop costs as much as a small group. Groups of
        one turn share a message.
        """
        now = time.monotonic()
        if not self._turn_groups:
            self._turn_at = now
        self._turn_groups += 1
        self._turn_bytes += nbytes
        due = (
            self._turn_groups >= PACK_GROUPS
            or self._turn_bytes >= TURN_BYTES
            or now - self._turn_at >= TURN_S
        )
        if due:
            self.send()
        return due

    def send_arrived(self) -> bool:
        """Send a group that has just come into the spool: in the loop's next turn, or at once; return which.

        At once if all before it are acked, because others may not follow.
        """
        if self._soon:
            return False
        if len(self._session.spool) > 1:
            self.send_soon()
            return False
        self.send()
        return True

    def send_soon(self) -> None:
        """Send in the loop's next turn, together with the groups that arrive until then. Never waits."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self.send)

    def send(self) -> None:
        """Send the groups that can be sent now; `transmit` sends the rest. Never waits."""
        self._soon = False
        self._turn_groups = self._turn_bytes = 0
        if self._sockets is None:
            return
        session = self._session
        for _ in range(BURST):
            if not session.spool.has_unsent or not (entries := session.unsent(self.max_group_bytes)):
                return
            if entries[0].header.table not in session.declared or not self._send(self._sockets.push, entries):
                break
        self._work.set()

    def _send(self, push: Channel, entries: list[SpoolEntry]) -> bool:
        frames, entries = self._session.message(entries)
        if not push.try_send(frames, copy=len(frames) == 1):
            return False
        now = time.monotonic()
        self._session.spool.sent(entries, now)
        return True

    async def _keep(self, client: BrokerClient) -> None:
        ticks = _Ticks.here()
        ticks.begin(self._tick)
        try:
            self._tick()
            while True:
                await self._look.wait()
                self._look.clear()
                if self._asks or self._must_ask():
                    self._asks = False
                    if not self._session.number:
                        raise _Forgotten("a new session is needed")
                    async with self._turn:
                        await self._sync(client)
        finally:
            ticks.end(self._tick)

    def _tick(self) -> None:
        """Check the session regularly."""
        if self._session.arena is not None:
            self._session.arena.trim(time.monotonic())
        if self._must_ask():
            self._look.set()
        self.on_tick()

    def _must_ask(self) -> bool:
        return self._session.must_ask(time.monotonic(), self._waiting())

    async def _sync(self, client: BrokerClient) -> None:
        asked = self._session.ask(time.monotonic())
        reply = await self._granted(client, asked)
        if not isinstance(reply, Ack):
            raise WireError(f"broker: wrong type of reply to Sync (got {type(reply).__name__})")
        if reply.epoch != self._session.epoch:
            raise _Forgotten("the broker restarted")
        accepted, again = self._session.synced(reply, asked, time.monotonic())
        if again:
            logger.warning("resending groups=%d first=%s", len(again), again[0].header.group_id)
        self._on_accepted(accepted)
        if self._session.pipe_is_dead(reply, time.monotonic()):
            raise _Lost(
                f"the broker answers, but no group reaches {self._ingest}: another connection is tried"
            )

    async def _granted(self, client: BrokerClient, message: Request) -> Reply:
        """Send a request; a broker that does not know the session counts as restarted."""
        try:
            return (await insist(client, message, self._session.epoch, PATIENCE_S, REPEAT_S))[0]
        except RefusedError as error:
            if error.code is not ErrorCode.UNKNOWN:
                raise
            self._session.epoch = 0
            raise _Forgotten("the broker does not know the session") from None

    async def goodbye(self, timeout_s: float) -> None:
        """End the session at the broker, if it answers in time."""
        if self._sockets is None:
            return
        try:
            await self._sockets.client.request(self._session.goodbye(), timeout_s, REPEAT_S)
        except RolloutMQError as error:
            logger.warning("goodbye failed producer=%s error=%s", self._session.register.producer, error)

    def _loosen(self) -> None:
        """End the use of the sockets, and keep them for the next connection."""
        if self._sockets is not None:
            self._sockets, self._loose = None, self._sockets

    async def _disconnect(self) -> None:
        self._loosen()
        sockets, self._loose = self._loose, None
        if sockets is not None:
            sockets.close_others()
            await sockets.client.close()

    async def close(self) -> None:
        """Close the sockets, and the arena for processes that have not mapped it. `run` has ended before."""
        await self._disconnect()
        self._session.offer(None, "closed")
        shared.give_back(self._context)


def cause(error: Exception) -> Exception:
    """Return the first error that is not an ExceptionGroup."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
