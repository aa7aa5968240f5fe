"""Settled batches kept for a trainer that may come back, and those on their way back.

A batch is kept, in the order of settlement, until a checkpoint covers its step. When the trainer resumes at a version,
the batches after it go on the rewind queue and are pulled again before anything else, in the same composition and
order. Their bytes belong to `retain_bytes`, not to the queue's mark. A trainer that has never spoken of a checkpoint is
not kept for without end: of its batches the oldest go above `FORGET_PARTS` times `retain_bytes`.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.services.broker.groups import StoredGroup, Stream
from rolloutmq.services.broker.ledger import State

FORGET_PARTS: Final = 2
"""Room for a trainer that was asked for a checkpoint and is about to make its first."""


class Kept(msgspec.Struct, eq=False, kw_only=True):
    """One settled batch.

    Attributes:
        stepped: The trainer took a step with it; a batch without a signal is kept for the order only.
        states: The state of each group of `shards`, in their order.
    """

    version: PolicyVersion
    stepped: bool
    split: Split
    shards: list[list[StoredGroup]]
    states: list[list[State]]
    short: bool = False

    def members(self) -> Iterator[tuple[StoredGroup, State]]:
        for groups, states in zip(self.shards, self.states, strict=True):
            yield from zip(groups, states, strict=True)

    @property
    def nbytes(self) -> int:
        return sum(group.header.nbytes for groups in self.shards for group in groups)


class Returning(msgspec.Struct, eq=False):
    """One batch on the rewind queue."""

    shards: list[list[StoredGroup]]
    short: bool

    def apart(self) -> "list[Returning]":
        """Return its groups as batches of their own, in their order: one of them may be poison."""
        ordered = sorted(self.groups, key=lambda group: group.order)
        return [Returning([[group]], short=True) for group in ordered]

    @property
    def groups(self) -> list[StoredGroup]:
        return [group for groups in self.shards for group in groups]


class Retained:
    """Kept batches of each consumer group, and the rewind queue of each stream."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[Kept]] = {}
        self._returning: dict[Stream, deque[Returning]] = {}
        self._checkpointing: set[str] = set()
        self.nbytes = 0
        """Bytes of kept batches and of those that return or were leased again."""

    def keep(self, group: str, batch: Kept) -> None:
        """Keep a settled batch. The caller has counted its bytes by `charge` if it was not rewound."""
        self._kept.setdefault(group, deque()).append(batch)

    def charge(self, nbytes: int) -> None:
        """Count bytes that are kept from now on, or let go with a negative number."""
        self.nbytes += nbytes

    def covered(self, group: str, version: PolicyVersion) -> list[Kept]:
        """Remove and return the batches that a checkpoint at `version` covers."""
        self._checkpointing.add(group)
        kept = self._kept.get(group, deque())
        covered = []
        while kept and kept[0].version.step <= version.step:
            covered.append(kept.popleft())
        return covered

    def after(self, group: str, version: PolicyVersion) -> tuple[list[Kept], list[Kept]]:
        """Remove all batches and return them as (covered, after `version`), each in order.

        A batch without a step counts as after if no step up to `version` follows it.
        """
        self._checkpointing.add(group)
        kept = list(self._kept.pop(group, ()))
        cut = max(
            (i + 1 for i, b in enumerate(kept) if b.stepped and b.version.step <= version.step),
            default=0,
        )
        return kept[:cut], kept[cut:]

    def surplus(self, group: str, retain_bytes: int) -> int:
        """Return how many of the oldest batches of a trainer without checkpoints are too many."""
        if group in self._checkpointing:
            return 0
        over = self.nbytes - FORGET_PARTS * retain_bytes
        count = 0
        for batch in self._kept.get(group, ()):
            if over <= 0:
                break
            over -= batch.nbytes
            count += 1
        return count

    def send_back(self, stream: Stream, batches: Iterable[Returning]) -> None:
        """Put batches at the head of the rewind queue, in their order."""
        queue = self._returning.setdefault(stream, deque())
        queue.extendleft(reversed(list(batches)))

    def append(self, stream: Stream, batch: Returning) -> None:
        """Put a batch at the end of the rewind queue."""
        self._returning.setdefault(stream, deque()).append(batch)

    def next_return(self, stream: Stream) -> Returning | None:
        """Remove and return the next batch that comes again."""
        queue = self._returning.get(stream)
        return queue.popleft() if queue else None

    def remove(self, group: StoredGroup) -> bool:
        """Take one group out of the rewind queue; False if it is not there."""
        for queue in self._returning.values():
            for batch in queue:
                for groups in batch.shards:
                    if group in groups:
                        groups.remove(group)
                        return True
        return False

    def drop_empty(self) -> None:
        """Forget batches on the rewind queue that have no group left."""
        for stream, queue in self._returning.items():
            self._returning[stream] = deque(batch for batch in queue if batch.groups)

    def returning(self) -> Iterator[tuple[Stream, Returning]]:
        """Yield every batch on a rewind queue, in their order."""
        return ((stream, batch) for stream, queue in self._returning.items() for batch in queue)

    def kept(self) -> Iterator[tuple[str, Kept]]:
        """Yield every kept batch with its consumer group, in their order."""
        return ((group, batch) for group, queue in self._kept.items() for batch in queue)

    @property
    def checkpointing(self) -> set[str]:
        """Consumer groups that have spoken of a checkpoint."""
        return self._checkpointing

    def oldest(self, group: str, count: int) -> Iterator[Kept]:
        """Remove and yield the oldest kept batches of a consumer group."""
        kept = self._kept.get(group)
        while kept and count > 0:
            count -= 1
            yield kept.popleft()

    def all_returning(self) -> Iterator[Returning]:
        return (batch for queue in self._returning.values() for batch in queue)

    def all_kept(self) -> Iterator[Kept]:
        return (batch for queue in self._kept.values() for batch in queue)

    def clear(self) -> None:
        """Forget all batches and their bytes."""
        self._kept.clear()
        self._returning.clear()
        self._checkpointing.clear()
        self.nbytes = 0
