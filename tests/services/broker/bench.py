"""A test bench: a broker core with a clock of its own, and peers with the shortest valid messages."""

from collections.abc import Iterable
from itertools import count
from typing import Any, TypeVar

from msgspec.structs import replace

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import DroppedGroup, SettledBatch
from rolloutmq.schemas.wire.control import GetStatus, Pressure, StatusReply
from rolloutmq.schemas.wire.envelope import (
    ColumnSpec,
    ColumnTable,
    Dtype,
    Envelope,
    ErrorCode,
    GroupHeader,
    PolicyVersion,
    RewardSummary,
    Split,
)
from rolloutmq.schemas.wire.replies import (
    Ack,
    Batch,
    ConsumerRegistered,
    ErrorReply,
    NoBatch,
    Ok,
    Registered,
    Settled,
)
from rolloutmq.schemas.wire.requests import (
    ConsumerBeat,
    DeclareTables,
    Pull,
    RegisterConsumer,
    RegisterProducer,
    Request,
    Settle,
    Sync,
)
from rolloutmq.services.broker.actions import Action, Dropped, Expired, Publish, Recorded, Reply
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    ConsumerSnapshot,
    Event,
    GroupSnapshot,
    LaneSnapshot,
    RetainedBatchSnapshot,
    RunSnapshot,
    SessionSnapshot,
    Table,
    Told,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent, decode_events, encode
from rolloutmq.services.broker.journal.stored_group import Frames, GroupBody, StoredGroup

TABLE = ColumnTable((ColumnSpec("tokens", Dtype.I32, 1), ColumnSpec("scores", Dtype.F64, 0)))
WALL = 1_700_000_000.0
SHADOWED_EVENTS = 150
"""Beyond this many events, a restart is no longer tried after every step."""
M = TypeVar("M")


def config(
    *,
    broker: dict[str, Any] | None = None,
    batch: int = 8,
    trainer: dict[str, Any] | None = None,
    **environments: dict[str, Any],
) -> RunConfig:
    """Return a configuration; environments are given by name, with `entry` filled in. Pacing is off by default."""
    usual = {"entry": "a:B", "group_size": 4, "pacing": False}
    return RunConfig.model_validate(
        {
            "broker": broker or {},
            "trainer": {"batch_sequences": batch, **(trainer or {})},
            "environment": {name: {**usual, **given} for name, given in environments.items()},
            "orchestrator": {"enabled": False},
        }
    )


def bodies(group_id: str, frames: int) -> list[bytes]:
    """Return the frames of a group."""
    return [f"{group_id}/{i}".encode() for i in range(frames)]


def header(
    seq: int,
    position: int,
    *,
    nbytes: int = 100,
    sequences: int = 4,
    step: int = 0,
    group_id: str = "",
    tokens: int = 0,
    frames: int = 1,
    crc: int | None = None,
    started_at: float = 0.0,
    finished_at: float = 0.0,
    rewards: RewardSummary | None = None,
) -> GroupHeader:
    version = PolicyVersion(0, step)
    group_id = group_id or f"g{seq}"
    return GroupHeader(
        seq=seq,
        position=position,
        group_id=group_id,
        table=TABLE.id,
        frames=frames,
        nbytes=nbytes,
        crc=checksum(bodies(group_id, frames)) if crc is None else crc,
        sequences=sequences,
        tokens=tokens or sequences * 10,
        oldest=version,
        newest=version,
        started_at=started_at,
        finished_at=finished_at,
        rewards=right(seq % 3 * sequences // 3, sequences) if rewards is None else rewards,
    )


def right(count: int, sequences: int) -> RewardSummary:
    """Return the summary of a group in which so many sequences have score 1, and the others 0."""
    mean = count / sequences
    return RewardSummary(mean, float(count == sequences), float(count > 0), count * (1 - mean))


def stored(order: int, sequences: int = 4, *, tokens: int = 0, env: str = "e") -> StoredGroup:
    return StoredGroup(
        header=header(order, order * 100, sequences=sequences, tokens=tokens),
        env=env,
        split=Split.TRAIN,
        run="run",
        producer="p",
        session=1,
        table=TABLE,
        body=GroupBody((b"",), 100),
        accepted_at=0.0,
        accepted_wall=WALL,
        order=order,
    )


class Peer:
    """A producer that numbers its groups."""

    def __init__(self, bench: "Bench", name: str, env: str, split: Split, ack: Ack) -> None:
        self.bench = bench
        self.name = name
        self.env = env
        self.split = split
        self.session = ack.session
        self.seq = 0
        self.position = 0

    def next(self, **given: Any) -> GroupHeader:
        """Number one more group."""
        self.seq += 1
        self.position += given.setdefault("nbytes", 100)
        given.setdefault("group_id", f"{self.name}-{self.session}-{self.seq}")
        return header(self.seq, self.position, **given)

    def deliver(self, head: GroupHeader, **changed: Any) -> list[Action]:
        """Send a group, with or without credit."""
        envelope = Envelope(
            version=1,
            producer=changed.get("producer", self.name),
            session=changed.get("session", self.session),
            run=changed.get("run", "default"),
            env=changed.get("env", self.env),
            split=self.split,
            groups=(head,),
        )
        return self.bench.ingest(envelope, changed.get("frames", bodies(head.group_id, head.frames)))

    def send(self, groups: int = 1, **given: Any) -> list[str]:
        """Send new groups; return their ids."""
        heads = [self.next(**given) for _ in range(groups)]
        for head in heads:
            self.deliver(head)
        return [head.group_id for head in heads]

    def sync(self, abandoned: int = 0, *, begun: int = 0, paused: bool = False) -> Ack:
        request = Sync(
            producer=self.name, session=self.session, abandoned=abandoned, begun=begun, paused=paused
        )
        return self.bench.ask(request, Ack)


class MemoryJournal:
    """A journal in memory: a snapshot, the events after it, and every body."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.bodies: dict[int, Frames] = {}

    def write(self, entries: Iterable[StoredGroup | Event]) -> None:
        for entry in entries:
            if isinstance(entry, StoredGroup):
                if entry.body.load():
                    self.bodies[entry.order] = entry.body.own_frames
                self.events.append(entry.accepted())
            else:
                self.events.append(entry)

    def body(self, event: Accepted) -> GroupBody:
        return GroupBody(self.bodies.get(event.order), event.header.nbytes)

    def table(self, _: Accepted) -> None:
        """Return None: the events declare every table."""

    def read(self) -> list[AnyEvent]:
        """Return the events, encoded and decoded once."""
        return list(decode_events(encode(self.events)))


class Bench:
    """A core under test. Every step is followed by `validate`."""

    def __init__(self, settings: RunConfig | None = None, epoch: int = 1) -> None:
        self.settings = settings or config(e={})
        self.core = BrokerCore(self.settings, epoch=epoch)
        self.journal = MemoryJournal()
        self.shadowed = True
        """Whether each step is compared with the state after a restart."""
        self.now = 100.0
        self.dropped: list[DroppedGroup] = []
        self.expired: list[Expired] = []
        self.settled_lines: list[SettledBatch] = []
        """Lines of `settled.jsonl`."""
        self.published: list[Publish] = []
        self.late: list[Reply] = []
        """Replies to pulls that had to wait."""
        self._requests = count()

    def _done(self, actions: list[Action]) -> list[Action]:
        self.core.validate()
        entries = self.core.events()
        self.journal.write(entries)
        if self.shadowed and entries and len(self.journal.events) < SHADOWED_EVENTS:
            self.compare(self.reborn())
        for action in actions:
            if isinstance(action, Dropped):
                self.dropped.append(action.record)
            if isinstance(action, Recorded):
                self.settled_lines.append(action.record)
            if isinstance(action, Expired):
                self.expired.append(action)
            elif isinstance(action, Publish):
                self.published.append(action)
        return actions

    def reborn(self, settings: RunConfig | None = None) -> "Bench":
        """Return the next life of this broker, as after a kill now."""
        later = Bench(settings or self.settings, epoch=self.core._state.epoch + 1)
        later.now, later.journal, later.shadowed = self.now, type(self.journal)(), self.shadowed
        later._requests = self._requests
        problems = later.core.restore(self.journal.read(), self.journal, self.now, WALL)
        assert not problems, problems
        later.core.validate()
        later.journal.events = [
            item[0] if isinstance(item, tuple) else item for item in later.core.snapshot()
        ]
        later.journal.bodies = self.journal.bodies
        return later

    def restart(self) -> None:
        """Kill the broker and start it again; this bench goes on with its next life."""
        later = self.reborn()
        self.core, self.journal = later.core, later.journal

    def order(self, group_id: str) -> int:
        """Return the order of a group that still exists."""
        groups = (item[0].accepted for item in self.core.snapshot() if isinstance(item, tuple))
        return next(group.order for group in groups if group.header.group_id == group_id)

    def waiting(self) -> list[str]:
        """Return the ids of all groups queued, leased or rewound, in the order of acceptance."""
        kept: set[int] = set()
        found: dict[int, str] = {}
        for item in self.core.snapshot():
            if isinstance(item, tuple):
                found[item[0].accepted.order] = item[0].accepted.header.group_id
            elif isinstance(item, RetainedBatchSnapshot):
                kept.update(order for rank in item.shards for order in rank)
        return [name for order, name in sorted(found.items()) if order not in kept]

    def compare(self, later: "Bench") -> None:
        """Assert that a restart keeps the durable state, twice over."""
        now = lasting(self)
        for restored in (lasting(later), lasting(later.reborn())):
            made_up = [item for item in restored if item not in now]
            forgotten = [item for item in now if item not in restored]
            assert (made_up, forgotten) == ([], []), (made_up, forgotten)

    def ingest(self, envelope: Envelope, frames: list[bytes]) -> list[Action]:
        actions = self._done(self.core.ingest(envelope, frames, self.now, WALL))
        self.late += [action for action in actions if isinstance(action, Reply)]
        return actions

    def tick(self, after: float = 0.0) -> list[Action]:
        """Let time pass, then tick."""
        self.now += after
        actions = self._done(self.core.tick(self.now, WALL))
        self.late += [action for action in actions if isinstance(action, Reply)]
        return actions

    def send(self, request: Request, route: tuple[bytes, ...] = ()) -> list[Reply]:
        """Make a request; return every reply it caused."""
        actions = self._done(self.core.request(route, request, self.now, WALL))
        return [action for action in actions if isinstance(action, Reply)]

    def ask(self, request: Request, kind: type[M]) -> M:
        """Make a request with an immediate reply, and check the kind of the reply."""
        route = (b"ask %d" % next(self._requests),)
        replies = self.send(request, route)
        self.late += [reply for reply in replies if reply.route != route]
        (mine,) = [reply for reply in replies if reply.route == route]
        assert isinstance(mine.message, kind), mine.message
        return mine.message

    def refused(self, request: Request) -> ErrorCode:
        return self.ask(request, ErrorReply).code

    def producer(self, name: str = "p", env: str = "e", split: Split = Split.TRAIN, **given: Any) -> Peer:
        """Register a producer and declare its table."""
        given.setdefault("group_size", 4)
        request = RegisterProducer(producer=name, env=env, split=split, **given)
        peer = Peer(self, name, env, split, self.ask(request, Registered).ack)
        self.ask(DeclareTables(producer=name, session=peer.session, tables=(TABLE,)), Ok)
        return peer

    def consumer(self, name: str = "c", **given: Any) -> int:
        """Register a consumer; returns its generation."""
        return self.ask(RegisterConsumer(consumer=name, **given), ConsumerRegistered).generation

    def pull(self, step: int = 0, sequences: int = 8, **given: Any) -> Batch | NoBatch | ErrorReply:
        """Pull without waiting."""
        given.setdefault("consumer", "c")
        given.setdefault("version", PolicyVersion(0, step))
        given.setdefault("request_id", f"r{next(self._requests)}")
        given.setdefault("wait_s", 0.0)
        route = (b"pull",)
        replies = self.send(Pull(step=step, sequences=0 if "tokens" in given else sequences, **given), route)
        (mine,) = [reply for reply in replies if reply.route == route]
        assert isinstance(mine.message, Batch | NoBatch | ErrorReply)
        if isinstance(mine.message, Batch):
            assert len(mine.frames) == sum(d.header.frames for d in mine.message.groups)
        return mine.message

    def batch(self, step: int = 0, sequences: int = 8, **given: Any) -> Batch:
        """Pull a batch that must be there."""
        got = self.pull(step, sequences, **given)
        assert isinstance(got, Batch), got
        return got

    def wait(self, step: int = 0, sequences: int = 8, **given: Any) -> list[Reply]:
        """Pull and wait for a long time; return the immediate replies."""
        return self._wait(Pull(**_pull(step, sequences, next(self._requests), given)))

    def _wait(self, pull: Pull) -> list[Reply]:
        return self.send(pull, (b"wait", pull.request_id.encode()))

    def settle(self, batch: Batch, *, no_signal: bool = False, **given: Any) -> Settled:
        """Settle a whole shard as trained, or as filtered without a step."""
        given.setdefault("consumer", "c")
        given.setdefault("version", PolicyVersion(0, batch.step + (not no_signal)))
        given.setdefault("filtered" if no_signal else "trained", ids(batch))
        request = Settle(lease=batch.lease, generation=batch.generation, **given)
        return self.ask(request, Settled)

    def train(self, step: int, sequences: int = 8) -> list[str]:
        """Pull and settle one step; returns the ids."""
        batch = self.batch(step, sequences)
        self.settle(batch)
        return list(ids(batch))

    def send_beat(self, consumer: str = "c") -> None:
        """Let a consumer show that it lives, without progress."""
        self.ask(ConsumerBeat(consumer=consumer), Ok)

    def pressure(self) -> Pressure:
        return self.status().pressure

    def status(self) -> StatusReply:
        return self.ask(GetStatus(), StatusReply)


def lasting(bench: Bench) -> list[Event]:
    """Return the state of a core without the parts a restart may forget."""
    found: list[Event] = []
    for item in bench.core.snapshot():
        match item:
            case (GroupSnapshot() as group, GroupBody()):
                found.append(group)
            case LaneSnapshot():
                found.append(replace(item, carry=0.0))
            case SessionSnapshot():
                found.append(replace(item, abandoned=0, draining=False))
            case RunSnapshot():
                found.append(replace(item, pulled=0, pulled_tokens=0, recent=(), resumed=()))
            case ConsumerSnapshot() | Table() | Told():
                continue
            case Event():
                found.append(item)
    return found


def _pull(step: int, sequences: int, number: int, given: dict[str, Any]) -> dict[str, Any]:
    usual = {
        "consumer": "c",
        "version": PolicyVersion(0, step),
        "request_id": f"r{number}",
        "wait_s": 60.0,
    }
    return {"step": step, "sequences": 0 if "tokens" in given else sequences, **usual, **given}


def ids(batch: Batch) -> tuple[str, ...]:
    return tuple(delivery.header.group_id for delivery in batch.groups)
