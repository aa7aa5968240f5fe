"""Replies of the `serve` socket, and the ack that carries a producer's credit.

Every reply is one msgpack frame; only a `Batch` is followed by the frames of its groups.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Raw

from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.control import ControlReply
from rolloutmq.schemas.wire.envelope import (
    ArenaRef,
    ColumnTable,
    Count,
    ErrorCode,
    GroupHeader,
    GroupId,
    KnownName,
    Message,
    Name,
    PolicyVersion,
    RunId,
)
from rolloutmq.schemas.wire.joining import JoiningReply
from rolloutmq.schemas.wire.tasks import TaskReply

Port = Annotated[int, Meta(ge=1, le=65535)]

EncodedTables = Annotated[Raw, Meta(extra={"encoded": tuple[ColumnTable, ...]})]
"""Column tables as msgpack. Batches of a run mostly have the same ones, and a reader decodes only others."""

GAP_WINDOW = 1024
"""Window of sequence numbers above the cumulative one; the broker refuses groups beyond it."""


class Durability(StrEnum):
    """What an ack, a batch and a settlement survive."""

    MEMORY = "memory"
    """Only an orderly end of the broker."""
    OS = "os"
    """A killed broker. A power cut or a crash of the machine may lose the most recent ones."""
    DISK = "disk"
    """A power cut: everything is on disk before it is acked."""


class Wait(StrEnum):
    """Reason of a wait. Producers wait for credit, trainers for a batch."""

    NONE = "none"
    LANE_FULL = "lane_full"
    """The environment is at its high-water mark."""
    GLOBAL_FULL = "global_full"
    """The broker has no free room below its high-water mark."""
    NO_CREDIT = "no_credit"
    """Other producers have been granted the free room."""
    STALE_GUARD = "stale_guard"
    """Another rollout would be too stale by the time it is trained on."""
    NO_TASKS = "no_tasks"
    """The producer waits for a submitted task."""
    NO_BATCH = "no_batch"
    """The queue has fewer sequences than a batch."""
    NO_EXACT_FIT = "no_exact_fit"
    """The queue has enough sequences, but no combination of whole groups has exactly that number."""
    MIN_SHARE = "min_share"
    """A minimum share reserves a part of the batch for an environment with too few groups."""
    BATCH_EXCEEDS_CAP = "batch_exceeds_cap"
    """The queue is full, nothing is leased, and it holds less than a batch."""
    JOURNAL_SLOW = "journal_slow"
    """The disk is too slow or full. A trainer's every wait for the write of what a reply reports counts."""
    LEASED_ELSEWHERE = "leased_elsewhere"
    """Another step of this consumer group is still leased."""
    STEP_MISMATCH = "step_mismatch"
    """The other ranks of this consumer group have settled the step."""
    UNSETTLED = "unsettled"
    """The groups that the consumer holds fill its window, the mark or the staleness bound: it must settle some."""
    TOO_FEW_GROUPS = "too_few_groups"
    """The queued batch has fewer groups than there are ranks, and groups are never cut."""
    END_OF_REPLAY = "end_of_replay"
    """Every recorded batch was delivered; no further one will come."""


class Ack(Message, tag="ack", frozen=True, kw_only=True):
    """Accepted groups and credit of one session, as absolute state: an ack may be repeated or lost.

    Attributes:
        epoch: Epoch of the broker; after a new one the producer must sync.
        session: Number of the session.
        cumulative: Every group up to this number is accepted.
        gaps: Bit `i` (least significant first) is set if number `cumulative + 2 + i` is accepted too.
        byte_limit: Highest accepted `GroupHeader.position`.
        start_limit: Number of rollouts that the session may have started in total, abandoned ones included.
        policy: Current policy of the trainer; later samples come from it or a newer one.
        draining: The producer must start no new rollout.
        wait: Limit of the credit; `none` if nothing does.
        durability: What the acceptance of a group survives.
        released: Every group up to this number is accepted, and its bytes in the session's arena may be reused.
        arena: The broker reads the arena of the registration; otherwise groups must be sent as frames.
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
    """Description of a run, from its trainer's registration. Zero and empty mean unknown.

    Attributes:
        run: Name of the run.
        tracking_project: Project of an experiment tracker.
        tracking_group: Group of an experiment tracker.
        batch_sequences: Sequences of one step.
        max_tokens: Longest sequence that the trainer accepts, in tokens; 0 is no limit.
        checkpoint_dir: Directory of the checkpoints.
        checkpoint_interval: Steps between checkpoints.
        starting_step: Optimizer step from which the trainer starts.
        total_steps: Optimizer steps of the run.
        started: A trainer has registered.
    """

    run: Name = "default"
    tracking_project: str = ""
    tracking_group: str = ""
    batch_sequences: Count = 0
    max_tokens: Count = 0
    checkpoint_dir: str = ""
    checkpoint_interval: Count = 0
    starting_step: Count = 0
    total_steps: Count = 0
    started: bool = False


class Registered(Message, tag="registered", frozen=True, kw_only=True):
    """The session is open."""

    ack: Ack
    info: RunInfo


class ConsumerRegistered(Message, tag="consumer_registered", frozen=True, kw_only=True):
    """The consumer is registered; `generation` fences requests of its earlier registrations."""

    epoch: Count
    generation: Count
    info: RunInfo
    policy: PolicyVersion = PolicyVersion()
    """Policy from which a trainer without a checkpoint continues: the one it has settled, or else that of the run."""
    deleted_steps: Count = 0
    """Steps after `resume` that do not come again: a later checkpoint was committed, and their groups were deleted."""


class Delivery(Message, tag="delivery", frozen=True, kw_only=True, gc=False):
    """One group of a batch. The frames of groups without a `place` follow the `Batch` in order."""

    header: GroupHeader
    env: KnownName
    producer: KnownName
    session: Count
    deliveries: Count = 1
    """Number of times it was delivered, this one included."""
    place: tuple[Count, Count] | None = None
    """Index of an arena of the batch and the offset of its bytes there, valid during the lease."""


class Batch(Message, tag="batch", frozen=True, kw_only=True):
    """This rank's shard of a leased step."""

    lease: Count
    generation: Count
    step: Count
    groups: tuple[Delivery, ...]
    tables: EncodedTables
    arenas: tuple[ArenaRef, ...] = ()
    """The broker's descriptor of each arena with a group of the batch."""
    short: bool = False
    """Fewer sequences than asked: no combination of whole groups matched in time."""
    over: bool = False
    """More than asked: a group larger than a step is delivered alone, and a rewound batch is never cut."""
    rewound: bool = False
    """The batch was trained before, and the trainer has resumed from an earlier checkpoint; it is unchanged."""
    moments: dict[KnownName, Moments] = {}
    """Moments of the scores of each environment of the step, the same for all ranks, as of its lease. A rewound batch
    brings those of its first lease."""


class NoBatch(Message, tag="no_batch", frozen=True, kw_only=True):
    """There was no batch in time."""

    wait: Wait
    queued_sequences: Count
    expired_groups: Count = 0
    """Accepted groups that were dropped as stale, so far."""


class Rejected(Message, tag="rejected", frozen=True, kw_only=True):
    """A group that the trainer cannot use.

    Attributes:
        group_id: Id of the group.
        reason: Reason, kept with the dead letter; at most 512 characters.
    """

    group_id: GroupId
    reason: Annotated[str, Meta(max_length=512)]


class Settled(Message, tag="settled", frozen=True, kw_only=True):
    """This rank's shard is settled; the lease ends with the settlement of the last rank.

    Attributes:
        step: Optimizer step of the batch.
        commit_wanted: The broker asks for a checkpoint soon, because it keeps many uncommitted groups.
        provisional: Other ranks have yet to settle. If the lease is lost before, all its groups are delivered again,
            and the next pull of this rank is refused with `lease_lost`.
        lost: Of `SettleGroups`: groups that the consumer did not hold any more, as their lease was lost. They are
            queued again, or ended otherwise.
    """

    step: Count
    commit_wanted: bool = False
    provisional: bool = False
    lost: tuple[GroupId, ...] = ()


class InfoReply(Message, tag="info_reply", frozen=True, kw_only=True):
    """Reply to `GetInfo`, with the addresses to connect to.

    `ingest`, `events` and `publish` are addresses on the broker's host. `ports` are the ports of the same sockets for a
    client that came by `broker.listen`; their host is the one that it dialed. `arena_bytes` is the size of an arena
    that a producer on the same host may offer; 0 means that the broker reads none.
    """

    epoch: Count
    info: RunInfo
    ingest: str
    events: str
    publish: str
    ports: Annotated[tuple[Port, ...], Meta(max_length=3)] = ()
    """Ports of `ingest`, `events` and `publish`."""
    max_group_bytes: Count
    arena_bytes: Count = 0
    environments: tuple[Name, ...] = ()
    """Environments that a task may be for; none means any."""
    run_id: RunId = ""
    """Id of the run; a fresh run of the same name has another one."""


class Ok(Message, tag="ok", frozen=True, kw_only=True):
    """The request succeeded."""


class ErrorReply(Message, tag="error", frozen=True, kw_only=True):
    """The request was refused, with the reason."""

    code: ErrorCode
    detail: str = ""


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
    | JoiningReply
    | Ok
    | ErrorReply
)
