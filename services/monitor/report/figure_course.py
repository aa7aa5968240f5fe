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
        self._first: list[FigurePoint] = []
        self._last: deque[FigurePoint] = deque(maxlen=WINDOW_STEPS)
        self._series = Series(
            {"value": Fold.MEAN, "step": Fold.LOW, "points": Fold.SUM}, width_s=1e-3, limit=ROWS_LIMIT
        )

    def fold(self, point: FigurePoint) -> None:
        """Take a point of an early step; in the order of steps."""
        self._count += 1
        if len(self._first) < WINDOW_STEPS:
            self._first.append(point)
        self._last.append(point)
        self._series.add(point.t, {"value": point.value, "step": point.step, "points": 1.0}, self._count)

    def void(self, step: int) -> None:
        """Forget the folded points from a step on, which a later life of the trainer takes again.

        A thinned point that begins before that step stays.
        """
        if not self._last or self._last[-1].step < step:
            return
        self._series.cut("step", step)
        rows = self._rows()
        self._count = sum(count for _, count in rows)
        self._first = [point for point in self._first if point.step < step]
        kept = [point for point in self._last if point.step < step]
        if not kept:  # the values themselves are gone: their means stand for them
            kept = [point for point, count in rows for _ in range(min(count, WINDOW_STEPS))]
        self._last = deque(kept, maxlen=WINDOW_STEPS)

    def _rows(self) -> list[tuple[FigurePoint, int]]:
        """Return the thinned points, and how many values each stands for."""
        columns = [self._columns(name) for name in ("t", "step", "value", "points")]
        return [
            (FigurePoint(t, round(step), value), round(count))
            for t, step, value, count in zip(*columns, strict=True)
        ]

    def _columns(self, name: str) -> list[float]:
        change = self._series.since(-1)
        return [] if change is None else [value for value in change.columns[name] if value is not None]

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
        first = [*(point.value for point in self._first), *recent][:steps]
        last = [*(point.value for point in self._last), *recent][-steps:]
        return sum(first) / steps, sum(last) / steps

    def curve(self) -> Curve:
        """Return all points, thinned where there are many."""
        times, values = self._columns("t"), self._columns("value")
        joined = max(1, round(self._count / len(times))) if times else 1
        for begin in range(0, len(self.recent), joined):
            part = self.recent[begin : begin + joined]
            times.append(sum(point.t for point in part) / len(part))
            values.append(sum(point.value for point in part) / len(part))
        return Curve(times, values, joined)
