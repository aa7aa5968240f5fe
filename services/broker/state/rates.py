"""Rates per second over the last ten seconds, in constant memory."""

from typing import Final

WINDOW_S: Final = 10
"""Long enough to smooth single batches, short enough to show a stall quickly."""


class Rate:
    """Ten buckets of one second each; the caller passes the clock."""

    __slots__ = ("_born", "_buckets", "_second")

    def __init__(self) -> None:
        self._buckets = [0] * WINDOW_S
        self._born: float | None = None
        self._second = 0

    def add(self, amount: int, now: float) -> None:
        """Count `amount` at `now`."""
        if int(now) > self._second:
            self._advance(now)
        if self._born is None:
            self._born = now
        self._buckets[self._second % WINDOW_S] += amount

    def per_s(self, now: float) -> float:
        """Return the mean rate of the last ten seconds, or of the shorter life so far."""
        self._advance(now)
        age = now - self._born if self._born is not None else 0.0
        return sum(self._buckets) / min(float(WINDOW_S), max(1.0, age))

    def _advance(self, now: float) -> None:
        second = int(now)
        if second <= self._second:
            return
        for past in range(max(self._second, second - WINDOW_S) + 1, second + 1):
            self._buckets[past % WINDOW_S] = 0
        self._second = second
