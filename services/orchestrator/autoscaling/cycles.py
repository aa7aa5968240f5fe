"""A trainer that consumes an epoch at once and then nothing for a while: what one cycle consumes. Pure.

Workers for the peak of such a demand would start when it is nearly over, and wait until the next. If the queue can hold
an epoch, workers for the mean of a cycle suffice: they fill the queue between two bursts.

    burst    from a demand above `HIGH` times the mean, until one below `LOW` times of it
    cycle    from the beginning of a burst to that of the next

What a waiting trainer would have consumed counts as well: else a queue that is too short for a burst stays too short.
Two whole cycles must have been seen, and they count until a third is overdue. A demand that changes once, or by less,
is no cycle.
"""

import math
from typing import Final

import msgspec
from msgspec.structs import replace

HIGH, LOW = 1.5, 0.75
"""Factors on the mean demand at which a burst begins, and ends."""
CYCLES: Final = 2
"""Whole cycles from which the mean is known."""
LONGEST_S: Final = 3.0
"""Longest time one sample counts for."""
FIRST_S: Final = 1800.0
"""Before that, the mean is of so much time, or up to twice as much: a steady demand of long ago says nothing."""
OVERDUE: Final = 2.0
"""Factor on the longest cycle after which a burst that did not come ends the knowledge."""


class Burst(msgspec.Struct, frozen=True):
    """A burst: when it began, the sequences wanted until then, and those it wanted itself."""

    at: float
    before: float
    size: float = 0.0


class DemandCycles(msgspec.Struct, frozen=True):
    """The last bursts, oldest first; the last one may go on."""

    bursts: tuple[Burst, ...] = ()
    is_burst: bool = False
    at: float = -math.inf
    """Time of the last sample."""
    eaten: int = 0
    missed: float = 0.0
    """Sequences consumed until then, and those that the trainer would have consumed while it waited."""
    since: tuple[float, float] = (-math.inf, 0.0)
    """Time from which the mean counts before cycles are known, and the sequences consumed until then."""
    later: tuple[float, float] = (-math.inf, 0.0)
    """The next such time."""
    filled: bool = False
    """The queue has been full since the last burst began."""

    def looked(
        self, now: float, eaten: int, demand: float | None, waits: float, *, is_full: bool
    ) -> "DemandCycles":
        """Return the cycles with one more sample.

        Args:
            now: Time in seconds.
            eaten: Sequences consumed so far; fewer than before begin anew.
            demand: Sequences per second; None while unknown.
            waits: Part of the time since the last sample in which the trainer waited.
            is_full: The workers wait, since the queue is at one of its limits.
        """
        if eaten < self.eaten or math.isinf(self.since[0]):
            return DemandCycles(at=now, eaten=eaten, since=(now, eaten), later=(now, eaten))
        missed = self.missed + waits * (demand or 0.0) * min(now - self.at, LONGEST_S)
        new = replace(self, at=now, eaten=eaten, missed=missed, filled=self.filled or is_full)
        wanted = eaten + missed
        if new.is_known and now - new.bursts[-1].at > OVERDUE * max(new._lengths_s):
            return DemandCycles(at=now, eaten=eaten, since=(now, eaten), later=(now, eaten))
        if now - new.later[0] >= FIRST_S:
            new = replace(new, since=new.later, later=(now, wanted))
        since, before = (new.bursts[0].at, new.bursts[0].before) if new.is_known else new.since
        if demand is None or now <= since:
            return new
        mean = (wanted - before) / (now - since)
        if new.is_burst:
            last = replace(new.bursts[-1], size=wanted - new.bursts[-1].before)
            return replace(new, bursts=(*new.bursts[:-1], last), is_burst=demand >= LOW * mean)
        if demand <= HIGH * mean:
            return new
        bursts = (*new.bursts[-CYCLES:], Burst(now, wanted))
        return replace(new, bursts=bursts, is_burst=True, filled=is_full)

    @property
    def is_known(self) -> bool:
        """Return whether enough whole cycles have been seen."""
        return len(self.bursts) > CYCLES

    @property
    def mean(self) -> float:
        """Return the sequences per second wanted in the last whole cycles; they must be known."""
        first, last = self.bursts[0], self.bursts[-1]
        return (last.before - first.before) / (last.at - first.at)

    @property
    def left(self) -> float:
        """Return the sequences that the present burst may still consume: as many as the larger one of the last."""
        largest = max(one.size for one in self.bursts[:-1])
        return max(0.0, largest - self.bursts[-1].size) if self.is_burst else 0.0

    @property
    def rests_s(self) -> float:
        """Return the time until the next burst, if it comes as soon as the shortest of the last; else 0."""
        if not self.is_known or self.is_burst:
            return 0.0
        return max(0.0, self.bursts[-1].at + min(self._lengths_s) - self.at)

    @property
    def _lengths_s(self) -> list[float]:
        return [late.at - early.at for early, late in zip(self.bursts, self.bursts[1:], strict=False)]
