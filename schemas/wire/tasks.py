"""Tasks: prompts that a trainer submits, and their outcome.

A trainer submits tasks, a worker of their environment takes them under a lease, and a group with the task's id in its
header answers one. All requests are repeatable: the same submission, take or cancellation again gives the same reply
and changes nothing.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Count, Message, Name, RewardSummary, Split

PAYLOAD_LIMIT_BYTES = 256 << 10
"""Largest payload, encoded as msgpack. Store larger data elsewhere and submit its address."""

SUBMIT_LIMIT = 256
"""Most tasks of one request."""

ASK_LIMIT = 1024
"""Most task ids of one query."""

TAKE_LIMIT = 256
"""Most tasks in one reply to a worker."""

LEASE_LIMIT_S = 86_400.0
"""Longest lease of a task."""

REASON_CHARS = 500


GIVEN: Final = -1
"""Index of a task that is given by its payload."""

TaskIndex = Annotated[int, Meta(ge=GIVEN, le=(1 << 62))]
"""Number of a task in the task space of its environment, or `GIVEN`."""

TaskId = Annotated[str, Meta(min_length=1, max_length=128)]

Reason = Annotated[str, Meta(max_length=REASON_CHARS)]

_Patience = Annotated[float, Meta(ge=0.0, le=60.0)]


class TaskState(StrEnum):
    """State of a task."""

    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    """The broker accepted its group."""
    FAILED = "failed"
    """Every allowed delivery of it failed."""
    EXPIRED = "expired"
    """Its deadline passed. A worker that has it may still answer: the group is trained on and counts as late."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """It was never submitted, or the broker has forgotten it since it ended."""


class NewTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A submitted task.

    Attributes:
        id: Unique in the run; the group that answers it has it as `GroupHeader.task`.
        env: Environment of its workers.
        payload: Any value as msgpack; only the environment reads it.
        split: Split of its group.
        size: Number of sequences; 0 uses the environment's `group_size`.
        deadline_s: Seconds after its first submission at which it expires; 0 is never.
        priority: Tasks of higher priority are taken first.
        index: Number of the task in the environment's task space, which the environment draws by; `GIVEN` if the
            payload is the task.
        greedy: Sample with temperature 0, whatever the environment asks for.
    """

    id: TaskId
    env: Name
    payload: Annotated[bytes, Meta(max_length=PAYLOAD_LIMIT_BYTES)]
    split: Split = Split.TRAIN
    size: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    deadline_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    index: TaskIndex = GIVEN
    greedy: bool = False


class TaskStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Status of one task.

    Attributes:
        id: Id of the task.
        state: State of the task.
        worker: Worker with its lease, now or last.
        deliveries: Number of times it was delivered.
        group_id: Group that answered it; in another state than `done`, the group that came too late.
        reason: Reason why it failed, expired or was cancelled, or of its last return to the queue.
        sequences: Sequences of the group that answered it; 0 unless `done`.
        rewards: Moments and range of the scores of that group.
    """

    id: TaskId
    state: TaskState
    worker: str = ""
    deliveries: Count = 0
    group_id: str = ""
    reason: str = ""
    sequences: Count = 0
    rewards: RewardSummary = RewardSummary()

    @property
    def over(self) -> bool:
        """Whether the task has ended; an unknown one counts as ended."""
        return self.state not in {TaskState.QUEUED, TaskState.LEASED}


class SubmitTasks(Message, tag="submit_tasks", frozen=True, kw_only=True):
    """Submit tasks, all or none. The reply is `TaskStates` or `TasksFull`."""

    tasks: Annotated[tuple[NewTask, ...], Meta(min_length=1, max_length=SUBMIT_LIMIT)]
    run: Name = "default"


class CancelTasks(Message, tag="cancel_tasks", frozen=True, kw_only=True):
    """Cancel open tasks. A worker with one continues, unless it answers an evaluation. The reply is `TaskStates`."""

    ids: Annotated[tuple[TaskId, ...], Meta(max_length=ASK_LIMIT)]
    reason: Reason = "asked"


class AwaitTasks(Message, tag="await_tasks", frozen=True, kw_only=True):
    """Ask for the status of tasks. The reply `TaskStates` comes once `enough` of them ended (0: all), or after
    `wait_s`."""

    ids: Annotated[tuple[TaskId, ...], Meta(max_length=ASK_LIMIT)]
    enough: Count = 0
    wait_s: _Patience = 0.0


class TakeTasks(Message, tag="take_tasks", frozen=True, kw_only=True):
    """Take tasks of the session's environment and split under a lease.

    The reply comes once there is a task, or after `wait_s`.

    Attributes:
        producer: Name of the producer.
        session: Its session.
        slot: Number of the producer's taker; each has one request in progress.
        number: Number of the request, growing for each slot: a repeated number gets the same tasks, a lower one none.
        count: Most tasks to take; 0 only fetches the tasks already leased to this number.
        wait_s: Longest wait, in seconds.
        lease_s: Lease in seconds; an unanswered task then returns to the queue.
    """

    producer: Name
    session: Count
    slot: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    number: Annotated[int, Meta(ge=1, le=1 << 62)]
    count: Annotated[int, Meta(ge=0, le=TAKE_LIMIT)] = 1
    wait_s: _Patience = 0.0
    lease_s: Annotated[float, Meta(gt=0.0, le=LEASE_LIMIT_S)] = 600.0


class HandBack(Message, tag="hand_back", frozen=True, kw_only=True):
    """Return a failed task to the queue. Does nothing if this session has no lease of it.

    `tried` is False for an unstarted task: it does not count as delivered.
    """

    producer: Name
    session: Count
    id: TaskId
    reason: Reason = ""
    tried: bool = True


class TaskStates(Message, tag="task_states", frozen=True, kw_only=True):
    """Status of the tasks, in the order of the request."""

    tasks: tuple[TaskStatus, ...]


class TasksFull(Message, tag="tasks_full", frozen=True, kw_only=True):
    """No task was accepted, because too many are open. `retry_s` is the time until there may be room."""

    detail: str
    retry_s: float


class TakenTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task for a worker. `left_s` is the time to its deadline in seconds, 0 without one.

    Attributes:
        index: Number of the task in the environment's task space, or `GIVEN`.
        greedy: Sample with temperature 0.
    """

    id: TaskId
    payload: bytes
    size: Count = 0
    left_s: float = 0.0
    deliveries: Count = 1
    index: TaskIndex = GIVEN
    greedy: bool = False


class TakenTasks(Message, tag="taken_tasks", frozen=True, kw_only=True):
    """Tasks leased to the session; empty if there were none in time."""

    tasks: tuple[TakenTask, ...] = ()


class TaskCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Numbers of tasks by state, and of groups that did not answer the task in their header.

    Attributes:
        late: Groups of tasks that had already expired, failed or been cancelled. They are queued like others.
        extra: Groups of tasks that another group had already answered.
        unmatched: Groups of unknown tasks, or of tasks of another environment.
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


TaskRequest = SubmitTasks | CancelTasks | AwaitTasks | TakeTasks | HandBack

TaskReply = TaskStates | TasksFull | TakenTasks
