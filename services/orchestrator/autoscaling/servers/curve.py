"""The throughput of shared servers over the size of the fleet, and the size at which it stops growing. Pure.

Each measurement is a point: what so many workers made. Workers below the knee make their size, and those beyond it what
the knee makes. Where groups arrive by chance one point tells little, and a comparison of two tells less. All points
together tell the knee better than any two of them, and how uncertain it is. Rollouts become longer meanwhile, and
servers slower, so each point tells less as it becomes older.
"""

import math
from typing import Final

import msgspec

POINTS: Final = 8
"""Points remembered."""
SAME: Final = 0.05
"""Relative difference of two sizes up to which they are one point."""
MOST_GROUPS: Final = 800.0
"""Groups that a point counts for at most: the servers change with time."""
STEPS: Final = 60
"""Sizes tried as the knee, from the smallest point to twice the largest: no point tells one knee below all of them from
another."""
CHANGE_PER_S: Final = 9e-5
"""Variance by which the throughput of a worker changes in a second, relative to it: by a tenth within two minutes, and
a third within 20."""
NO_CHANCE: Final = 1e-6
"""Least dispersion."""
LIKELY: Final = 2.0
"""Width of the interval of the knee, in standard errors to each side."""


class Point(msgspec.Struct, frozen=True):
    """What workers of one size made, in sequences per second, and how many groups told it."""

    size: float
    made: float
    groups: float

    def joined(self, other: "Point") -> "Point":
        """Return both as one point."""
        spans = [min(one.groups, MOST_GROUPS / 2.0) / one.made for one in (self, other)]
        size = (self.size * spans[0] + other.size * spans[1]) / sum(spans)
        made = (self.made * spans[0] + other.made * spans[1]) / sum(spans)
        return Point(size, made, made * sum(spans))


class Knee(msgspec.Struct, frozen=True):
    """The size from which throughput stays: the likeliest one, and the limits of its interval."""

    low: float
    size: float
    high: float
    pace: float
    """Throughput of a smaller fleet, relative to its size."""


class ThroughputCurve(msgspec.Struct, frozen=True):
    """The last points, oldest first."""

    points: tuple[Point, ...] = ()

    def added(self, size: float, made: float, groups: float) -> "ThroughputCurve":
        """Return the curve with one more point."""
        new = Point(size, made, groups)
        if min(size, made, groups) <= 0.0:
            return self
        for place, one in enumerate(self.points):
            if abs(one.size - size) <= SAME * size:
                rest = self.points[:place] + self.points[place + 1 :]
                return ThroughputCurve((*rest, one.joined(new)))
        return ThroughputCurve((*self.points[1 - POINTS :], new))

    def aged(self, seconds: float, dispersion: float) -> "ThroughputCurve":
        """Return the curve after so much time: the rollouts and the servers change, so each point tells less."""
        grown = CHANGE_PER_S * seconds / max(dispersion, NO_CHANCE)
        points = (Point(one.size, one.made, 1.0 / (1.0 / one.groups + grown)) for one in self.points)
        return ThroughputCurve(tuple(points))

    def scaled(self, factor: float) -> "ThroughputCurve":
        """Return the curve with other units of size."""
        return ThroughputCurve(tuple(Point(factor * one.size, one.made, one.groups) for one in self.points))

    @property
    def least(self) -> float:
        """Return the smallest size of a point; at least one point is required."""
        return min(one.size for one in self.points)

    def knee(self, dispersion: float) -> Knee:
        """Return the knee; at least one point is required.

        Args:
            dispersion: Variance of the number of groups relative to that of independent ones.
        """
        least = self.least
        ratio = (2.0 * max(one.size for one in self.points) / least) ** (1.0 / STEPS)
        sizes = [least * ratio**step for step in range(STEPS + 1)]
        likelihoods = [self._likelihood(size) for size in sizes]
        most = max(likelihoods)
        best = sizes[likelihoods.index(most)]
        enough = most - max(dispersion, NO_CHANCE) * LIKELY**2 / 2.0
        likely = [size for size, one in zip(sizes, likelihoods, strict=True) if one >= enough]
        return Knee(min(likely), best, max(likely), self._pace(best))

    def misfit(self, size: float, made: float, groups: float, dispersion: float) -> float:
        """Return by how many standard errors, about, a further point and these differ from any curve with a knee."""
        all_points = ThroughputCurve((*self.points, Point(size, made, groups)))
        fitted = all_points._likelihood(all_points.knee(dispersion).size)
        whole = sum(one.groups * math.log(one.made) for one in all_points.points)
        return math.sqrt(max(0.0, 2.0 * (whole - fitted) / max(dispersion, NO_CHANCE)))

    def _pace(self, knee: float) -> float:
        """Return the likeliest pace for a knee."""
        groups = sum(one.groups for one in self.points)
        return groups / sum(min(one.size, knee) * one.groups / one.made for one in self.points)

    def _likelihood(self, knee: float) -> float:
        """Return the logarithm of the likelihood of a knee, with the pace that makes it largest."""
        told = sum(one.groups * math.log(min(one.size, knee)) for one in self.points)
        return told + sum(one.groups for one in self.points) * math.log(self._pace(knee))
