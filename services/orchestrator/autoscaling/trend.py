"""The trend of the demand: how fast it has been rising for longer than a worker takes to start. Pure.

Workers that are ordered for the demand of now arrive one start later. While the demand rises, they are too few by what
it rises within that time. A step is no trend, and neither is noise: the demand must have risen clearly, and in each
third of the time. A slow rise shows in a longer time: a large demand that grows by the same number every second rises
by a smaller part of itself.
"""

import math
from bisect import bisect_right
from itertools import pairwise
from typing import Final

import msgspec

PARTS: Final = 3
"""Parts of the time in each of which the demand must have risen."""
CLEARLY: Final = 0.12
"""Least rise in the whole time, relative to the demand at its end."""
LEAST: Final = 0.2
"""Least part of the rise in each part of the time: it is not a step."""
POINTS: Final = 30
"""Points remembered within the time."""
LONGER: Final = (1.0, 2.0, 4.0)
"""Times in which the demand may have risen clearly, relative to the least one: the shortest tells the trend."""


class DemandTrend(msgspec.Struct, frozen=True):
    """Times and demands, oldest first; the first one is the last that is older than the longest time."""

    points: tuple[tuple[float, float], ...] = ()

    def looked(self, now: float, demand: float | None, span_s: float) -> "DemandTrend":
        """Return the trend with one more sample.

        Args:
            now: Time in seconds.
            demand: Sequences per second; None while unknown, which begins anew.
            span_s: Least time in which the demand must have risen.
        """
        if demand is None:
            return DemandTrend()
        points = self.points
        if len(points) > 1 and now - points[-2][0] < span_s / POINTS:
            points = points[:-1]
        points = (*points, (now, demand))
        while len(points) > 1 and points[1][0] <= now - LONGER[-1] * span_s:
            points = points[1:]
        return DemandTrend(points)

    def rise_per_s(self, span_s: float) -> float:
        """Return how fast the demand rises, in sequences per second per second; 0 without a clear trend."""
        return next((found for part in LONGER if (found := self._rise_per_s(part * span_s))), 0.0)

    def _rise_per_s(self, span_s: float) -> float:
        """Return how fast it rises if it has risen clearly in just this time."""
        if not self.points or self.points[-1][0] - self.points[0][0] < span_s:
            return 0.0
        now, last = self.points[-1]
        levels = [self._at(now - part * span_s / PARTS) for part in range(PARTS, 0, -1)] + [last]
        rise = last - levels[0]
        if rise < CLEARLY * last or min(late - early for early, late in pairwise(levels)) < LEAST * rise:
            return 0.0
        return rise / span_s

    def _at(self, at: float) -> float:
        """Return the last demand seen until then."""
        return self.points[max(0, bisect_right(self.points, (at, math.inf)) - 1)][1]
