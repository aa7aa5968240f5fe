"""Requests of producers and consumers to the `serve` socket.

Every request is one msgpack frame and gets exactly one reply; only a `Batch` is followed by the frames of its groups.
Every request is repeatable: registering, syncing, pulling with the same `request_id` and settling the same lease again
give the same reply and change nothing.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from rolloutmq.schemas.wire.control import ControlRequest
from rolloutmq.schemas.wire.envelope import (
    PROTOCOL_VERSION,
    ArenaRef,
    ColumnTable,
    Count,
    GroupId,
    Message,
    Name,
    PolicyVersion,
    RunId,
    Split,
)
from rolloutmq.schemas.wire.joining import JoiningRequest
from rolloutmq.schemas.wire.replies import Rejected, RunInfo
from rolloutmq.schemas.wire.tasks import TaskRequest
from rolloutmq.schemas.wire.training import StepFigures

RANKS_LIMIT = 4096
"""Most data-parallel ranks of one trainer; each of them adds to the time of sharding a step."""
WINDOW_LIMIT = 64
"""With `GROUPS_LIMIT`: most groups that one consumer holds. They are in the broker's memory, and in its snapshots."""
GROUPS_LIMIT = 1024
"""Most groups of one lease of a window."""
LOGGED_LIMIT = 64
"""Most steps whose figures one request logs."""


class RegisterProducer(Message, tag="register_producer", frozen=True, kw_only=True):
    """Open a session. An older session of the same producer is fenced.

    Attributes:
        producer: Name of the producer; it has one live session at a time.
        run: Name of the run.
        env: Environment of its groups.
        split: Split of its groups.
        slots: Wanted number of concurrent rollouts.
        group_size: Usual number of sequences in a group.
        weight: Share of the batches, relative to the other environments.
        min_share: Part of every batch reserved for the environment, 0 to 1.
        max_tokens: Longest sequence it produces, in tokens; 0 if unknown.
        resume_session: Saved session whose unacked groups will be resent; 0 for none.
        begun: Started rollouts of that session.
        abandoned: Abandoned rollouts of that session.
        pid: Process id, for people and for the orchestrator.
        host: Name of its host.
        key: Identifies one attempt to open a session: a repeated request gets the same session.
        arena: Shared memory for the groups of the session, if the broker is on the same host.
        protocol: Protocol version of the producer.
        run_id: Id of the run that its groups are of; empty before the first broker told it.
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
    protocol: Count = PROTOCOL_VERSION
    run_id: RunId = ""


class DeclareTables(Message, tag="declare_tables", frozen=True, kw_only=True):
    """Declare column tables; a group may refer only to a declared one."""

    producer: Name
    session: Count
    tables: Annotated[tuple[ColumnTable, ...], Meta(max_length=64)]


class Sync(Message, tag="sync", frozen=True, kw_only=True):
    """Ask for the current `Ack`, and report the rollouts of the session.

    Attributes:
        producer: Name of the producer.
        session: Its session.
        abandoned: Abandoned rollouts.
        begun: Started rollouts, abandoned ones included.
        paused: It starts no rollouts until it says otherwise: `start_limit` falls to `begun`, and other producers get
            the permits.
    """

    producer: Name
    session: Count
    abandoned: Count = 0
    begun: Count = 0
    paused: bool = False


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """End the session; its unaccepted groups count as lost before accept."""

    producer: Name
    session: Count
    produced: Count = 0
    abandoned: Count = 0


class RegisterConsumer(Message, tag="register_consumer", frozen=True, kw_only=True):
    """Join a consumer group. A new registration of the same consumer releases its lease.

    Attributes:
        consumer: Name of the consumer.
        group: Consumer group, which all ranks of a trainer share.
        rank: Rank of the consumer, from 0.
        world_size: Number of ranks.
        info: Description of the run.
        generation: Generation of an earlier registration of this process. If the broker still knows it, nothing changes
            and the reply has the same generation.
        resume: Checkpoint of a resumed trainer. The broker rewinds: it redelivers every batch settled for a later step
            and every leased batch, in the same composition and order.
        key: Identifies one attempt to register: a repeated request gets the same generation.
        protocol: Protocol version of the consumer.
        run_id: Id of the run that it trains; empty before the first broker told it.
    """

    consumer: Name
    group: Name = "trainer"
    rank: Count = 0
    world_size: Annotated[int, Meta(ge=1, le=RANKS_LIMIT)] = 1
    info: RunInfo = RunInfo()
    generation: Count = 0
    resume: PolicyVersion | None = None
    key: Annotated[str, Meta(max_length=32)] = ""
    protocol: Count = PROTOCOL_VERSION
    run_id: RunId = ""


class Pull(Message, tag="pull", frozen=True, kw_only=True):
    """Ask for this rank's shard of one step; the broker replies once there is a batch, or after `wait_s`.

    Attributes:
        consumer: Name of the consumer.
        group: Name of its consumer group.
        run: Name of the run.
        rank: Rank of the consumer, from 0.
        world_size: Number of ranks.
        step: Optimizer step of the batch. All ranks of a step share its lease.
        version: Learning policy; staleness counts from it.
        sequences: Sequences of the step over all ranks; 0 with `tokens` or `groups`.
        tokens: Most tokens of the step over all ranks; 0 with `sequences` or `groups`.
        groups: Most groups, which come as they are there, at least one; `SettleGroups` settles them. 0 with `sequences`
            or `tokens`.
        window: With `groups`: the consumer may hold `window` times `groups` groups, in any number of leases. A rewound
            batch comes as a whole, also where it exceeds that. Otherwise 0.
        request_id: Chosen by the consumer; a repeated pull with the same id gets the same batch.
        wait_s: Longest wait, in seconds.
        split: Split of the groups.
        arenas: The consumer reads groups from shared memory; otherwise all of them are sent as frames.
        generation: Generation of the consumer's registration; after a newer one the pull is refused as fenced. 0 is not
            checked.
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
    groups: Annotated[int, Meta(ge=0, le=GROUPS_LIMIT)] = 0
    window: Annotated[int, Meta(ge=0, le=WINDOW_LIMIT)] = 0
    request_id: Annotated[str, Meta(min_length=1, max_length=64)]
    wait_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 10.0
    split: Split = Split.TRAIN
    arenas: bool = False
    generation: Count = 0


class Settle(Message, tag="settle", frozen=True, kw_only=True):
    """Report the outcome of a shard after the optimizer step. Every group must be in exactly one of the three lists.

    Attributes:
        consumer: Name of the consumer.
        lease: Lease of the batch.
        generation: Generation of the consumer.
        rank: Rank of the consumer.
        version: Policy after the step, at most one step later; the pulled version if no step was taken.
        trained: Groups that the step learned from.
        filtered: Groups without a learning signal (equal rewards), or too stale for the loss.
        rejected: Unusable groups; they become dead letters.
    """

    consumer: Name
    lease: Count
    generation: Count
    rank: Count = 0
    version: PolicyVersion
    trained: tuple[GroupId, ...] = ()
    filtered: tuple[GroupId, ...] = ()
    rejected: tuple[Rejected, ...] = ()


class SettleGroups(Message, tag="settle_groups", frozen=True, kw_only=True):
    """Report the outcome of some groups that a consumer with a window holds, of any of its leases.

    Attributes:
        consumer: Name of the consumer.
        generation: Generation of its registration.
        key: Chosen by the consumer; a repeated request with the same key changes nothing, and gets the same reply.
        version: Policy after the step; the present policy if no step was taken.
        trained, filtered, rejected: As in `Settle`; each group is named once. Groups that are in no list stay leased.
    """

    consumer: Name
    generation: Count
    key: Annotated[str, Meta(min_length=1, max_length=64)]
    version: PolicyVersion
    trained: tuple[GroupId, ...] = ()
    filtered: tuple[GroupId, ...] = ()
    rejected: tuple[Rejected, ...] = ()


class Commit(Message, tag="commit", frozen=True, kw_only=True):
    """Report a durable checkpoint of every step up to and including `version.step`; their groups may be deleted."""

    consumer: Name
    group: Name = "trainer"
    run: Name = "default"
    version: PolicyVersion


class TrainerPause(StrEnum):
    """Reason of a trainer to ask for no batch, other than training."""

    EVALUATION = "evaluation"
    """It takes no step until a point of the evaluation is complete."""


Waits = dict[TrainerPause, Annotated[float, Meta(ge=0)]]


class Release(Message, tag="release", frozen=True, kw_only=True):
    """Return the consumer's lease to the queue at once; sent by a consumer that stops. `generation` is as in `Pull`."""

    consumer: Name
    reason: Annotated[str, Meta(max_length=512)] = ""
    generation: Count = 0
    leaves: bool = False
    """The consumer ends: it does not count as a trainer any more."""
    waits_s: Waits = {}
    """As in `ConsumerBeat`."""


class LogFigures(Message, tag="log_figures", frozen=True, kw_only=True):
    """Publish the figures that a consumer logged, oldest first, as `StepFigures`. `generation` is as in `Pull`."""

    consumer: Name
    generation: Count = 0
    logged: Annotated[tuple[StepFigures, ...], Meta(max_length=LOGGED_LIMIT)]
    """Figures of each step."""


class ConsumerBeat(Message, tag="consumer_beat", frozen=True, kw_only=True):
    """Heartbeat of a consumer. `progress` must grow, or the lease of a hung trainer would never expire.

    `generation` is as in `Pull`.
    """

    consumer: Name
    progress: Count = 0
    generation: Count = 0
    waits_s: Waits = {}
    """Seconds in which it asked for no batch, by reason, since it registered with this life of the broker."""


class GetInfo(Message, tag="get_info", frozen=True, kw_only=True):
    """Ask for the description of the run and the addresses of the broker's other sockets."""


Request = (
    RegisterProducer
    | DeclareTables
    | Sync
    | Goodbye
    | RegisterConsumer
    | Pull
    | Settle
    | SettleGroups
    | Commit
    | Release
    | LogFigures
    | ConsumerBeat
    | GetInfo
    | ControlRequest
    | TaskRequest
    | JoiningRequest
)
