"""The course of one figure of learning over a run of any length: exact at both ends, thinned between. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from rolloutmq.schemas.statistics.series import Fold, Series

WINDOW_STEPS: Final = 50
"""Most steps at either end over which figures are averaged: at most a quarter of all steps, so that both ends differ
in a short run, too."""
ROWS_LIMIT: Final = 1024
"""Most points of the thinned part: nearly as many as a picture has columns."""


@dataclass(frozen=True, slots=True)
class FigurePoint:
    """One value of a figure of learning, with its wall-clock time."""

    t: float
    step: int
    value: float


class Curve(NamedTuple):
    """A course to draw.

    Attributes:
        times: Wall-clock seconds.
        values: Mean over the steps of each point.
        steps_per_point: Steps that a point stands for, about.
    """

    times: list[float]
    values: list[float]
    steps_per_point: int


class FigureCourse:
    """Points of the last steps as they are, and those of earlier steps folded.

    Attributes:
        recent: Points of the last steps, in the order of steps. Whoever keeps them folds the oldest.
    """

    def __init__(self) -> None:
        self.recent: Sequence[FigurePoint] = ()
        self._count = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._series = Series({"value": Fold.MEAN}, width_s=1e-3, limit=ROWS_LIMIT)

    def fold(self, point: FigurePoint) -> None:
        """Take a point that no later life of the trainer will void; in the order of steps."""
        self._count += 1
        if len(self._first) < WINDOW_STEPS:
            self._first.append(point.value)
        self._last.append(point.value)
        self._series.add(point.t, {"value": point.value}, self._count)

    def ends(self, last_step: float = inf) -> tuple[float, float] | None:
        """Return the means over the first and over the last steps, see `WINDOW_STEPS`; None without a value.

        Args:
            last_step: Values of later steps do not count.
        """
        recent = [point.value for point in self.recent if point.step <= last_step]
        count = self._count + len(recent)
        if not count:
            return None
        steps = max(1, min(WINDOW_STEPS, count // 4))
        first, last = [*self._first, *recent][:steps], [*self._last, *recent][-steps:]
        return sum(first) / steps, sum(last) / steps

    def curve(self) -> Curve:
        """Return all points, thinned where there are many."""
        change = self._series.since(-1)
        times = [] if change is None else [t for t in change.columns["t"] if t is not None]
        values = [] if change is None else [value for value in change.columns["value"] if value is not None]
        joined = max(1, round(self._count / len(times))) if times else 1
        for begin in range(0, len(self.recent), joined):
            part = self.recent[begin : begin + joined]
            times.append(sum(point.t for point in part) / len(part))
            values.append(sum(point.value for point in part) / len(part))
        return Curve(times, values, joined)
