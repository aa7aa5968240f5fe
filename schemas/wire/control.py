"""Messages of the control plane: heartbeats of workers, orders of operators, and the broker's published state."""

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Count, GroupHeader, GroupId, Message, Name, Seconds, Split
from rolloutmq.schemas.wire.hardware import CordonGpu, GpuOrder, GpuOrdered, UncordonGpu
from rolloutmq.schemas.wire.health import LaneScores
from rolloutmq.schemas.wire.joining import NetworkStatus
from rolloutmq.schemas.wire.tasks import TaskCounts


class WorkerState(StrEnum):
    """State of a worker, in order."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It finishes its rollouts and starts no new ones."""
    GONE = "gone"
    FAILED = "failed"
    """It cannot produce groups; `WorkerBeat.error` has the reason."""


SILENT: Final = "silent"
"""How a worker counts that has not been heard for `SILENT_S`: it died without a last heartbeat, or it hangs."""
AWAY_LIMIT: Final = 8
"""Most engines out of reach in a heartbeat."""
SILENT_S: Final = 3.0
"""Silence from which a worker counts as silent; it sends a heartbeat every second."""


class WorkerBeat(Message, tag="worker_beat", frozen=True, kw_only=True):
    """Heartbeat of a worker, sent about once a second and at each change of state.

    Attributes:
        worker: Name of the worker and of its producer.
        env: Environment that it runs.
        state: State of the worker.
        pid: Process id on `host`.
        host: Name of its host.
        in_hand: Rollouts in progress.
        produced: Finished groups, accepted or not.
        abandoned: Rollouts that raised, timed out or returned nothing.
        blocked_s: Seconds of waiting for credit or a submitted task, over all rollout slots.
        late_members: Sequences missing from its groups because a deadline had passed.
        untaught: Abandoned groups that the teacher refused, or failed on too often.
        error: Last error of the environment, one line.
        completions: Completions that its rollouts got from the policy so far, those of rollouts in progress included;
            not those of an evaluation beside the training. 0 if it samples in another way.
        completion_tokens: Their sampled tokens.
        waits_for: Service other than the broker for which finished rollouts wait, their number and the reason; of a
            starting worker, the engines that it cannot reach. Empty if there is none.
        clock_offset_s: Seconds that the broker's wall clock is ahead of the worker's, by the round trips of earlier
            heartbeats.
        clock_error_s: Bound of the error of `clock_offset_s`, half the shortest round trip; 0 before the first one.
        joined: It joined by itself, from a copy of the run directory; the orchestrator does not own it.
        started: Start of the process in ticks of its boot, 0 if unknown: the first process of each container has pid 1.
        engines_away: Engines that its host does not reach, by name, and why; at most `AWAY_LIMIT`.
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
    completions: Count = 0
    completion_tokens: Count = 0
    waits_for: Annotated[str, Meta(max_length=1000)] = ""
    clock_offset_s: Seconds = 0.0
    clock_error_s: Seconds = 0.0
    joined: bool = False
    started: Count = 0
    engines_away: Annotated[
        dict[Annotated[str, Meta(max_length=512)], Annotated[str, Meta(max_length=400)]],
        Meta(max_length=AWAY_LIMIT),
    ] = {}


class WorkerBeatReply(Message, tag="worker_beat_reply", frozen=True, kw_only=True):
    """Reply to a heartbeat. `draining` tells the worker to drain, even if the published `Drain` was lost."""

    draining: bool = False
    at: Seconds = 0.0
    """Wall clock of the broker as it answered."""


class Drain(Message, tag="drain", frozen=True, kw_only=True):
    """Order a worker to drain. The broker repeats it on `control.<worker>/` until the worker reports `draining`.

    Attributes:
        worker: Name of the worker.
        reason: Why, for the log of the worker.
        pid: Process that the order is for, set by the broker; a later one of the same name ignores it. 0 if unknown.
        started: Its start, as in `WorkerBeat`; 0 if unknown.
    """

    worker: Name
    reason: Annotated[str, Meta(max_length=200)] = "asked"
    pid: Count = 0
    started: Count = 0


class RestartWorker(Message, tag="restart_worker", frozen=True, kw_only=True):
    """Order the orchestrator to end a worker or an engine and start another in its place. Kept for a minute.

    Attributes:
        worker: Worker or engine.
        order: Unique id; the same order twice is one.
        pid: Process that the order is for, on the orchestrator's host; 0 for one without a process.
        at_once: Kill it, instead of draining it.
    """

    worker: Name
    order: Name
    pid: Count = 0
    at_once: bool = False


class SetWorkers(Message, tag="set_workers", frozen=True, kw_only=True):
    """Pin the number of workers of an environment; None returns it to autoscaling."""

    env: Name
    count: Count | None


class GetStatus(Message, tag="get_status", frozen=True, kw_only=True):
    """Ask for the complete status of the broker."""


class LatestExample(Message, tag="latest_example", frozen=True, kw_only=True):
    """Ask for the newest accepted group of an environment, or of all; its frames follow the reply."""

    env: str = ""


class LatestExampleReply(Message, tag="latest_example_reply", frozen=True, kw_only=True):
    """The newest accepted group; no header if there is none. `table` is its `ColumnTable` as msgpack."""

    header: GroupHeader | None = None
    env: str = ""
    table: bytes = b""


class Disconnect(Message, tag="disconnect", frozen=True, kw_only=True):
    """Unregister an environment: it gives up its minimum share and its weight."""

    env: Name


Setting = bool | int | float | str
"""Value of a live setting."""


class SetValues(Message, tag="set_values", frozen=True, kw_only=True):
    """Change live settings, all or none; see `schemas.config.live_settings`."""

    values: Annotated[dict[str, Setting], Meta(min_length=1, max_length=256)]
    """New value by dotted key, as in the configuration."""


class ValuesSet(Message, tag="values_set", frozen=True, kw_only=True):
    """All values of a `SetValues` are applied and survive a restart of the broker."""

    values: dict[str, Setting]


class ValueRefused(Message, tag="value_refused", frozen=True, kw_only=True):
    """A `SetValues` was refused and changed nothing, because of the value of `key`."""

    key: str
    reason: str


class Requeue(Message, tag="requeue", frozen=True, kw_only=True):
    """Queue dead groups again, with a delivery count of zero; an empty list means all of them."""

    groups: Annotated[tuple[GroupId, ...], Meta(max_length=10_000)] = ()


class Requeued(Message, tag="requeued", frozen=True, kw_only=True):
    """Result of a `Requeue`."""

    requeued: tuple[GroupId, ...] = ()
    refused: dict[str, str] = {}
    """Reason by group id for each group that stays dead: it is unknown, its frames are damaged, or the queue is
    full. By file name for each unreadable dead letter."""


class Reset(Message, tag="reset", frozen=True, kw_only=True):
    """Start over: queued groups count as `discarded(reset)`; registrations and the step are cleared."""

    reason: Annotated[str, Meta(max_length=200)] = "asked"


class Shutdown(Message, tag="shutdown", frozen=True, kw_only=True):
    """Save the queued groups and end the broker."""


class LedgerCounts(Message, tag="ledger_counts", frozen=True, kw_only=True):
    """Accepted groups by state. `accepted` is the sum of all states except `lost_before_accept` and `rewound`."""

    accepted: Count = 0
    queued: Count = 0
    leased: Count = 0
    trained: Count = 0
    """Trained on, not yet covered by a checkpoint."""
    committed: Count = 0
    filtered: Count = 0
    expired: Count = 0
    dead: Count = 0
    discarded: Count = 0
    rewound: Count = 0
    """Trained groups that were delivered again because the trainer resumed from an earlier checkpoint."""
    lost_before_accept: Count = 0
    reasons: dict[str, int] = {}
    """Number of groups by `state(reason)`, for states with reasons."""


class LaneStatus(Message, tag="lane_status", frozen=True, kw_only=True):
    """Queue of one environment and split."""

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
    """Rollouts granted to producers and not arrived yet, started or not."""
    accepted_groups: Count = 0
    trained_groups: Count = 0
    oldest_age_s: Seconds = 0.0
    accepted_per_s: float = 0.0
    """Groups a second over the last ten seconds."""
    wait: str = ""
    """Most frequent reason of its waiting producers, or empty."""
    held_bytes: Count = 0
    """Queued and leased bytes."""
    high_bytes: Count = 0
    """Its own high-water mark for queued, leased and granted bytes; 0 is none."""
    max_staleness: Count = 0
    waiting: Count = 0
    """Number of waiting producers."""
    accepted_sequences: Count = 0
    settled_sequences: Count = 0
    """Sequences trained, filtered or rejected; like `accepted_sequences` since the start of the broker."""
    rollout_s: Seconds = 0.0
    """Mean duration of a rollout; 0 while unknown."""
    reward_mean: float | None = None
    """Mean raw score of its accepted groups, by sequences; older groups weigh less with
    `trainer.rewards.half_life_groups`."""
    reward_deviation: float | None = None
    """Population standard deviation of these scores."""
    reward_groups: Count = 0
    """Groups in both."""


class WorkerStatus(Message, tag="worker_status", frozen=True, kw_only=True):
    """Last heartbeat of a worker, and the time since."""

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
    joined: bool = False
    """It joined by itself; the orchestrator does not own it."""
    engines_away: dict[str, str] = {}
    """Engines that its host does not reach, by name, and why."""

    @property
    def is_silent(self) -> bool:
        """Return whether a worker that should be heard is not. `state` is the last one that it reported."""
        return self.silent_s > SILENT_S and self.state not in {WorkerState.GONE, WorkerState.FAILED}

    @property
    def counts_as(self) -> str:
        """Return the state under which the worker is counted: what it reported, or `SILENT`."""
        return SILENT if self.is_silent else self.state.value


class TrainerStatus(Message, tag="trainer_status", frozen=True, kw_only=True):
    """A trainer, by the consumer of its first rank."""

    consumer: Name
    group: Name
    step: Count
    """Last step that it has settled; 0 before the first."""
    silent_s: Seconds
    """Time since its last sign of life."""
    connected: bool
    """It has neither left nor been silent for `broker.silence_s`."""
    has_left: bool = False
    """It has ended in order."""


class Pressure(Message, tag="pressure", frozen=True, kw_only=True):
    """State of the queue and the trainer's demand; published on `pressure` four times a second.

    `rollout_pressure` is the number of queued sequences divided by those of one batch: if it is high, fewer workers
    would suffice.
    """

    epoch: Count
    number: Count
    """Grows by one with each message; a gap means a lost one."""
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
    """Settled sequences a second, over the last ten seconds."""
    produced_per_s: float
    """Accepted sequences a second, over the last ten seconds."""
    staleness_max: Count
    """Largest staleness of any delivered group, in optimizer steps."""
    trainer_wait: str
    """Reason of the trainer's current wait, or empty."""
    ledger: LedgerCounts
    lanes: tuple[LaneStatus, ...]
    workers: tuple[WorkerStatus, ...]
    wanted: dict[str, int | None] = {}
    """Worker counts pinned by `SetWorkers`, by environment."""
    settings: dict[str, Setting] = {}
    """Live settings that the orchestrator applies, by dotted key."""
    restarts: tuple[RestartWorker, ...] = ()
    """Orders of the last minute to restart workers."""
    gpu_orders: dict[str, GpuOrder] = {}
    """Last order of an operator for each GPU, by UUID."""
    tasks: TaskCounts = TaskCounts()
    """Submitted tasks by state."""
    late_members: dict[str, int] = {}
    """Late members by environment since the start of the broker, as its workers count them."""
    trainer_waits_s: dict[str, float] = {}
    """Seconds in which trainers waited, by reason: for a batch, the disk, or an evaluation; each rank counts."""
    producer_waits_s: dict[str, float] = {}
    """Total waiting time of producers for credit in seconds, by reason."""
    granted_bytes: Count = 0
    """Bytes granted to producers and not arrived yet."""
    reserved_bytes: Count = 0
    """Bytes that grants leave free at present: for draining producers, and for one large group. 0 while a trainer
    starves."""
    high_groups: Count = 0
    silent_env_s: Seconds = 0.0
    """Time after which a silent environment is left out of pacing, and no batch waits for its minimum share."""
    exact_wait_s: Seconds = 0.0
    """Longest wait of a batch for an exact combination, or for a minimum share."""
    trainers: Count = 0
    """Number of registered, live trainers; each rank is one."""
    leaders: tuple[TrainerStatus, ...] = ()
    """Trainers, each by its first rank: at most 8 live ones, or else the last one that was."""
    untrained_s: Seconds = 0.0
    """Time since a trainer was last heard, or since the start of the broker if none was; 0 while one is connected. A
    trainer counts from its first pull."""
    starved_s: Seconds = 0.0
    """Seconds in which the trainer was ready but had no batch, since the start of the broker; each rank counts for its
    share."""
    settled_busy_s: Seconds = 0.0
    """The broker's monotonic clock less `starved_s`, at the last settlement: from one settlement to the next it grows
    by the time in which the trainer trained. 0 before the first."""
    blocked_s: dict[str, float] = {}
    """Seconds that rollout slots have waited for credit since the start of the broker, by environment."""
    completions: dict[str, int] = {}
    """Completions of `WorkerBeat` since the start of the broker, by environment."""
    completion_tokens: dict[str, int] = {}
    """Their tokens."""
    free_environments: Count = 0
    """Further environments that the broker can take now."""
    insecure: str = ""
    """Address by which whoever reaches it may use the run, as `broker.insecure` allows; empty for none."""
    unencrypted: tuple[str, ...] = ()
    """HTTP servers within reach of other machines that get tokens without encryption, with their hosts."""

    @property
    def waits_s(self) -> dict[str, float]:
        """Seconds of waiting by reason, of trainers and producers together."""
        both = {**self.trainer_waits_s, **self.producer_waits_s}
        return {why: self.trainer_waits_s.get(why, 0.0) + self.producer_waits_s.get(why, 0.0) for why in both}


class JournalStatus(Message, tag="journal_status", frozen=True, kw_only=True):
    """Status of the broker's journal.

    Attributes:
        health: `ok`; `slow` if it falls behind; `full` if the disk is full; `none` at durability `memory`.
        segments: Number of segments.
        nbytes: Bytes of the segments.
        behind_bytes: Accepted bytes that are not written yet.
        commits: Number of commits.
        commit_s: Total time of the commits, in seconds.
        quarantined: Damaged records in quarantine.
    """

    health: str = "none"
    segments: Count = 0
    nbytes: Count = 0
    behind_bytes: Count = 0
    commits: Count = 0
    commit_s: Seconds = 0.0
    quarantined: Count = 0


class SettingStatus(Message, tag="setting_status", frozen=True, kw_only=True):
    """A live setting with another value than in the configuration."""

    key: str
    configured: Setting
    now: Setting


class StatusReply(Message, tag="status_reply", frozen=True, kw_only=True):
    """The complete status of the broker."""

    pressure: Pressure
    run: str
    total_steps: Count
    durability: str
    uptime_s: Seconds
    rejected_messages: Count
    """Messages rejected as malformed, beyond a limit, or beyond a session's credit."""
    rejected_by_reason: dict[str, int]
    """The same by reason; also resent groups (`duplicate`) and shared memory that was not opened (`arena_*`): neither
    refuses a message."""
    journal: JournalStatus = JournalStatus()
    changed: tuple[SettingStatus, ...] = ()
    """Settings with other values than in the configuration."""
    as_frames: dict[str, int] = {}
    """Groups accepted as frames instead of through shared memory since the start of the broker, by reason."""
    network: NetworkStatus | None = None
    """Other hosts, if the broker listens for them."""


class StepDone(Message, tag="step_done", frozen=True, kw_only=True):
    """Report of one optimizer step; published on `step`."""

    run: Name
    incarnation: Count
    step: Count
    at: Seconds
    reward: float
    """Mean score of all groups of the batch, filtered ones included."""
    loss: float
    tokens: Count
    groups: Count
    filtered: Count
    staleness_max: Count
    staleness_mean: float
    pull_s: Seconds
    step_s: Seconds
    extra: dict[str, float] = {}
    scores: tuple[LaneScores, ...] = ()
    """Raw scores of each environment in the batch."""


class StepSkipped(Message, tag="step_skipped", frozen=True, kw_only=True):
    """Report of a batch without a signal, which was no optimizer step; published on `telemetry.skipped.<run>`.

    Such batches show best that rewards are unhealthy.
    """

    run: Name
    incarnation: Count
    step: Count
    """Optimizer step of the policy, which stays."""
    at: Seconds
    reason: str
    """Reason why there was no signal, from one group."""
    groups: Count
    filtered: Count
    rejected: Count
    """Groups that the trainer cannot use."""
    scores: tuple[LaneScores, ...] = ()
    """Raw scores of each environment in the batch."""


class ScaleDecision(Message, tag="scale_decision", frozen=True, kw_only=True):
    """Autoscaling decision for one environment, with its inputs; published on `telemetry.scale.<env>`.

    Attributes:
        current: Workers that count towards the target.
        target: Number of workers from now on.
        reason: Reason of the decision.
        want: Number of workers without any limit; None while unknown.
        bound: Limit that keeps the target below `want`: `inference_bound`, `unmeasured`, `max_workers`, `no_gpu`,
            `given_up`, `budget`.
        eats_per_s: Demand: sequences a second that the trainer would consume without waiting; None while unknown.
        makes_per_s: Throughput of one worker without waiting, in sequences a second; None while unknown.
        starved: Fraction of the last seconds in which the trainer waited.
        idle: Fraction of the last seconds in which workers waited.
        failed: Workers given up after repeated failures, and not replaced yet; they are not in `current`.
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
    joined: Count = 0
    """Those of `current` that joined by themselves, most from other hosts."""


ControlRequest = (
    WorkerBeat
    | Drain
    | RestartWorker
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
