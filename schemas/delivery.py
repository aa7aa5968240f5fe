"""Requests and replies of the `serve` socket, and the ack that carries a producer's credit.

Every request is one msgpack frame and gets exactly one reply; `Batch` alone is followed by the frames of its groups.
Requests may be repeated: registering, syncing, pulling with the same `request_id` and settling the same lease again
give the same answer and change nothing.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from rolloutmq.schemas.control import ControlReply, ControlRequest
from rolloutmq.schemas.envelope import (
    ArenaRef,
    ColumnTable,
    Count,
    GroupHeader,
    GroupId,
    Name,
    PolicyVersion,
    Split,
)
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.schemas.message import Message
from rolloutmq.schemas.tasks import TaskReply, TaskRequest

GAP_WINDOW = 1024
"""Sequence numbers above the cumulative one that a broker remembers; beyond it a group is refused."""


RANKS_LIMIT = 4096
"""Most data-parallel ranks of one trainer; sharding a step takes time for each of them."""


class Durability(StrEnum):
    """What an ack, a batch and a settlement survive."""

    MEMORY = "memory"
    """Nothing: they are gone with the broker's process, unless it ends in order."""
    OS = "os"
    """The broker being killed; a power cut or a crash of the machine may lose the last of them."""
    DISK = "disk"
    """A power cut, too: what was said is on disk before it is said."""


class Wait(StrEnum):
    """Why somebody waits. Producers wait for credit, trainers for a batch."""

    NONE = "none"
    LANE_FULL = "lane_full"
    GLOBAL_FULL = "global_full"
    NO_CREDIT = "no_credit"
    STALE_GUARD = "stale_guard"
    """One rollout more would be too old when its turn comes."""
    NO_BATCH = "no_batch"
    """Fewer sequences are queued than a batch has."""
    NO_EXACT_FIT = "no_exact_fit"
    """Enough sequences are queued, but no combination of whole groups has the number."""
    MIN_SHARE = "min_share"
    BATCH_EXCEEDS_CAP = "batch_exceeds_cap"
    JOURNAL_SLOW = "journal_slow"
    """The disk does not keep up, or is full."""
    LEASED_ELSEWHERE = "leased_elsewhere"
    """Another step of this consumer group is still leased."""
    TOO_FEW_GROUPS = "too_few_groups"
    """A batch is queued, but of fewer groups than there are ranks, and groups are never cut."""
    END_OF_REPLAY = "end_of_replay"
    """Every recorded batch was served; there will never be another one."""


class Ack(Message, tag="ack", frozen=True, kw_only=True):
    """What the broker has of one session, and how far the session may go: absolute state, safe to repeat.

    Attributes:
        epoch: The broker's life; a new one means that the producer must sync.
        session: The session this is about.
        cumulative: Every group up to this number is accepted.
        gaps: Bit `i` (least significant first) is set if number `cumulative + 2 + i` is accepted too.
        byte_limit: Highest `GroupHeader.position` that will be accepted.
        start_limit: How many rollouts the session may have begun in all, abandoned ones included.
        policy: The trainer's present policy: what is sampled from now on comes from it or from a later one.
        draining: The producer must begin nothing new.
        wait: What holds the credit back, if anything does.
        durability: What the acceptance of the groups survives.
        released: Every group up to this number is accepted, and its bytes in the session's arena are needed no more.
        arena: The arena of the registration is read; where it is not, groups must come as frames.
    """

    epoch: Count
    session: Count
    cumulative: Count
    gaps: bytes = b""
    byte_limit: Count
    start_limit: Count
    policy: PolicyVersion = PolicyVersion()
    draining: bool = False
    wait: Wait = Wait.NONE
    durability: Durability = Durability.MEMORY
    released: Count = 0
    arena: bool = False


class RunInfo(Message, tag="run_info", frozen=True, kw_only=True):
    """What a run is, as its trainer registered it. Zero and empty mean: not told yet."""

    run: Name = "default"
    tracking_project: str = ""
    tracking_group: str = ""
    batch_sequences: Count = 0
    max_tokens: Count = 0
    """Longest sequence that the trainer takes, in tokens; 0 is no limit."""
    checkpoint_dir: str = ""
    checkpoint_interval: Count = 0
    starting_step: Count = 0
    total_steps: Count = 0
    started: bool = False
    """A trainer has registered."""


class RegisterProducer(Message, tag="register_producer", frozen=True, kw_only=True):
    """Open a session. An older session of the same producer is fenced.

    Attributes:
        producer: Name of the producer; one session of it lives at a time.
        slots: Rollouts that it would like to have under way at once.
        group_size: Sequences that its groups usually have.
        weight: Share of batches that the environment gets, relative to the others.
        min_share: Part of every batch that is kept for the environment, 0 to 1.
        max_tokens: Longest sequence that it produces, in tokens.
        resume_session: A saved session whose unacked groups will be sent again.
        begun, abandoned: Rollouts of that session that were begun, and those of them that came to nothing.
        pid, host: For people and for the orchestrator.
        key: Names one attempt to open a session: the same again gets the same session, and no second one.
        key: Names one attempt to register: the same again has the same session, and opens no second one.
        arena: Memory that the groups of the session may lie in, if the broker is on the same host.
    """

    producer: Name
    run: Name = "default"
    env: Name
    split: Split = Split.TRAIN
    slots: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    group_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    weight: Annotated[float, Meta(ge=0.0)] = 1.0
    min_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    max_tokens: Count = 0
    resume_session: Count = 0
    begun: Count = 0
    abandoned: Count = 0
    pid: Count = 0
    host: str = ""
    key: Annotated[str, Meta(max_length=32)] = ""
    arena: ArenaRef | None = None


class Registered(Message, tag="registered", frozen=True, kw_only=True):
    """A session was opened."""

    ack: Ack
    info: RunInfo


class DeclareTables(Message, tag="declare_tables", frozen=True, kw_only=True):
    """Make column tables known to the broker; a group may name only a declared one."""

    producer: Name
    session: Count
    tables: Annotated[tuple[ColumnTable, ...], Meta(max_length=64)]


class Sync(Message, tag="sync", frozen=True, kw_only=True):
    """Ask for the present ack; tells how many rollouts were begun and given up. Answered by `Ack`."""

    producer: Name
    session: Count
    abandoned: Count = 0


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """Close the session; what it had not got accepted is counted as lost before accept."""

    producer: Name
    session: Count
    produced: Count = 0
    abandoned: Count = 0


class RegisterConsumer(Message, tag="register_consumer", frozen=True, kw_only=True):
    """Join a consumer group. The same consumer registering again releases what it held.

    Attributes:
        generation: That of an earlier registration of this same process. If the broker still knows it, everything
            stays as it is and the answer has the same generation: it was only the broker that was away.
        resume: Set by a trainer that starts at a checkpoint: every batch that was settled for a later step, and
            every batch still leased, comes back in the same composition and order.
    """

    consumer: Name
    group: Name = "trainer"
    rank: Count = 0
    world_size: Annotated[int, Meta(ge=1, le=RANKS_LIMIT)] = 1
    info: RunInfo = RunInfo()
    generation: Count = 0
    resume: PolicyVersion | None = None


class ConsumerRegistered(Message, tag="consumer_registered", frozen=True, kw_only=True):
    """The consumer is known; `generation` fences what an earlier life of it may still say."""

    epoch: Count
    generation: Count
    info: RunInfo


class Pull(Message, tag="pull", frozen=True, kw_only=True):
    """Ask for this rank's part of one step; answered when there is a batch, or after `wait_s`.

    Attributes:
        step: The optimizer step that the batch is for. All ranks of a step share its lease.
        version: The policy that will learn from it, for staleness.
        sequences: Number of sequences of the whole step, over all ranks; 0 if `tokens` says how much.
        tokens: Most tokens of the whole step, over all ranks; 0 if `sequences` says how much.
        request_id: Chosen by the consumer; a repeated pull with the same id gets the same batch.
        wait_s: Longest time to wait, in seconds.
        split: Which stream.
        arenas: Groups may be told by where they lie in memory; otherwise all of them come as frames.
    """

    consumer: Name
    group: Name = "trainer"
    run: Name = "default"
    rank: Count = 0
    world_size: Annotated[int, Meta(ge=1, le=RANKS_LIMIT)] = 1
    step: Count
    version: PolicyVersion
    sequences: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    request_id: Annotated[str, Meta(min_length=1, max_length=64)]
    wait_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 10.0
    split: Split = Split.TRAIN
    arenas: bool = False


class Delivery(Message, tag="delivery", frozen=True, kw_only=True):
    """One group of a batch; the frames of those without a `place` follow the `Batch`, group after group."""

    header: GroupHeader
    env: Name
    producer: Name
    session: Count
    deliveries: Count = 1
    """How many times it has been handed out, this time included."""
    place: tuple[Count, Count] | None = None
    """Which of the batch's arenas its bytes lie in, and the offset there, for as long as the lease lasts."""


class Batch(Message, tag="batch", frozen=True, kw_only=True):
    """This rank's part of a leased step."""

    lease: Count
    generation: Count
    step: Count
    groups: tuple[Delivery, ...]
    tables: tuple[ColumnTable, ...]
    arenas: tuple[ArenaRef, ...] = ()
    """Descriptors of the broker, for each arena that a group of the batch lies in."""
    short: bool = False
    """Fewer sequences than asked: no combination of whole groups had the number in time."""
    over: bool = False
    """More than asked: a group that is above that by itself goes alone, and what comes again is never cut."""
    rewound: bool = False
    """The batch was trained before, in a life of the trainer that was lost; it comes again unchanged."""


class NoBatch(Message, tag="no_batch", frozen=True, kw_only=True):
    """No batch could be formed in the time given."""

    wait: Wait
    queued_sequences: Count


class Rejected(Message, tag="rejected", frozen=True, kw_only=True):
    """A group that the trainer could not use at all, with the reason."""

    group_id: GroupId
    reason: Annotated[str, Meta(max_length=512)]


class Settle(Message, tag="settle", frozen=True, kw_only=True):
    """End a lease after the optimizer step. Every group of the rank's part is in exactly one of the three lists.

    Attributes:
        version: Policy that exists after the step; equal to the pulled one if no step was taken.
        trained: Groups that the step learned from.
        filtered: Groups that teach nothing: without a signal (all rewards equal), or too old for the loss.
        rejected: Groups that could not be used; they go to the dead letters.
    """

    consumer: Name
    lease: Count
    generation: Count
    rank: Count = 0
    version: PolicyVersion
    trained: tuple[GroupId, ...] = ()
    filtered: tuple[GroupId, ...] = ()
    rejected: tuple[Rejected, ...] = ()


class Settled(Message, tag="settled", frozen=True, kw_only=True):
    """The lease is over. `commit_wanted` asks for a checkpoint soon: the broker holds much that is uncommitted."""

    step: Count
    commit_wanted: bool = False


class Commit(Message, tag="commit", frozen=True, kw_only=True):
    """A durable checkpoint covers every step up to and including `version.step`: its groups may be forgotten."""

    consumer: Name
    group: Name = "trainer"
    run: Name = "default"
    version: PolicyVersion


class Release(Message, tag="release", frozen=True, kw_only=True):
    """Give back whatever the consumer holds, at once; said by a consumer that stops."""

    consumer: Name
    reason: Annotated[str, Meta(max_length=512)] = ""


class ConsumerBeat(Message, tag="consumer_beat", frozen=True, kw_only=True):
    """The consumer lives; `progress` must grow, or a hung trainer would hold its lease for ever.

    `waits` are seconds spent, by reason, since the start.
    """

    consumer: Name
    progress: Count = 0


class GetInfo(Message, tag="get_info", frozen=True, kw_only=True):
    """Ask what the run is and where the broker's other sockets are."""


class InfoReply(Message, tag="info_reply", frozen=True, kw_only=True):
    """Answer to `GetInfo`. The addresses are those to connect to.

    `arena_bytes` is the size of an arena that a producer on the same host may offer; with 0 none is read.
    """

    epoch: Count
    info: RunInfo
    ingest: str
    events: str
    publish: str
    max_group_bytes: Count
    arena_bytes: Count = 0


class Ok(Message, tag="ok", frozen=True, kw_only=True):
    """Done; there is nothing to say."""


class ErrorReply(Message, tag="error", frozen=True, kw_only=True):
    """Not done."""

    code: ErrorCode
    detail: str = ""


Request = (
    RegisterProducer
    | DeclareTables
    | Sync
    | Goodbye
    | RegisterConsumer
    | Pull
    | Settle
    | Commit
    | Release
    | ConsumerBeat
    | GetInfo
    | ControlRequest
    | TaskRequest
)
Reply = (
    Registered
    | Ack
    | ConsumerRegistered
    | Batch
    | NoBatch
    | Settled
    | InfoReply
    | ControlReply
    | TaskReply
    | Ok
    | ErrorReply
)
