"""Messages of the control plane: what a worker reports, what an operator asks, what the broker publishes."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from rolloutmq.schemas.envelope import Count, GroupHeader, GroupId, Name, Seconds, Split
from rolloutmq.schemas.hardware import CordonGpu, GpuOrder, GpuOrdered, UncordonGpu
from rolloutmq.schemas.message import Message
from rolloutmq.schemas.tasks import TaskCounts


class WorkerState(StrEnum):
    """Life of a worker, in its order."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Finishes what is in hand and starts nothing new."""
    GONE = "gone"
    FAILED = "failed"
    """It can never produce: the reason is in `WorkerBeat.error`."""


class WorkerBeat(Message, tag="worker_beat", frozen=True, kw_only=True):
    """A worker lives. Sent about once a second and at each change of state.

    Attributes:
        worker: Name of the worker; it is its producer's name too.
        pid: Process id on `host`.
        in_hand: Rollouts under way.
        produced: Groups finished, accepted or not.
        abandoned: Rollouts that raised, timed out or gave nothing.
        blocked_s: Seconds spent waiting for credit, over all rollout slots.
        late_members: Sequences that its groups went without, because a deadline had passed.
        untaught: Groups among the abandoned that the teacher refused, or failed on too often.
        error: Last error of the environment, one line.
        waits_for: Whom its finished rollouts wait for, beside the broker, how many and why; empty if for nobody.
    """

    worker: Name
    env: Name
    state: WorkerState
    pid: Count = 0
    host: str = ""
    in_hand: Count = 0
    produced: Count = 0
    abandoned: Count = 0
    blocked_s: Seconds = 0.0
    error: Annotated[str, Meta(max_length=2000)] = ""
    late_members: Count = 0
    untaught: Count = 0
    waits_for: Annotated[str, Meta(max_length=1000)] = ""


class WorkerBeatReply(Message, tag="worker_beat_reply", frozen=True, kw_only=True):
    """Whether the worker should be draining: the surest way for a drain to arrive."""

    draining: bool = False


class Drain(Message, tag="drain", frozen=True, kw_only=True):
    """Tell a worker to finish and go. The broker repeats it on `control.<worker>/` until the worker reports it."""

    worker: Name
    reason: Annotated[str, Meta(max_length=200)] = "asked"


class SetWorkers(Message, tag="set_workers", frozen=True, kw_only=True):
    """Ask the orchestrator for a number of workers of an environment; None gives it back its own judgement."""

    env: Name
    count: Count | None


class GetStatus(Message, tag="get_status", frozen=True, kw_only=True):
    """Ask for everything that the broker knows of itself."""


class LatestExample(Message, tag="latest_example", frozen=True, kw_only=True):
    """Ask for the newest accepted group; its frames follow the reply."""

    env: str = ""


class LatestExampleReply(Message, tag="latest_example_reply", frozen=True, kw_only=True):
    """The newest accepted group, or none yet. `table` is the msgpack of its `ColumnTable`."""

    header: GroupHeader | None = None
    env: str = ""
    table: bytes = b""


class Disconnect(Message, tag="disconnect", frozen=True, kw_only=True):
    """An environment leaves: it gives up its minimum share and its place in the weights."""

    env: Name


Setting = bool | int | float | str
"""A value that may change while the run goes on."""


class SetValues(Message, tag="set_values", frozen=True, kw_only=True):
    """Change settings of the living run, all of them or none: see `schemas.knobs` for those that may change."""

    values: Annotated[dict[str, Setting], Meta(min_length=1, max_length=256)]
    """Dotted key, as in the configuration, to its new value."""


class ValuesSet(Message, tag="values_set", frozen=True, kw_only=True):
    """All values of a `SetValues` are in force, and a restart of the broker keeps them."""

    values: dict[str, Setting]


class ValueRefused(Message, tag="value_refused", frozen=True, kw_only=True):
    """Nothing of a `SetValues` was done: `key` cannot have the value, for this reason."""

    key: str
    reason: str


class Requeue(Message, tag="requeue", frozen=True, kw_only=True):
    """Put dead groups back into their queue, with a clean slate; an empty list names all of them."""

    groups: Annotated[tuple[GroupId, ...], Meta(max_length=10_000)] = ()


class Requeued(Message, tag="requeued", frozen=True, kw_only=True):
    """What became of a `Requeue`."""

    requeued: tuple[GroupId, ...] = ()
    refused: dict[str, str] = {}
    """Group id to the reason why it stays dead: it is not known, its frames are damaged, or the queue is full."""


class Reset(Message, tag="reset", frozen=True, kw_only=True):
    """Forget the run: what is queued is counted as `discarded(reset)`, registrations and the step are cleared."""

    reason: Annotated[str, Meta(max_length=200)] = "asked"


class Shutdown(Message, tag="shutdown", frozen=True, kw_only=True):
    """Save what is queued and end the broker."""


class LedgerCounts(Message, tag="ledger_counts", frozen=True, kw_only=True):
    """Where every accepted group is. `accepted` is the sum of all others but `lost_before_accept` and `rewound`."""

    accepted: Count = 0
    queued: Count = 0
    leased: Count = 0
    trained: Count = 0
    """Learned from, not yet covered by a checkpoint."""
    committed: Count = 0
    filtered: Count = 0
    expired: Count = 0
    dead: Count = 0
    discarded: Count = 0
    rewound: Count = 0
    """How many times a trained group came back because the trainer resumed before it."""
    lost_before_accept: Count = 0
    reasons: dict[str, int] = {}
    """`state(reason)` to groups, for the states that have reasons."""


class LaneStatus(Message, tag="lane_status", frozen=True, kw_only=True):
    """One environment's queue."""

    env: Name
    split: Split
    weight: float
    min_share: float
    producers: Count = 0
    queued_groups: Count = 0
    queued_sequences: Count = 0
    queued_bytes: Count = 0
    leased_groups: Count = 0
    granted: Count = 0
    """Rollouts that producers may begin or have begun, and that have not arrived yet."""
    accepted_groups: Count = 0
    trained_groups: Count = 0
    oldest_age_s: Seconds = 0.0
    accepted_per_s: float = 0.0
    """Groups a second over the last ten seconds."""
    wait: str = ""
    """Why most of its producers that wait do so, or empty."""
    held_bytes: Count = 0
    """Queued and leased."""
    high_bytes: Count = 0
    """Mark of its own for queued, leased and granted bytes; 0 is none."""
    max_staleness: Count = 0
    waiting: Count = 0
    """Producers that wait."""
    accepted_sequences: Count = 0
    settled_sequences: Count = 0
    """Trained, filtered or rejected by trainers; both in this life of the broker."""
    rollout_s: Seconds = 0.0
    """Mean time in which a group was rolled out; 0 while nobody has told."""


class WorkerStatus(Message, tag="worker_status", frozen=True, kw_only=True):
    """What the broker last heard of a worker."""

    worker: Name
    env: Name
    state: WorkerState
    pid: Count
    host: str
    in_hand: Count
    produced: Count
    abandoned: Count
    blocked_s: Seconds
    silent_s: Seconds
    draining: bool
    error: str
    late_members: Count = 0
    untaught: Count = 0
    waits_for: str = ""


class Pressure(Message, tag="pressure", frozen=True, kw_only=True):
    """State of the queue against what the trainer eats; published on `pressure` four times a second.

    `rollout_pressure` is queued sequences over the sequences of one batch: high means that fewer workers would do.
    """

    epoch: Count
    number: Count
    """Grows by one with each; a gap means that one was dropped."""
    at: Seconds
    rollout_pressure: float
    queued_sequences: Count
    batch_sequences: Count
    queued_groups: Count
    queued_bytes: Count
    leased_bytes: Count
    high_bytes: Count
    step: Count
    consumed_per_s: float
    """Sequences a second that trainers settled, over the last ten seconds."""
    produced_per_s: float
    """Sequences a second that were accepted, over the last ten seconds."""
    staleness_max: Count
    """Largest distance in policy versions of any group handed out so far."""
    trainer_wait: str
    """Why the trainer waits now, or empty."""
    ledger: LedgerCounts
    lanes: tuple[LaneStatus, ...]
    workers: tuple[WorkerStatus, ...]
    wanted: dict[str, int | None] = {}
    """Worker counts that an operator asked for by `SetWorkers`."""
    gpu_orders: dict[str, GpuOrder] = {}
    """What an operator last asked for with each GPU, by UUID."""
    tasks: TaskCounts = TaskCounts()
    """Tasks that trainers submitted."""
    late_members: dict[str, int] = {}
    """Late members by environment, as its workers have counted them in this life of the broker."""
    trainer_waits_s: dict[str, float] = {}
    """Seconds that trainers have waited for batches, by reason."""
    producer_waits_s: dict[str, float] = {}
    """Seconds that producers have waited for credit, by reason, summed over all of them."""
    granted_bytes: Count = 0
    """Bytes that producers may send and that have not arrived."""
    high_groups: Count = 0
    silent_env_s: Seconds = 0.0
    """After how long a minimum share is given up."""
    trainers: Count = 0
    """Trainers that are registered and give signs of life."""
    starved_s: Seconds = 0.0
    """Seconds in which the trainer could have learned and there was no batch, in this life of the broker; each of its
    ranks counts for its part."""
    blocked_s: dict[str, float] = {}
    """Seconds that rollout slots of workers have waited for credit, by environment, likewise."""

    @property
    def waits_s(self) -> dict[str, float]:
        """Seconds waited by reason, trainers and producers together."""
        both = {**self.trainer_waits_s, **self.producer_waits_s}
        return {why: self.trainer_waits_s.get(why, 0.0) + self.producer_waits_s.get(why, 0.0) for why in both}


class JournalStatus(Message, tag="journal_status", frozen=True, kw_only=True):
    """How the broker's journal does.

    Attributes:
        health: `ok`; `slow` if it does not keep up; `full` if the disk is; `none` at durability `memory`.
        segments, nbytes: Files of groups, and their bytes.
        behind_bytes: Accepted and not yet written.
        commits, commit_s: Commits so far, and the seconds that they took.
        quarantined: Records that were damaged and are kept aside.
    """

    health: str = "none"
    segments: Count = 0
    nbytes: Count = 0
    behind_bytes: Count = 0
    commits: Count = 0
    commit_s: Seconds = 0.0
    quarantined: Count = 0


class SettingStatus(Message, tag="setting_status", frozen=True, kw_only=True):
    """A setting that was changed while the run went on."""

    key: str
    configured: Setting
    now: Setting


class StatusReply(Message, tag="status_reply", frozen=True, kw_only=True):
    """Everything the broker knows of itself."""

    pressure: Pressure
    run: str
    total_steps: Count
    durability: str
    uptime_s: Seconds
    rejected_messages: Count
    """Messages refused because they were not of the protocol, beyond a limit or a session's credit."""
    rejected_by_reason: dict[str, int]
    journal: JournalStatus = JournalStatus()
    changed: tuple[SettingStatus, ...] = ()
    """What is not as it was configured."""
    as_frames: dict[str, int] = {}
    """Groups accepted in this life of the broker that came as frames and not through shared memory, by reason."""


class StepDone(Message, tag="step_done", frozen=True, kw_only=True):
    """The trainer took a step; published on `step`."""

    run: Name
    incarnation: Count
    step: Count
    at: Seconds
    reward: float
    """Mean raw score of all groups of the batch, filtered ones included."""
    loss: float
    tokens: Count
    groups: Count
    filtered: Count
    staleness_max: Count
    staleness_mean: float
    pull_s: Seconds
    step_s: Seconds
    extra: dict[str, float] = {}


class ScaleDecision(Message, tag="scale_decision", frozen=True, kw_only=True):
    """What the orchestrator decided for one environment, with what it saw; published on `telemetry.scale.<env>`.

    Attributes:
        current: Workers that count towards the target.
        want: Workers that would do if nothing bounded them; None while that is not known.
        bound: What keeps the target below that, in a word: `inference_bound`, `max_workers`, `budget`, `no_gpu`.
        eats_per_s: Sequences a second that the trainer would eat if it never waited; None while nobody knows.
        makes_per_s: Sequences a second that one worker makes while it does not wait; None while nobody knows.
        starved, idle: Part of the last seconds in which the trainer waited, and in which workers did.
        failed: Workers that were given up.
    """

    env: Name
    at: Seconds
    rollout_pressure: float
    current: Count
    target: Count
    reason: str
    want: float | None = None
    bound: str = ""
    eats_per_s: float | None = None
    makes_per_s: float | None = None
    starved: float = 0.0
    idle: float = 0.0
    ready: Count = 0
    starting: Count = 0
    draining: Count = 0
    failed: Count = 0


ControlRequest = (
    WorkerBeat
    | Drain
    | SetWorkers
    | CordonGpu
    | UncordonGpu
    | SetValues
    | GetStatus
    | LatestExample
    | Disconnect
    | Requeue
    | Reset
    | Shutdown
)
ControlReply = (
    WorkerBeatReply | StatusReply | LatestExampleReply | ValuesSet | ValueRefused | Requeued | GpuOrdered
)
