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
from rolloutmq.services.broker.forming import Stream
from rolloutmq.services.broker.groups import StoredGroup
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

    def surplus(self, group: str, retain_bytes: int) -> Iterator[Kept]:
        """Remove and yield the oldest batches of a trainer without checkpoints, as far as they are too many.

        The caller lets their bytes go by `charge`.
        """
        kept = self._kept.get(group)
        while kept and group not in self._checkpointing and self.nbytes > FORGET_PARTS * retain_bytes:
            yield kept.popleft()

    def send_back(self, stream: Stream, batches: Iterable[Returning]) -> None:
        """Put batches at the head of the rewind queue, in their order."""
        queue = self._returning.setdefault(stream, deque())
        queue.extendleft(reversed(list(batches)))

    def next_return(self, stream: Stream) -> Returning | None:
        """Remove and return the next batch that comes again."""
        queue = self._returning.get(stream)
        return queue.popleft() if queue else None

    def all_returning(self) -> Iterator[Returning]:
        return (batch for queue in self._returning.values() for batch in queue)

    def all_kept(self) -> Iterator[Kept]:
        return (batch for queue in self._kept.values() for batch in queue)

    def uncovered(self) -> Iterator[tuple[str, Kept]]:
        """Yield each batch that waits for a checkpoint, in its order, with its consumer group."""
        return (
            (group, batch) for group in sorted(self._checkpointing) for batch in self._kept.get(group, ())
        )

    def restore(self, group: str, batch: Kept) -> None:
        """Keep a batch that an earlier life of the broker kept, and count its bytes."""
        self._checkpointing.add(group)
        self.keep(group, batch)
        self.charge(batch.nbytes)

    def clear(self) -> None:
        """Forget all batches and their bytes."""
        self._kept.clear()
        self._returning.clear()
        self._checkpointing.clear()
        self.nbytes = 0
