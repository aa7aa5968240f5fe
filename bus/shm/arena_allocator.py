"""The allocator of an arena: a slot for each group. Pure: no memory, no clock.

A slot belongs to one group until it is released or cancelled. Slots are allocated in one order, numbered in another and
released by number: `release(upto)` frees every slot numbered up to `upto`. The allocator takes the lowest fitting
gap, so resident memory follows current use. `trim` returns the range used at the peak and free now,
so that the owner can give it back to the system.
"""

from bisect import bisect_left
from collections import deque
from typing import Final

import msgspec

ALIGNMENT_BYTES: Final = 64
"""Alignment of slots, so the blocks of a group are aligned as in a frame."""
PAGE_BYTES: Final = 4096
PAGED_BYTES: Final = 32 << 10
"""Slots of at least that size use whole pages, so the broker can write the group to disk directly from them."""
LOOK: Final = 32
"""Gaps examined for room; the last and largest gap is always examined."""


class ArenaBlock(msgspec.Struct, eq=False):
    """Room for one group."""

    home: "ArenaAllocator"
    offset: int
    nbytes: int
    size: int
    """Occupied bytes of the arena; 0 once it is free."""
    seq: int = 0

    def number(self, seq: int) -> None:
        """Give a live slot its number, which must exceed all earlier ones."""
        self.seq = seq
        self.home.numbered.append(self)

    def cancel(self) -> None:
        """Free a slot without a number. Does nothing if it has a number or is free."""
        if not self.seq:
            self.home.free(self)


class ArenaAllocator:
    """The slots of one arena."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGNMENT_BYTES
        self.used_bytes = 0
        """Bytes of all live slots."""
        self._starts = [0] if self.capacity_bytes else []
        self._ends = [self.capacity_bytes] if self.capacity_bytes else []
        self.numbered: deque[ArenaBlock] = deque()
        """Live slots with a number, in the order of their numbers."""
        self._touched = 0
        """End of the memory ever used and not trimmed since."""
        self._peak = 0
        """Highest end of a slot since the last trim."""

    @property
    def top(self) -> int:
        """End of the highest live slot."""
        open_end = self._ends and self._ends[-1] == self.capacity_bytes
        return self._starts[-1] if open_end else self.capacity_bytes

    def allocate(self, nbytes: int) -> ArenaBlock | None:
        """Return a slot for that many bytes, or None if no gap is large enough."""
        unit = PAGE_BYTES if nbytes >= PAGED_BYTES else ALIGNMENT_BYTES
        size = nbytes + -nbytes % unit or unit
        gap = self._gap(size, unit)
        if gap is None:
            return None
        index, first = gap
        starts, ends = self._starts, self._ends
        if first > (start := starts[index]):
            starts.insert(index, start)
            ends.insert(index, first)
            index += 1
        end = starts[index] = first + size
        if end == ends[index]:
            del starts[index], ends[index]
        self.used_bytes += size
        if end > self._peak:
            self._peak = end
            if end > self._touched:
                self._touched = end
        return ArenaBlock(self, first, nbytes, size)

    def _gap(self, size: int, unit: int) -> tuple[int, int] | None:
        """Return the index of a large enough gap, and the first place in it at a multiple of the unit."""
        starts, ends = self._starts, self._ends
        for index, start in enumerate(starts):
            if index == LOOK:
                break
            first = start + -start % unit
            if ends[index] - first >= size:
                return index, first
        if len(starts) > LOOK:
            first = starts[-1] + -starts[-1] % unit
            if ends[-1] - first >= size:
                return len(starts) - 1, first
        return None

    def release(self, upto: int) -> None:
        """Free every slot numbered up to `upto`."""
        numbered = self.numbered
        start = end = 0
        while numbered and numbered[0].seq <= upto:
            slot = numbered.popleft()
            if slot.offset != end:
                self._free(start, end)
                start = slot.offset
            # Consecutive numbers mostly have adjacent slots.
            end = slot.offset + slot.size
            slot.size = 0
        self._free(start, end)

    def free(self, slot: ArenaBlock) -> None:
        """Free a slot. May be called twice."""
        size, slot.size = slot.size, 0
        self._free(slot.offset, slot.offset + size)

    def _free(self, start: int, end: int) -> None:
        if start == end:
            return
        self.used_bytes -= end - start
        starts, ends = self._starts, self._ends
        index = bisect_left(starts, start)
        joins_next = index < len(starts) and starts[index] == end
        if index and ends[index - 1] == start:
            ends[index - 1] = ends[index] if joins_next else end
            if joins_next:
                del starts[index], ends[index]
        elif joins_next:
            starts[index] = start
        else:
            starts.insert(index, start)
            ends.insert(index, end)

    def trim(self) -> tuple[int, int] | None:
        """Return the range of whole pages once used, but not since the last call; None if there is none."""
        start, end = _upwards(self._peak, PAGE_BYTES), _upwards(self._touched, PAGE_BYTES)
        self._peak = self.top
        if start >= end:
            return None
        self._touched = start
        return start, end

    def validate(self) -> None:
        """Check by assertions: the gaps are ordered, disjoint, and exactly the unused bytes."""
        edges = [edge for gap in zip(self._starts, self._ends, strict=True) for edge in gap]
        assert edges == sorted(set(edges)), edges
        gaps = sum(self._ends) - sum(self._starts)
        assert gaps + self.used_bytes == self.capacity_bytes
        numbers = [slot.seq for slot in self.numbered]
        assert numbers == sorted(set(numbers)), numbers
        assert all(slot.size for slot in self.numbered)


def _upwards(nbytes: int, unit: int) -> int:
    """Return the next multiple of the unit."""
    return nbytes + -nbytes % unit
