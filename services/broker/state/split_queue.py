"""Running totals over the lanes of one split, and what batches owe each lane.

No arriving group and no pull looks at every lane: the lanes report each change here. The totals of the weights are
counted again after a change of a weight.

What a lane is owed grows with every batch by its part, also in batches without any of its groups. So the batches are
summed up in `fair_clock`, and a lane adds its part of the difference when it is asked. The part is the minimum share,
if that is more than the share by weight; the other lanes divide the rest by weight.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from rolloutmq.schemas.wire.envelope import GroupHeader
from rolloutmq.services.broker.journal.stored_group import StoredGroup

NO_WEIGHT: Final = 1.0
"""Divisor of a batch if no connected lane has a weight."""


class Totals(Protocol):
    """What some groups are together; see `batch_share.LaneTotals`."""

    @property
    def groups(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class GroupSums(msgspec.Struct, frozen=True):
    """Some groups of one environment, and what they are together."""

    headers: Sequence[GroupHeader]
    groups: int
    sequences: int
    tokens: int
    nbytes: int
    largest: int
    """Bytes of the largest one."""

    @classmethod
    def of(cls, headers: Sequence[GroupHeader]) -> "GroupSums":
        """Return the sums of at least one group."""
        if len(headers) == 1:
            one = headers[0]
            return cls(headers, 1, one.sequences, one.tokens, one.nbytes, one.nbytes)
        sizes = [header.nbytes for header in headers]
        return cls(
            headers,
            len(headers),
            sum([header.sequences for header in headers]),
            sum([header.tokens for header in headers]),
            sum(sizes),
            max(sizes),
        )


class Load:
    """Groups, sequences, tokens and bytes together; also added to the `total` of which it is a part."""

    __slots__ = ("_total", "groups", "nbytes", "sequences", "tokens")

    def __init__(self, total: "Load | None" = None) -> None:
        self._total = total
        self.groups = 0
        self.sequences = 0
        self.tokens = 0
        self.nbytes = 0

    def add(self, group: StoredGroup, sign: int = 1) -> None:
        """Count one group in, or out with `sign` -1."""
        self.groups += sign
        self.sequences += sign * group.header.sequences
        self.tokens += sign * group.header.tokens
        self.nbytes += sign * group.header.nbytes
        if self._total is not None:
            self._total.add(group, sign)

    def count(self, groups: Totals, sign: int = 1) -> None:
        """Count groups together in, or out with `sign` -1."""
        self.groups += sign * groups.groups
        self.sequences += sign * groups.sequences
        self.tokens += sign * groups.tokens
        self.nbytes += sign * groups.nbytes
        if (total := self._total) is not None:
            total.groups += sign * groups.groups
            total.sequences += sign * groups.sequences
            total.tokens += sign * groups.tokens
            total.nbytes += sign * groups.nbytes

    def as_tuple(self) -> tuple[int, int, int, int]:
        return self.groups, self.sequences, self.tokens, self.nbytes


class Member(Protocol):
    """A lane, as far as its split knows it; see `queues.Lane`."""

    number: int
    queued: Load
    part: float
    largest_bytes: int

    @property
    def carry(self) -> float: ...
    @carry.setter
    def carry(self, carry: float) -> None: ...
    @property
    def weight(self) -> float: ...
    @property
    def min_share(self) -> float: ...
    @property
    def connected(self) -> bool: ...
    @property
    def sizes(self) -> Mapping[int, Sized]: ...
    @property
    def suspects(self) -> Sized: ...
    def set_part(self, part: float) -> None: ...
    def owed_after(self, batch: int) -> float: ...


L = TypeVar("L", bound=Member)


class SplitQueue(Generic[L]):
    """The lanes of one split.

    Attributes:
        queued: Groups queued in all lanes.
        stocked: Lanes with queued groups, suspects aside.
        suspected: Lanes with suspects.
        sizes: Number of lanes with queued groups of a size.
        largest_bytes: Bytes of the largest group that any of the lanes has had.
        fair_clock: Sequences (or tokens) of all batches.
        batch: Sequences (or tokens) of the last batch. No lane is owed more, or less than its negative.
        version: Grows with each change of a weight, a minimum share or a connection.
    """

    def __init__(self) -> None:
        self.lanes: list[L] = []
        self._numbered = 0
        self.queued = Load()
        self.stocked: dict[L, None] = {}
        self.suspected: dict[L, None] = {}
        self.sizes: dict[int, int] = {}
        self.largest_bytes = 0
        self.fair_clock = 0.0
        self.batch = float("inf")
        self.version = 0
        self._counted = -1
        self._guaranteed: tuple[L, ...] = ()

    def add(self, lane: L) -> int:
        """Add a lane; return its number, which no other lane had."""
        self.lanes.append(lane)
        self.version += 1
        self._numbered += 1
        return self._numbered

    def remove(self, lane: L) -> None:
        """Remove a lane without groups."""
        self.lanes.remove(lane)
        self.version += 1
        self.largest_bytes = max((one.largest_bytes for one in self.lanes), default=0)

    @property
    def guaranteed(self) -> tuple[L, ...]:
        """The lanes with a minimum share."""
        if self._counted != self.version:
            self._count()
        return self._guaranteed

    def _count(self) -> None:
        """Divide batches anew if a weight, a minimum share or a connection has changed."""
        if self._counted == self.version:
            return
        self._counted = self.version
        self._guaranteed = tuple(lane for lane in self.lanes if lane.min_share)
        weight = sum(lane.weight for lane in self.lanes if lane.connected) or NO_WEIGHT
        by_weight = {lane: lane.weight / weight if lane.connected else 0.0 for lane in self.lanes}
        raised = [lane for lane in self._guaranteed if lane.min_share > by_weight[lane]]
        left = max(0.0, 1.0 - sum(lane.min_share for lane in raised))
        others = 1.0 - sum(by_weight[lane] for lane in raised)
        for lane in self.lanes:
            lane.set_part(by_weight[lane] * left / others if others > 0 else 0.0)
        for lane in raised:
            lane.set_part(lane.min_share)

    def size_came(self, lane: L, size: int) -> None:
        """Note that a lane has groups of a size."""
        self.sizes[size] = self.sizes.get(size, 0) + 1
        self.stocked[lane] = None

    def size_went(self, lane: L, size: int) -> None:
        """Note that a lane has no more groups of a size."""
        self.sizes[size] -= 1
        if not self.sizes[size]:
            del self.sizes[size]
        if not lane.sizes:
            del self.stocked[lane]

    def owed(self, batch: int) -> dict[L, float]:
        """Return what each lane with groups is owed after its part of one more batch."""
        self._count()
        return {lane: lane.owed_after(batch) for lane in self.stocked}

    def served(self, taken: dict[L, int]) -> None:
        """Note a batch: the sequences, or tokens, that each lane gave. Every connected lane is owed its part."""
        if len(self.lanes) < 2:
            return
        self._count()
        batch = float(sum(taken.values()))
        owed = {lane: lane.carry + lane.part * batch - amount for lane, amount in taken.items()}
        self.batch = batch
        self.fair_clock += batch
        for lane, amount in owed.items():
            lane.carry = max(-batch, min(batch, amount)) if lane.sizes or lane.min_share else 0.0

    def validate(self) -> None:
        """Assert that the totals are those of the lanes."""
        loads = [lane.queued.as_tuple() for lane in self.lanes]
        assert self.queued.as_tuple() == tuple(map(sum, zip((0, 0, 0, 0), *loads, strict=True)))
        assert set(self.stocked) == {lane for lane in self.lanes if lane.sizes}
        assert set(self.suspected) == {lane for lane in self.lanes if lane.suspects}
        assert self.sizes == Counter(size for lane in self.lanes for size in lane.sizes)
        assert self.largest_bytes >= max((lane.largest_bytes for lane in self.lanes), default=0)
