"""What the broker writes down of tasks. That a group settles one is in the acceptance of the group, nowhere else."""

from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.tasks import TaskState
from rolloutmq.services.broker.journal.facts import Fact


class TaskSubmitted(Fact, frozen=True, tag=30):
    """A task was submitted, and is queued."""

    id: str
    env: str
    split: Split
    payload: bytes
    size: int
    deadline_s: float
    priority: int
    at: float
    """Wall-clock seconds, from which the deadline counts."""


class TaskTaken(Fact, frozen=True, tag=31):
    """A worker took a task."""

    id: str
    worker: str
    session: int
    slot: int
    number: int
    lease_s: float


class TaskReturned(Fact, frozen=True, tag=32):
    """A task came back: to its old place in the queue, or as failed if it was handed out too often."""

    id: str
    reason: str
    tried: bool = True
    failed: bool = False


class TaskEnded(Fact, frozen=True, tag=33):
    """A task expired or was cancelled."""

    id: str
    state: TaskState
    reason: str


class TasksItem(Fact, frozen=True, tag=90):
    """Item of a snapshot: what was counted of tasks, in the order of `TaskCounts`; it comes before every `TaskItem`."""

    next_order: int
    counts: dict[str, int]


class TaskItem(Fact, frozen=True, tag=91):
    """Item of a snapshot: one task. Those that are over come in the order in which they ended, without payload."""

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
