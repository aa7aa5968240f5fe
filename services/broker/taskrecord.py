"""One submitted task as the broker holds it, and what tells its content from that of another."""

import hashlib
import math
from typing import Final

import msgspec

from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.tasks import NewTask, TaskState, TaskStatus
from rolloutmq.services.broker.journal.taskfacts import TaskItem, TaskSubmitted

Line = tuple[str, Split]
"""Environment and split of a task; only its workers get it."""
_DIGEST_BYTES: Final = 16


class StoredTask(msgspec.Struct, kw_only=True, eq=False):
    """One task; `submitted` loses its payload when it is over.

    Attributes:
        order: Number of its submission.
        digest: Of its content: the same id with other content is another task.
        deadline_at, lease_until: Monotonic seconds, infinite if there is none.
        worker, session, slot, number: Who took it last, and with which request.
    """

    submitted: TaskSubmitted
    order: int
    digest: bytes
    deadline_at: float = math.inf
    state: TaskState = TaskState.QUEUED
    deliveries: int = 0
    worker: str = ""
    session: int = 0
    slot: int = 0
    number: int = 0
    lease_s: float = 0.0
    lease_until: float = math.inf
    group_id: str = ""
    reason: str = ""

    @property
    def id(self) -> str:
        return self.submitted.id

    @property
    def line(self) -> Line:
        return self.submitted.env, self.submitted.split

    @property
    def nbytes(self) -> int:
        return len(self.submitted.payload)

    @property
    def rank(self) -> tuple[int, int, str]:
        """Its place among others: the lowest goes first."""
        return -self.submitted.priority, self.order, self.id

    def status(self) -> TaskStatus:
        return TaskStatus(
            id=self.id,
            state=self.state,
            worker=self.worker,
            deliveries=self.deliveries,
            group_id=self.group_id,
            reason=self.reason,
        )

    def item(self) -> TaskItem:
        return TaskItem(
            submitted=self.submitted,
            order=self.order,
            digest=self.digest,
            state=self.state,
            deliveries=self.deliveries,
            worker=self.worker,
            session=self.session,
            slot=self.slot,
            number=self.number,
            lease_s=self.lease_s,
            group_id=self.group_id,
            reason=self.reason,
        )


def digest_of(new: NewTask) -> bytes:
    """Return what tells the content of a task from another."""
    return hashlib.blake2b(msgspec.msgpack.encode(new), digest_size=_DIGEST_BYTES).digest()


def fact_of(new: NewTask, wall: float) -> TaskSubmitted:
    return TaskSubmitted(
        new.id, new.env, new.split, new.payload, new.size, new.deadline_s, new.priority, wall
    )


def new_of(fact: TaskSubmitted) -> NewTask:
    return NewTask(
        id=fact.id,
        env=fact.env,
        payload=fact.payload,
        split=fact.split,
        size=fact.size,
        deadline_s=fact.deadline_s,
        priority=fact.priority,
    )
