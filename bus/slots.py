"""Where in an arena each group lies. Pure: no memory, no clock.

The law: a slot is nobody else's until it is released or cancelled. Slots are allocated in any order, get their numbers
in another, and are released by number: `release(upto)` frees every slot that has a number up to that. The lowest gap
that fits is taken, so that what is resident follows what is in use and not how much was ever sent; what was in use at
its peak and is not any more is told by `trim`, for the owner to give back.
"""

from bisect import bisect_left
from collections import deque
from typing import Final

ALIGNMENT_BYTES: Final = 64
"""Slots begin at multiples of it, so that the blocks of a group are as aligned as in a frame of its own."""
PAGE_BYTES: Final = 4096
PAGED_BYTES: Final = 32 << 10
"""Slots of so much take whole pages, so that a disk can write a group from where it lies."""
LOOK: Final = 32
"""Gaps that are looked at for room; the last one, which is the largest, is looked at in any case."""


class Slot:
    """Room for one group."""

    __slots__ = ("home", "nbytes", "offset", "seq", "size")

    def __init__(self, home: "Slots", offset: int, nbytes: int, size: int) -> None:
        self.home = home
        self.offset = offset
        self.nbytes = nbytes
        self.size = size
        """What it takes of the arena; 0 once it is free."""
        self.seq = 0

    def number(self, seq: int) -> None:
        """Have a live slot released with that number, which is higher than any before."""
        self.seq = seq
        self.home.numbered.append(self)

    def cancel(self) -> None:
        """Free it: it will never get a number. Does nothing once it has one, or is free."""
        if not self.seq:
            self.home.free(self)


class Slots:
    """The slots of one arena."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGNMENT_BYTES
        self.used_bytes = 0
        """What the live slots take together."""
        self._starts = [0] if self.capacity_bytes else []
        self._ends = [self.capacity_bytes] if self.capacity_bytes else []
        self.numbered: deque[Slot] = deque()
        """Those that are released by number, in the order of their numbers."""
        self._touched = 0
        """Nothing beyond this was ever in use, or it was trimmed."""
        self._peak = 0
        """The highest end of a slot since the last trim."""

    @property
    def top(self) -> int:
        """End of the highest live slot."""
        open_end = self._ends and self._ends[-1] == self.capacity_bytes
        return self._starts[-1] if open_end else self.capacity_bytes

    def allocate(self, nbytes: int) -> Slot | None:
        """Return a slot for that many bytes, or None if there is no gap that is large enough."""
        unit = PAGE_BYTES if nbytes >= PAGED_BYTES else ALIGNMENT_BYTES
        size = max(unit, _upwards(nbytes, unit))
        index = self._gap(size, unit)
        if index is None:
            return None
        start = self._starts[index]
        if (first := _upwards(start, unit)) > start:
            self._starts.insert(index, start)
            self._ends.insert(index, first)
            start, index = first, index + 1
        end = self._starts[index] = start + size
        if end == self._ends[index]:
            del self._starts[index], self._ends[index]
        self.used_bytes += size
        if end > self._peak:
            self._peak = end
            self._touched = max(self._touched, end)
        return Slot(self, start, nbytes, size)

    def _gap(self, size: int, unit: int) -> int | None:
        starts, ends = self._starts, self._ends
        for index in range(min(LOOK, len(starts))):
            if ends[index] - _upwards(starts[index], unit) >= size:
                return index
        return len(starts) - 1 if starts and ends[-1] - _upwards(starts[-1], unit) >= size else None

    def release(self, upto: int) -> None:
        """Free every slot with a number up to that."""
        numbered = self.numbered
        start = end = 0
        while numbered and numbered[0].seq <= upto:
            slot = numbered.popleft()
            if slot.offset != end:
                self._free(start, end)
                start = slot.offset
            # What was numbered in turn mostly lies in turn.
            end = slot.offset + slot.size
            slot.size = 0
        self._free(start, end)

    def free(self, slot: Slot) -> None:
        """Let others have a slot; a second time changes nothing."""
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
        """Return the range of whole pages that was in use once, and has not been since the last call; None if none."""
        start, end = _upwards(self._peak, PAGE_BYTES), _upwards(self._touched, PAGE_BYTES)
        self._peak = self.top
        if start >= end:
            return None
        self._touched = start
        return start, end

    def validate(self) -> None:
        """Assert that the gaps are apart, in order, and all that is not in use."""
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
