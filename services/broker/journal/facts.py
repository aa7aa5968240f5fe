"""What the broker writes down: each change of its state as one fact, and the whole state as items of a snapshot.

A log of facts begins with a snapshot; its facts, applied in their order, lead to the present. Groups are named by
their `order`, the number of their acceptance in this run. The form is msgpack arrays that begin with the tag: fields
may be added at the end with a default, and a tag is never used twice.
"""

import msgspec

from rolloutmq.schemas.delivery import RunInfo, Settle
from rolloutmq.schemas.envelope import ColumnTable, GroupHeader, PolicyVersion, Split


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Number of a segment, and the offset of a record in it."""

    segment: int
    offset: int


class GroupMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Meta of a group's record in a segment, which so can be read without anything else."""

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


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """Base of all facts and items."""


class Accepted(Fact, frozen=True, tag=1):
    """A group was accepted, and is queued. `place` is None only in `saved.rmq`, where the record has the same order."""

    order: int
    header: GroupHeader
    env: str
    split: Split
    run: str
    producer: str
    session: int
    at: float
    place: Place | None = None
    requeued: bool = False
    """It was dead and is here again because somebody wants it: it does not expire."""


class Skipped(Fact, frozen=True, tag=2):
    """A number of a session was taken for a group that is here already under another session."""

    session: int
    seq: int
    position: int
    nbytes: int
    group_id: str


class Opened(Fact, frozen=True, tag=3):
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
    """Groups that its process had produced before, under another session."""


class Declared(Fact, frozen=True, tag=4):
    """A session made column tables known."""

    session: int
    tables: tuple[ColumnTable, ...]


class Produced(Fact, frozen=True, tag=5):
    """A session says how many groups it finished, and how many rollouts it gave up."""

    session: int
    produced: int
    abandoned: int
    closed: bool = False


class Joined(Fact, frozen=True, tag=6):
    """A consumer registered; what its former life held was given back before, by facts of its own."""

    consumer: str
    group: str
    rank: int
    world_size: int
    generation: int
    info: RunInfo


class Leased(Fact, frozen=True, tag=7):
    """A step was leased: groups by rank. `again` says that it is the first batch on the rewind queue."""

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
    """The budget of a step that was pulled by tokens; `sequences` is 0 then."""


class Pulled(Fact, frozen=True, tag=8):
    """A rank was handed its part."""

    lease: int
    rank: int
    consumer: str
    request_id: str


class Settles(Fact, frozen=True, tag=9):
    """A rank said what became of its part; the last one ends the lease."""

    settle: Settle


class Lost(Fact, frozen=True, tag=10):
    """A lease went back; `why` is for people. `recalled`: by a rewind, whose fact follows."""

    lease: int
    failed: bool
    why: str
    recalled: bool = False
    apart: bool = False
    """The batch comes again in batches of one group."""


class Dropped(Fact, frozen=True, tag=11):
    """A queued or leased group left the stream untrained."""

    order: int
    state: str
    """`expired`, `dead` or `discarded`."""
    reason: str


class Committed(Fact, frozen=True, tag=12):
    """A checkpoint of a consumer group covers every step up to `version`."""

    group: str
    version: PolicyVersion


class Forgot(Fact, frozen=True, tag=13):
    """The oldest `batches` of a consumer group are no longer kept for a checkpoint that never comes."""

    group: str
    batches: int


class Rewound(Fact, frozen=True, tag=14):
    """A trainer resumed at `version`: the batches after it come again."""

    group: str
    version: PolicyVersion
    consumer: str


class Requeued(Fact, frozen=True, tag=15):
    """A dead group is queued again by hand: it counts as `discarded(requeued)`, and its next acceptance follows."""

    order: int


class Disconnected(Fact, frozen=True, tag=16):
    """An environment left."""

    env: str


class WasReset(Fact, frozen=True, tag=17):
    """The run was forgotten: what was queued or leased is discarded. `lost` are groups of sessions silent by then."""

    reason: str
    lost: int = 0


class Wanted(Fact, frozen=True, tag=18):
    """An operator asked for a number of workers."""

    env: str
    count: int | None


class GpuAsked(Fact, frozen=True, tag=26):
    """An operator cordoned or uncordoned a GPU."""

    gpu: str
    number: int
    cordoned: bool
    reason: str


class Told(Fact, frozen=True, tag=19):
    """A worker was told to drain, or the drain ended with its process; `pid` is 0 if that is not known."""

    worker: str
    reason: str
    pid: int = 0
    told: bool = True


class Began(Fact, frozen=True, tag=20):
    """A life of the broker began, with the state that the snapshot before this says."""

    epoch: int
    pid: int
    durability: str


class Tuned(Fact, frozen=True, tag=21):
    """Somebody changed settings of the living run: dotted key to value. In a snapshot: all that were ever changed."""

    values: dict[str, bool | int | float | str]


# Items of a snapshot.


class Numbers(Fact, frozen=True, tag=64):
    """First item: the numbers that go on."""

    next_order: int
    next_lease: int
    generation: int
    staleness_max: int = 0


class Table(Fact, frozen=True, tag=65):
    """A column table that some group or session names."""

    table: ColumnTable


class LaneItem(Fact, frozen=True, tag=66):
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


class SessionItem(Fact, frozen=True, tag=67):
    """One session that is remembered; those of one producer come oldest first."""

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
    """(number, position) of what is accepted above the gap."""


class GroupItem(Fact, frozen=True, tag=68):
    """One group that still exists. It is queued, unless a later item says where it is."""

    accepted: Accepted
    table: str
    deliveries: int
    failures: int


class LeaseItem(Fact, frozen=True, tag=69):
    """One open lease, and who has which part: (consumer, request id, settle)."""

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


class EndedItem(Fact, frozen=True, tag=70):
    """A settled lease that is remembered for those who ask again."""

    number: int
    generation: int
    step: int
    settles: tuple[Settle, ...]
    requests: tuple[tuple[str, str], ...]


class KeptItem(Fact, frozen=True, tag=71):
    """A settled batch that waits for its checkpoint."""

    group: str
    version: PolicyVersion
    stepped: bool
    split: Split
    shards: tuple[tuple[int, ...], ...]
    states: tuple[tuple[str, ...], ...]
    short: bool


class ReturningItem(Fact, frozen=True, tag=72):
    """A batch on the rewind queue."""

    group: str
    split: Split
    shards: tuple[tuple[int, ...], ...]
    short: bool


class LedgerItem(Fact, frozen=True, tag=73):
    """The ledger's counts, by state."""

    accepted: int
    rewound: int
    lost: int
    forgotten: int
    counts: dict[str, int]
    reasons: dict[str, int]
    lost_of_collapsed: int


class ConsumerItem(Fact, frozen=True, tag=74):
    """One registered consumer."""

    consumer: str
    group: str
    rank: int
    world_size: int
    generation: int
    progress: int


class RunItem(Fact, frozen=True, tag=75):
    """The run as its trainer told it, the policy, and where incarnations forked."""

    info: RunInfo
    owner: str
    pulled: int
    policy: PolicyVersion
    forks: tuple[tuple[int, PolicyVersion], ...]
    checkpointing: tuple[str, ...]
    resumed: tuple[tuple[str, PolicyVersion, tuple[str, ...]], ...]
    pending: PolicyVersion | None = None
    """The version that a trainer resumed at which has pulled nothing since."""
    pulled_tokens: int = 0
    recent: tuple[int, ...] = ()
    """Sequences of the last batches that were pulled by tokens."""
