"""The rewind buffer: settled batches retained for a trainer that may resume, and the rewind queues.

A batch is retained, in the order of settlement, until a checkpoint covers its step. When the trainer resumes at a
version, the later batches go on the rewind queue. They are leased before any new batch, in the same composition and
order. Their bytes count against `retain_bytes`, not against the high-water mark.

A trainer that has never committed is not waited for without end: above `FORGET_PARTS` times `retain_bytes` its oldest
batches are forgotten.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.groups import Stream

FORGET_PARTS: Final = 2
"""Leaves room for a trainer about to write its first checkpoint."""


class RetainedBatch(msgspec.Struct, eq=False, kw_only=True):
    """One settled batch.

    Attributes:
        stepped: The trainer took a step with it. A batch without a signal is retained for the order only.
        shares: The groups of each rank that are retained.
        states: The state of each group of `shares`, in their order.
        moments: Moments that the batch brought; see `Lease`.
        nbytes: Bytes of its groups.
        trained: Number of its trained groups.
        settled_at: When it was settled, wall-clock seconds; 0 if that was in an earlier life of the broker.
    """

    version: PolicyVersion
    stepped: bool
    split: Split
    shares: tuple[BatchShare, ...]
    states: list[list[GroupState]]
    short: bool = False
    moments: dict[str, Moments] = {}
    settled_at: float = 0.0
    nbytes: int = 0
    trained: int = 0

    def __post_init__(self) -> None:
        for share, states in zip(self.shares, self.states, strict=True):
            self.nbytes += share.nbytes
            self.trained += states.count(GroupState.TRAINED)

    @property
    def shards(self) -> list[list[StoredGroup]]:
        """The groups of each share, in lists of their own."""
        return [[*share.groups] for share in self.shares]

    def members(self) -> Iterator[tuple[StoredGroup, GroupState]]:
        for share, states in zip(self.shares, self.states, strict=True):
            yield from zip(share.groups, states, strict=True)


class RewoundBatch(msgspec.Struct, eq=False):
    """One batch on the rewind queue."""

    shards: list[list[StoredGroup]]
    short: bool
    moments: dict[str, Moments] = {}
    """Moments that the batch brought and brings again: the repeated step is then the same."""

    def split_groups(self) -> "list[RewoundBatch]":
        """Return a batch for each group, in their order: one of them may be poison."""
        ordered = sorted(self.groups, key=lambda group: group.order)
        return [RewoundBatch([[group]], short=True, moments=self.moments) for group in ordered]

    @property
    def groups(self) -> list[StoredGroup]:
        return [group for groups in self.shards for group in groups]


class RewindBuffer:
    """Retained batches of each consumer group, and the rewind queue of each stream."""

    def __init__(self) -> None:
        self._retained: dict[str, deque[RetainedBatch]] = {}
        self._queues: dict[Stream, deque[RewoundBatch]] = {}
        self._checkpointing: set[str] = set()
        self.nbytes = 0
        """Bytes of retained batches, of rewound ones, and of rewound ones leased again."""

    def retain(self, group: str, batch: RetainedBatch) -> None:
        """Retain a settled batch. The caller has counted its bytes by `charge` if it was not rewound."""
        self._retained.setdefault(group, deque()).append(batch)

    def charge(self, nbytes: int) -> None:
        """Count retained bytes; a negative number counts them out."""
        self.nbytes += nbytes

    def pop_covered(self, group: str, version: PolicyVersion) -> list[RetainedBatch]:
        """Remove and return the batches covered by a checkpoint at `version`."""
        self._checkpointing.add(group)
        kept = self._retained.get(group, deque())
        covered = []
        while kept and kept[0].version.step <= version.step:
            covered.append(kept.popleft())
        return covered

    def pop_after(
        self, group: str, version: PolicyVersion
    ) -> tuple[list[RetainedBatch], list[RetainedBatch]]:
        """Remove all batches and return them as (covered, after `version`), each in order.

        A batch without a step counts as covered only if a step up to `version` follows it.
        """
        self._checkpointing.add(group)
        kept = list(self._retained.pop(group, ()))
        cut = max(
            (i + 1 for i, b in enumerate(kept) if b.stepped and b.version.step <= version.step),
            default=0,
        )
        return kept[:cut], kept[cut:]

    def steps_after(self, group: str, version: PolicyVersion) -> int:
        """Return how many steps after `version` are retained."""
        kept = self._retained.get(group, ())
        return len({one.version.step for one in kept if one.stepped and one.version.step > version.step})

    def surplus(self, group: str, retain_bytes: int) -> int:
        """Return how many of the oldest batches of a trainer without checkpoints exceed the limit."""
        if group in self._checkpointing:
            return 0
        over = self.nbytes - FORGET_PARTS * retain_bytes
        count = 0
        for batch in self._retained.get(group, ()):
            if over <= 0:
                break
            over -= batch.nbytes
            count += 1
        return count

    def push_front(self, stream: Stream, batches: Iterable[RewoundBatch]) -> None:
        """Put batches at the head of the rewind queue, in their order."""
        queue = self._queues.setdefault(stream, deque())
        queue.extendleft(reversed(list(batches)))

    def append(self, stream: Stream, batch: RewoundBatch) -> None:
        """Put a batch at the end of the rewind queue."""
        self._queues.setdefault(stream, deque()).append(batch)

    def head(self, stream: Stream) -> RewoundBatch | None:
        """Return the head of the rewind queue."""
        queue = self._queues.get(stream)
        return queue[0] if queue else None

    def has_next(self, stream: Stream) -> bool:
        """Return whether a batch is on the rewind queue."""
        return bool(self._queues.get(stream))

    def take(self, stream: Stream, orders: list[int], *, window: bool) -> RewoundBatch | None:
        """Remove and return the batch of exactly these groups; None if it is not there.

        It is the head of the queue; in a window it may have been accused, and have come before its turn.
        """
        queue = self._queues.get(stream, deque())
        due = queue if window else list(queue)[:1]
        found = next((one for one in due if sorted(group.order for group in one.groups) == orders), None)
        if found is not None:
            queue.remove(found)
        return found

    def pop_next(self, stream: Stream) -> RewoundBatch | None:
        """Remove and return the head of the rewind queue."""
        queue = self._queues.get(stream)
        return queue.popleft() if queue else None

    def remove(self, group: StoredGroup) -> bool:
        """Remove one group from the rewind queue; False if it is not there."""
        for queue in self._queues.values():
            for batch in queue:
                for groups in batch.shards:
                    if group in groups:
                        groups.remove(group)
                        return True
        return False

    def drop_empty(self) -> None:
        """Drop rewound batches that have no group left."""
        for stream, queue in self._queues.items():
            self._queues[stream] = deque(batch for batch in queue if batch.groups)

    def queued(self) -> Iterator[tuple[Stream, RewoundBatch]]:
        """Yield every batch on a rewind queue, in their order."""
        return ((stream, batch) for stream, queue in self._queues.items() for batch in queue)

    def retained(self) -> Iterator[tuple[str, RetainedBatch]]:
        """Yield every retained batch with its consumer group, in their order."""
        return ((group, batch) for group, queue in self._retained.items() for batch in queue)

    @property
    def checkpointing(self) -> set[str]:
        """Consumer groups that have committed a checkpoint."""
        return self._checkpointing

    def pop_oldest(self, group: str, count: int) -> Iterator[RetainedBatch]:
        """Remove and yield the oldest retained batches of a consumer group."""
        kept = self._retained.get(group)
        while kept and count > 0:
            count -= 1
            yield kept.popleft()

    def all_queued(self) -> Iterator[RewoundBatch]:
        return (batch for queue in self._queues.values() for batch in queue)

    def all_retained(self) -> Iterator[RetainedBatch]:
        return (batch for queue in self._retained.values() for batch in queue)

    def clear(self) -> None:
        self._retained.clear()
        self._queues.clear()
        self._checkpointing.clear()
        self.nbytes = 0
