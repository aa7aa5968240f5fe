"""Tasks: prompts that a trainer brings itself, and what became of them.

A trainer submits tasks, a worker of their environment takes them under a lease, and the group that names a task in
its header settles it. All of these requests may be repeated: the same task again, the same take again, the same
cancellation again give the same answer and change nothing.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from rolloutmq.schemas.envelope import Count, Name, Split
from rolloutmq.schemas.errors import RetryableError, UsageError
from rolloutmq.schemas.message import Message

PAYLOAD_LIMIT_BYTES = 256 << 10
"""Largest payload, as msgpack. What is larger belongs into a store of its own, and its address here."""
SUBMIT_LIMIT = 256
"""Most tasks of one request."""
ASK_LIMIT = 1024
"""Most tasks that one request may ask for."""
TAKE_LIMIT = 256
"""Most tasks that a worker takes at once."""
LEASE_LIMIT_S = 86_400.0
"""Longest lease of a task."""
REASON_CHARS = 500

TaskId = Annotated[str, Meta(min_length=1, max_length=128)]
Reason = Annotated[str, Meta(max_length=REASON_CHARS)]
_Patience = Annotated[float, Meta(ge=0.0, le=60.0)]


class TaskState(StrEnum):
    """Where a task is."""

    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    """A group that answers it was accepted."""
    FAILED = "failed"
    """It was handed out as often as may be, and came back each time."""
    EXPIRED = "expired"
    """Its deadline passed. A worker that has it may still answer: the group is trained on, and counted as late."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """Never submitted, or over for so long that it is forgotten."""


class NewTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task as it is submitted.

    Attributes:
        id: Unique in the run; the group that answers it has it as `GroupHeader.task`.
        payload: msgpack of any value; only the environment looks into it.
        size: Sequences wanted; 0 leaves it to the environment's `group_size`.
        deadline_s: Seconds from its first submission after which it is of no use any more; 0 is never.
        priority: The higher goes first.
    """

    id: TaskId
    env: Name
    payload: Annotated[bytes, Meta(max_length=PAYLOAD_LIMIT_BYTES)]
    split: Split = Split.TRAIN
    size: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    deadline_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0


class TaskStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One task as it stands.

    Attributes:
        worker: Who has it, or had it last.
        deliveries: How many times it was handed out.
        group_id: The group that settled it. Beside another state than `done`: the group that came too late for it.
        reason: Why it is failed, expired or cancelled, or why it came back last.
    """

    id: TaskId
    state: TaskState
    worker: str = ""
    deliveries: Count = 0
    group_id: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether it stays as it is; an unknown one does, too."""
        return self.state not in {TaskState.QUEUED, TaskState.LEASED}


class SubmitTasks(Message, tag="submit_tasks", frozen=True, kw_only=True):
    """Submit tasks, all of them or none. Answered by `TaskStates` or by `TasksFull`."""

    tasks: Annotated[tuple[NewTask, ...], Meta(min_length=1, max_length=SUBMIT_LIMIT)]
    run: Name = "default"


class CancelTasks(Message, tag="cancel_tasks", frozen=True, kw_only=True):
    """Cancel tasks that are not over; one that a worker has is not called back from it. Answered by `TaskStates`."""

    ids: Annotated[tuple[TaskId, ...], Meta(max_length=ASK_LIMIT)]
    reason: Reason = "asked"


class AwaitTasks(Message, tag="await_tasks", frozen=True, kw_only=True):
    """Ask how tasks stand; answered by `TaskStates` when `enough` of them are over (0: all), or after `wait_s`."""

    ids: Annotated[tuple[TaskId, ...], Meta(max_length=ASK_LIMIT)]
    enough: Count = 0
    wait_s: _Patience = 0.0


class TakeTasks(Message, tag="take_tasks", frozen=True, kw_only=True):
    """Take tasks of the session's environment and split, under a lease; answered when there are some or after `wait_s`.

    Attributes:
        slot: Which of the producer's takers asks; each has one request under way.
        number: Of the request, growing by slot: the same number again gets the same tasks, a lower one nothing.
        count: Most tasks to take; 0 only asks again for what the number got, as one does who stops waiting.
        lease_s: A task that is not answered within that goes back.
    """

    producer: Name
    session: Count
    slot: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    number: Annotated[int, Meta(ge=1, le=1 << 62)]
    count: Annotated[int, Meta(ge=0, le=TAKE_LIMIT)] = 1
    wait_s: _Patience = 0.0
    lease_s: Annotated[float, Meta(gt=0.0, le=LEASE_LIMIT_S)] = 600.0


class HandBack(Message, tag="hand_back", frozen=True, kw_only=True):
    """Give a task back that came to nothing. One that is not leased to this session is left as it is.

    `tried` is False for one that was never begun: it does not count as handed out.
    """

    producer: Name
    session: Count
    id: TaskId
    reason: Reason = ""
    tried: bool = True


class TaskStates(Message, tag="task_states", frozen=True, kw_only=True):
    """How tasks stand, in the order in which they were named."""

    tasks: tuple[TaskStatus, ...]


class TasksFull(Message, tag="tasks_full", frozen=True, kw_only=True):
    """None of the tasks was taken in: there are too many open ones. `retry_s` is when there may be room."""

    detail: str
    retry_s: float


class TakenTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task as a worker gets it. `left_s` are the seconds to its deadline, 0 if there is none."""

    id: TaskId
    payload: bytes
    size: Count = 0
    left_s: float = 0.0
    deliveries: Count = 1


class TakenTasks(Message, tag="taken_tasks", frozen=True, kw_only=True):
    """Tasks that are the session's now; none if there were none in time."""

    tasks: tuple[TakenTask, ...] = ()


class TaskCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tasks by state, and groups that did not settle the task that they name.

    Attributes:
        late: Groups of tasks that had expired, failed or been cancelled by then. They are in the stream like others.
        extra: Groups of tasks that another group had settled.
        unmatched: Groups that name a task which is not known, or is of another environment.
    """

    queued: Count = 0
    leased: Count = 0
    done: Count = 0
    failed: Count = 0
    expired: Count = 0
    cancelled: Count = 0
    late: Count = 0
    extra: Count = 0
    unmatched: Count = 0


class TasksFullError(RetryableError):
    """Too many tasks are open; some have to come to an end first."""

    def __init__(self, retry_s: float, detail: str) -> None:
        self.retry_s = retry_s
        """When there may be room, in seconds, as fast as tasks have ended lately."""
        self.detail = detail

    def __str__(self) -> str:
        return f"no room for more tasks, try again in {self.retry_s:.1f} s: {self.detail}"


class InvalidTaskError(UsageError):
    """A task that cannot travel."""

    def __init__(self, task: str, problem: str) -> None:
        self.task = task
        self.problem = problem

    def __str__(self) -> str:
        return f"task {self.task}: {self.problem}"


TaskRequest = SubmitTasks | CancelTasks | AwaitTasks | TakeTasks | HandBack
TaskReply = TaskStates | TasksFull | TakenTasks
