"""Values over time. Pure."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """A value over time, which holds from each point to the next, or moves in a straight line to it.

    Attributes:
        times: Seconds, increasing. The first value also holds before the first point, the last one after the last.
        values: One for each time.
        is_linear: Straight lines between the points.
    """

    times: tuple[float, ...]
    values: tuple[float, ...]
    is_linear: bool = False

    def at(self, seconds: float) -> float:
        """Return the value at a time."""
        place = bisect.bisect_right(self.times, seconds) - 1 if len(self.times) > 1 else 0
        if place < 0:
            return self.values[0]
        if not self.is_linear or place + 1 == len(self.times):
            return self.values[place]
        begin, end = self.times[place], self.times[place + 1]
        part = (seconds - begin) / (end - begin)
        return self.values[place] + (self.values[place + 1] - self.values[place]) * part

    def scaled(self, factor: float) -> "Series":
        """Return the series with all values multiplied."""
        return Series(self.times, tuple(factor * value for value in self.values), self.is_linear)


def constant(value: float) -> Series:
    """Return a series of one value."""
    return Series((0.0,), (value,))


def steps(*points: tuple[float, float]) -> Series:
    """Return a series that holds each value until the next point."""
    return _of(points, is_linear=False)


def lines(*points: tuple[float, float]) -> Series:
    """Return a series of straight lines between points."""
    return _of(points, is_linear=True)


def square(half_s: float, low: float, high: float, lasts_s: float) -> Series:
    """Return a series that alternates between low and high; each half lasts `half_s`."""
    count = int(lasts_s / half_s) + 1
    return steps(*((half_s * half, high if half % 2 else low) for half in range(count)))


def _of(points: Sequence[tuple[float, float]], *, is_linear: bool) -> Series:
    return Series(tuple(at for at, _ in points), tuple(value for _, value in points), is_linear)
