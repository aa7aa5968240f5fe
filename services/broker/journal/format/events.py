"""Events of the broker, and the records of a snapshot.

An event is one change of the broker's state. An event log begins with a snapshot, the whole state as records; its
events, applied in their order, lead to the present. Groups are named by their `order`, the number of their acceptance
in this run. The encoding is msgpack arrays that begin with the tag: fields may be added at the end with a default,
and a tag is never used twice. A group's `Accepted` event also completes the task it names; there is no second
event for that.
"""

from enum import StrEnum

import msgspec

from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import ColumnTable, GroupHeader, PolicyVersion, RewardSummary, Split
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.schemas.wire.requests import Settle
from rolloutmq.schemas.wire.tasks import GIVEN, TaskState


class GroupState(StrEnum):
    """State of an accepted group."""

    QUEUED = "queued"
    LEASED = "leased"
    TRAINED = "trained"
    COMMITTED = "committed"
    FILTERED = "filtered"
    EXPIRED = "expired"
    DEAD = "dead"
    DISCARDED = "discarded"


class RecordAddress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Number of a segment, and the offset of a record in it."""

    segment: int
    offset: int


class GroupMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Meta of a group's record in a segment, so the record can be read without its events."""

    order: int
    header: GroupHeader
    env: str
    split: Split
    run: str
    producer: str
    session: int
    table: ColumnTable
    at: float
    """Wall-clock seconds of the acceptance."""
    requeued: bool = False


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Base of all events and snapshot records."""


class Accepted(Event, frozen=True, tag=1):
    """A group was accepted, and is queued. `place` is None only in `saved.rmq`, where the record has the same order."""

    order: int
    header: GroupHeader
    env: str
    split: Split
    run: str
    producer: str
    session: int
    at: float
    place: RecordAddress | None = None
    requeued: bool = False
    """It was dead, and an operator queued it again: it does not expire."""


class Skipped(Event, frozen=True, tag=2):
    """A sequence number was used for a group that was accepted before."""

    session: int
    seq: int
    position: int
    nbytes: int
    group_id: str


class Opened(Event, frozen=True, tag=3):
    """A producer registered: `number` is its session from now on."""

    number: int
    producer: str
    env: str
    split: Split
    slots: int
    group_size: int
    weight: float
    min_share: float
    pid: int
    host: str
    draining: bool = False
    produced_before: int = 0
    """Groups its process had produced before, under another session."""


class Declared(Event, frozen=True, tag=4):
    """A session declared column tables."""

    session: int
    tables: tuple[ColumnTable, ...]


class Produced(Event, frozen=True, tag=5):
    """A session reported how many groups it finished, and how many rollouts it abandoned."""

    session: int
    produced: int
    abandoned: int
    closed: bool = False


class Joined(Event, frozen=True, tag=6):
    """A consumer registered; events before this one ended the lease of its previous life."""

    consumer: str
    group: str
    rank: int
    world_size: int
    generation: int
    info: RunInfo


class Leased(Event, frozen=True, tag=7):
    """A step was leased: groups by rank. `again` marks the head of the rewind queue."""

    number: int
    generation: int
    group: str
    split: Split
    step: int
    version: PolicyVersion
    sequences: int
    shards: tuple[tuple[int, ...], ...]
    short: bool = False
    again: bool = False
    tokens: int = 0
    """The budget of a step pulled by tokens; `sequences` is 0 then."""
    moments: dict[str, Moments] = {}
    """Moments of the scores of each environment of the step."""
    window: int = 0
    """`Pull.window` of its consumer; 0 for a step, of which there is one at a time."""


class Pulled(Event, frozen=True, tag=8):
    """A rank was handed its shard."""

    lease: int
    rank: int
    consumer: str
    request_id: str


class Settles(Event, frozen=True, tag=9):
    """A rank reported the outcome of its shard; the last one ends the lease."""

    settle: Settle


class Carved(Event, frozen=True, tag=23):
    """Groups of a consumer's window became a lease of their own, which a `Settles` event then ends.

    `request_id` is the key of their settlement. A lease without a group left is over.
    """

    number: int
    generation: int
    consumer: str
    request_id: str
    orders: tuple[int, ...]


class Lost(Event, frozen=True, tag=10):
    """A lease was lost; `why` is for people. `recalled`: by a rewind, and its event follows.

    `failed`: it counts as a failure of its groups.
    """

    lease: int
    failed: bool
    why: str
    recalled: bool = False
    apart: bool = False
    """The rewound batch is split into batches of one group."""


class Dropped(Event, frozen=True, tag=11):
    """A queued or leased group left untrained."""

    order: int
    state: str
    """`expired`, `dead` or `discarded`."""
    reason: str


class Committed(Event, frozen=True, tag=12):
    """A checkpoint of a consumer group covers every step up to `version`."""

    group: str
    version: PolicyVersion


class Forgot(Event, frozen=True, tag=13):
    """The oldest `batches` of a consumer group are no longer retained: their checkpoint never comes."""

    group: str
    batches: int


class Rewound(Event, frozen=True, tag=14):
    """A trainer resumed at `version`: the later batches are queued again."""

    group: str
    version: PolicyVersion
    consumer: str


class Requeued(Event, frozen=True, tag=15):
    """An operator queued a dead group again: it counts as `discarded(requeued)`, and a new acceptance follows."""

    order: int


class Disconnected(Event, frozen=True, tag=16):
    """An environment left."""

    env: str


class WasReset(Event, frozen=True, tag=17):
    """The run was reset: queued and leased groups are discarded. `lost` counts groups of silent sessions."""

    reason: str
    lost: int = 0


class Wanted(Event, frozen=True, tag=18):
    """An operator asked for a number of workers."""

    env: str
    count: int | None


class Vacated(Event, frozen=True, tag=22):
    """Lanes were forgotten, each an environment and a split. They held no group, and had no live producer."""

    lanes: tuple[tuple[str, Split], ...]


class GpuAsked(Event, frozen=True, tag=26):
    """An operator cordoned or uncordoned a GPU."""

    gpu: str
    number: int
    cordoned: bool
    reason: str


class Told(Event, frozen=True, tag=19):
    """A worker was ordered to drain, or the drain ended with its process; `pid` and `started` are 0 if unknown."""

    worker: str
    reason: str
    pid: int = 0
    told: bool = True
    started: int = 0


class Began(Event, frozen=True, tag=20):
    """A life of the broker began with the state of the snapshot before this."""

    epoch: int
    pid: int
    durability: str


class Tuned(Event, frozen=True, tag=21):
    """An operator changed live settings: dotted key to value. In a snapshot: all live settings."""

    values: dict[str, bool | int | float | str]


# Records of a snapshot.


class Numbers(Event, frozen=True, tag=64):
    """First record: the numbers that go on."""

    next_order: int
    next_lease: int
    generation: int
    staleness_max: int = 0


class Table(Event, frozen=True, tag=65):
    """A column table a group or session names."""

    table: ColumnTable


class LaneSnapshot(Event, frozen=True, tag=66):
    """One environment's queue, without its groups."""

    env: str
    split: Split
    connected: bool
    weight: float
    min_share: float
    group_size: int
    carry: float
    accepted_groups: int
    trained_groups: int
    largest_bytes: int
    rewards: Moments = Moments()
    """Moments of the scores of all accepted groups."""
    half_life_groups: int | None = None
    """`trainer.rewards.half_life_groups` of the life that wrote this, and applied the events before it."""


class SessionSnapshot(Event, frozen=True, tag=67):
    """One remembered session; those of one producer come oldest first."""

    number: int
    current: bool
    producer: str
    env: str
    split: Split
    slots: int
    pid: int
    host: str
    tables: tuple[str, ...]
    abandoned: int
    produced: int
    produced_before: int
    closed: bool
    draining: bool
    cumulative: int
    accepted: int
    nbytes: int
    position: int
    above: tuple[tuple[int, int], ...]
    """(number, position) of accepted groups above the gap."""


class GroupSnapshot(Event, frozen=True, tag=68):
    """One group that still exists. It is queued, unless a later record places it elsewhere."""

    accepted: Accepted
    table: str
    deliveries: int
    failures: int


class LeaseSnapshot(Event, frozen=True, tag=69):
    """One open lease, with (consumer, request id, settle) of each rank."""

    number: int
    generation: int
    group: str
    split: Split
    step: int
    version: PolicyVersion
    sequences: int
    shards: tuple[tuple[int, ...], ...]
    short: bool
    rewound: bool
    parts: tuple[tuple[str, str, Settle | None], ...]
    tokens: int = 0
    moments: dict[str, Moments] = {}
    window: int = 0


class EndedLeaseSnapshot(Event, frozen=True, tag=70):
    """A remembered settled lease for repeated requests."""

    number: int
    generation: int
    step: int
    settles: tuple[Settle, ...]
    requests: tuple[tuple[str, str], ...]


class RetainedBatchSnapshot(Event, frozen=True, tag=71):
    """A settled batch that waits for its checkpoint."""

    group: str
    version: PolicyVersion
    stepped: bool
    split: Split
    shards: tuple[tuple[int, ...], ...]
    states: tuple[tuple[str, ...], ...]
    short: bool
    moments: dict[str, Moments] = {}


class RewoundBatchSnapshot(Event, frozen=True, tag=72):
    """A batch on the rewind queue."""

    group: str
    split: Split
    shards: tuple[tuple[int, ...], ...]
    short: bool
    moments: dict[str, Moments] = {}


class LedgerSnapshot(Event, frozen=True, tag=73):
    """The ledger's counts, by state."""

    accepted: int
    rewound: int
    lost: int
    forgotten: int
    counts: dict[str, int]
    reasons: dict[str, int]
    lost_of_collapsed: int


class ConsumerSnapshot(Event, frozen=True, tag=74):
    """One registered consumer."""

    consumer: str
    group: str
    rank: int
    world_size: int
    generation: int
    progress: int
    settled_step: int = -1


class RunSnapshot(Event, frozen=True, tag=75):
    """The run as its trainer registered it, the policy, and the forks of incarnations."""

    info: RunInfo
    owner: str
    pulled: int
    policy: PolicyVersion
    forks: tuple[tuple[int, PolicyVersion], ...]
    checkpointing: tuple[str, ...]
    resumed: tuple[tuple[str, PolicyVersion, tuple[str, ...]], ...]
    pending: PolicyVersion | None = None
    """The version at which a trainer resumed that has pulled nothing since."""
    pulled_tokens: int = 0
    recent: tuple[int, ...] = ()
    """Sequences of the last batches pulled by tokens."""
    settled: tuple[tuple[str, PolicyVersion], ...] = ()
    """The policy that each consumer group has settled or resumed at."""
    void: tuple[tuple[str, Split, int, int, int], ...] = ()
    """Void settlements: consumer, split, lease, its generation, and step."""


class EndedGroupsSnapshot(Event, frozen=True, tag=76):
    """Identities of ended groups, in the order of their end: the same group is not accepted again."""

    identities: tuple[int, ...]


class TaskSubmitted(Event, frozen=True, tag=30):
    """A task was submitted, and is queued."""

    id: str
    env: str
    split: Split
    payload: bytes
    size: int
    deadline_s: float
    priority: int
    at: float
    """Wall-clock seconds of the submission; the deadline counts from it."""
    index: int = GIVEN
    greedy: bool = False


class TaskTaken(Event, frozen=True, tag=31):
    """A worker took a task."""

    id: str
    worker: str
    session: int
    slot: int
    number: int
    lease_s: float


class TaskReturned(Event, frozen=True, tag=32):
    """A task was returned: to its old place in the queue, or as failed after too many deliveries."""

    id: str
    reason: str
    tried: bool = True
    failed: bool = False


class TaskEnded(Event, frozen=True, tag=33):
    """A task expired or was cancelled."""

    id: str
    state: TaskState
    reason: str


class TaskQueueSnapshot(Event, frozen=True, tag=90):
    """Counts of tasks, in the order of `TaskCounts`; it comes before every `TaskSnapshot`."""

    next_order: int
    counts: dict[str, int]


class TaskSnapshot(Event, frozen=True, tag=91):
    """One task. Ended tasks come in the order in which they ended, without payload."""

    submitted: TaskSubmitted
    order: int
    digest: bytes
    state: TaskState
    deliveries: int
    worker: str
    session: int
    slot: int
    number: int
    lease_s: float
    group_id: str
    reason: str
    sequences: int = 0
    rewards: RewardSummary = RewardSummary()
