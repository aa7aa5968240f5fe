"""The lives of a run: from the start of each launcher, or broker without one, to the end of its last process. Pure.

A resumed run has several. The time between two of them is no time of the run: nothing rolled out, trained or evaluated.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec


class Life(msgspec.Struct, frozen=True):
    """One entry of `lives.json`. Times are wall clock.

    Attributes:
        began: Start of the launcher, or of the broker.
        ended: End of its last process; None while it runs, or if it was killed.
    """

    began: float
    ended: float | None = None

    def seconds(self, now: float) -> float:
        """Return its duration, so far if it has not ended."""
        return max(0.0, (now if self.ended is None else self.ended) - self.began)


def seconds_of(lives: Sequence[Life], now: float) -> float:
    """Return the time of all lives together."""
    return sum(life.seconds(now) for life in lives)


def pauses(lives: Sequence[Life]) -> list[tuple[float, float]]:
    """Return the times between two lives, as (end of one, start of the next)."""
    found = ((one.ended, other.began) for one, other in pairwise(lives))
    return [(end, begin) for end, begin in found if end is not None and end < begin]


def paused_s(lives: Sequence[Life], since: float, until: float) -> float:
    """Return how much of a span of time lies between two lives."""
    return sum(max(0.0, min(begin, until) - max(end, since)) for end, begin in pauses(lives))
