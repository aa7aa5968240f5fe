"""A scripted broker, for faults that a real one does not show on demand."""

import asyncio
import errno
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.encoding.codec import encode_group, encode_tables
from rolloutmq.bus.producer.spool import Spool
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.sockets import Channel
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import ErrorCode, GroupHeader, PolicyVersion
from rolloutmq.schemas.wire.replies import (
    Ack,
    Batch,
    ConsumerRegistered,
    Delivery,
    Durability,
    ErrorReply,
    InfoReply,
    NoBatch,
    Ok,
    Registered,
    Reply,
    RunInfo,
    Settled,
    Wait,
)
from rolloutmq.schemas.wire.requests import (
    Commit,
    ConsumerBeat,
    DeclareTables,
    GetInfo,
    Goodbye,
    Pull,
    RegisterConsumer,
    RegisterProducer,
    Release,
    Request,
    Settle,
    Sync,
)

FRAME_LIMIT = 1 << 20
V0 = PolicyVersion(3, 10)
V1 = PolicyVersion(3, 11)
Answer = Reply | tuple[Reply, list[Any]] | None
"""A reply, a reply with frames, or silence."""


@contextmanager
def heard_by_nobody() -> Iterator[None]:
    """Let a reply go to a client that replaced its socket meanwhile, as the broker does."""
    try:
        yield
    except zmq.ZMQError as error:
        if error.errno != errno.EHOSTUNREACH:
            raise


class FakeBroker:
    """Accepts every group by default; runs in the loop of the test."""

    def __init__(self, run_dir: Path) -> None:
        self.layout = RunLayout(run_dir)
        self.epoch = 1
        self.sessions = 0
        self.session = 0
        self.idle: dict[int, dict[int, GroupHeader]] = {}
        """What was accepted in the sessions before the present one."""
        self.lives = 0
        """Generations of consumers that were given."""
        self.generations: dict[str, int] = {}
        """Of the consumers that are known."""
        self.keys: set[str] = set()
        """Attempts to register that consumers have made."""
        self.policy = PolicyVersion()
        self.reading = asyncio.Event()
        """Whether `ingest` is read."""
        self.reading.set()
        self.hwm = sockets.BULK_HWM
        """Messages that the library takes in while `ingest` is not read."""
        self.start_limit = 1 << 30
        self.byte_limit = 1 << 40
        self.max_group_bytes = 1 << 20
        self.draining = False
        self.publishes = True
        """Whether acks are published."""
        self.lose: set[int] = set()
        """Numbers of groups that vanish once."""
        self.syncs = True
        """Whether Sync is answered; without an answer, no producer learns what was lost, however slow the machine."""
        self.accepted: dict[int, GroupHeader] = {}
        self.frames: dict[str, list[bytes]] = {}
        self.messages: list[int] = []
        """How many groups came in each message."""
        self.arena_bytes = 0
        """Size of an arena; it is not read."""
        self.taken: Counter[str] = Counter()
        """How many times each group was accepted, by id."""
        self.arrived: list[int] = []
        self.asked: list[Request] = []
        self.answers: dict[type, Callable[[Any], Answer]] = {}
        """Answers other than the ordinary ones, by type of request."""
        self.changed = asyncio.Condition()

    def ack(self) -> Ack:
        cumulative = 0
        while cumulative + 1 in self.accepted:
            cumulative += 1
        bits = sum(1 << (seq - cumulative - 2) for seq in self.accepted if seq > cumulative)
        return Ack(
            epoch=self.epoch,
            session=self.session,
            cumulative=cumulative,
            gaps=bits.to_bytes((bits.bit_length() + 7) // 8, "little"),
            byte_limit=self.byte_limit,
            start_limit=self.start_limit,
            policy=self.policy,
            draining=self.draining,
            durability=Durability.OS,
            arena=self.arena_bytes > 0,
        )

    @asynccontextmanager
    async def running(self, name: str = "a") -> AsyncIterator["FakeBroker"]:
        """Bind at addresses that carry `name`, say so in `endpoints.json`, and serve."""
        places = {s: f"ipc://{self.layout.root}/{name}.{s}" for s in ("ingest", "serve", "events")}
        context = sockets.make_context()
        made = {
            "ingest": sockets.ingest_pull(context, FRAME_LIMIT),
            "serve": sockets.serve_router(context, FRAME_LIMIT),
            "events": sockets.events_xpub(context),
        }
        made["ingest"].rcvhwm = self.hwm
        for socket, at in zip(made.values(), places.values(), strict=True):
            socket.linger = 0
            socket.bind(at)
        channels = {name: Channel(socket) for name, socket in made.items()}
        self.events = channels["events"]
        self.places = Endpoints(
            ingest=places["ingest"],
            serve=places["serve"],
            events=places["events"],
            publish="ipc://none",
            pid=1,
            epoch=self.epoch,
        )
        self.layout.endpoints.write_bytes(msgspec.json.encode(self.places))
        tasks = [
            asyncio.create_task(self._ingest(channels["ingest"])),
            asyncio.create_task(self._serve(channels["serve"])),
        ]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for channel in channels.values():
                channel.close()
            context.term()
            self.layout.endpoints.unlink()
            for end in ends:
                if not isinstance(end, asyncio.CancelledError):
                    raise end or AssertionError("the broker ended")

    def new_life(self) -> None:
        """Forget everything, as a broker without a journal does."""
        self.epoch += 1
        self.session = 0
        self.accepted.clear()
        self.idle.clear()
        self.generations.clear()

    def restart(self) -> None:
        """Begin another life that remembers the one before, as a broker with a journal does."""
        self.epoch += 1

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until something that arrives makes the condition true."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    def asked_for(self, kind: type) -> list[Any]:
        return [request for request in self.asked if isinstance(request, kind)]

    async def _ingest(self, channel: Channel) -> None:
        while True:
            await self.reading.wait()
            frames = await channel.receive()
            sizes = [len(frame) for frame in frames[1:]]
            envelope = codec.decode_envelope(frames[0], len(sizes), sum(sizes))
            self.messages.append(len(envelope.groups))
            for header in envelope.groups:
                self._take(header, frames[1:], current=envelope.session == self.session)
            await self._notify()

    def _take(self, header: GroupHeader, frames: list[bytes], *, current: bool) -> None:
        self.arrived.append(header.seq)
        if header.seq in self.lose:
            self.lose.discard(header.seq)
        elif current:
            self.taken[header.group_id] += header.seq not in self.accepted
            self.accepted[header.seq] = header
            self.frames[header.group_id] = frames
            self.publish()

    def publish(self, ack: Ack | None = None) -> None:
        """Publish an ack, the true one by default."""
        if self.publishes:
            published = ack or self.ack()
            self.events.try_send([topics.ack("p"), codec.encode(published)])

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _serve(self, channel: Channel) -> None:
        while True:
            *route, asked = await channel.receive()
            request = codec.decode_request(asked)
            self.asked.append(request)
            if isinstance(request, Sync) and not self.syncs:
                await self._notify()
                continue
            answer = self.answers.get(type(request), self._answer)(request)
            if answer is not None:
                reply, frames = answer if isinstance(answer, tuple) else (answer, [])
                with heard_by_nobody():
                    channel.try_send([*route, codec.encode(reply), *frames])
            await self._notify()

    def _open(self, resume: int) -> None:
        """Make the session to resume the present one, or a new one if it is not known."""
        if self.session and resume == self.session:
            return
        self.idle[self.session] = dict(self.accepted)
        known = self.idle.pop(resume, None) if resume else None
        self.sessions += known is None
        self.session = self.sessions if known is None else resume
        self.accepted = known or {}

    def _answer(self, request: Request) -> Answer:
        match request:
            case GetInfo():
                at = self.places
                return InfoReply(
                    epoch=self.epoch,
                    info=RunInfo(run="default"),
                    ingest=at.ingest,
                    events=at.events,
                    publish=at.publish,
                    max_group_bytes=self.max_group_bytes,
                    arena_bytes=self.arena_bytes,
                )
            case RegisterProducer():
                self._open(request.resume_session)
                return Registered(ack=self.ack(), info=RunInfo(run="default", total_steps=7))
            case DeclareTables() | Sync() | Goodbye() if request.session != self.session:
                known = 0 < request.session <= self.sessions and self.session
                return ErrorReply(code=ErrorCode.FENCED if known else ErrorCode.UNKNOWN)
            case Sync():
                return self.ack()
            case RegisterConsumer():
                known = self.generations.get(request.consumer, 0)
                if not known or (request.generation != known and request.key not in self.keys):
                    self.lives += 1
                    known = self.generations[request.consumer] = self.lives
                self.keys.add(request.key)
                return ConsumerRegistered(epoch=self.epoch, generation=known, info=request.info)
            case Pull() | ConsumerBeat() | Release() | Commit() if request.consumer not in self.generations:
                return ErrorReply(code=ErrorCode.UNKNOWN)
            case Pull():
                return NoBatch(wait=Wait.NO_BATCH, queued_sequences=0)
            case Settle():
                return Settled(step=request.version.step)
            case DeclareTables() | Goodbye() | ConsumerBeat() | Release() | Commit():
                return Ok()
            case _:
                raise AssertionError(request)


def leased(groups: list[Group], lease: int = 1, spoil: tuple[str, ...] = (), **more: Any) -> Answer:
    """A batch of these groups; those in `spoil` arrive damaged."""
    spool, frames, deliveries, tables = Spool(1 << 30), [], [], {}
    for group in groups:
        encoded = encode_group(group, 1 << 24)
        header = spool.add(group, encoded).header
        own = [bytes(frame) for frame in encoded.frames]
        if group.group_id in spoil:
            own[0] = bytes([own[0][0] ^ 1]) + own[0][1:]
        deliveries.append(Delivery(header=header, env="e", producer="p", session=1))
        frames += own
        tables[encoded.table.id] = encoded.table
    return (
        Batch(
            lease=lease,
            generation=4,
            step=more.pop("step", 11),
            groups=tuple(deliveries),
            tables=encode_tables(tuple(tables.values())),
            **more,
        ),
        frames,
    )


def answers(*replies: Answer) -> Callable[[Pull], Answer]:
    left = deque(replies)
    return lambda _: left.popleft() if left else NoBatch(wait=Wait.MIN_SHARE, queued_sequences=0)
