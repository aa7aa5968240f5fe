"""Numbers of ready workers over the time of a run, as stretches of equal numbers. Pure.

A run may report them millions of times, and they change seldom. Beyond `STRETCHES_LIMIT` changes neighbours are joined:
the fewest and the most workers stay exact, only their times get coarser.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile
from math import inf
from typing import Final

STRETCHES_LIMIT: Final = 8192


@dataclass(slots=True)
class _Stretch:
    """Times of the first and the last report, and the fewest and the most workers in between."""

    since: float
    until: float
    low: int
    high: int


class ReadyCounts:
    """Reports in, numbers out.

    Args:
        limit: Most stretches.
    """

    def __init__(self, limit: int = STRETCHES_LIMIT) -> None:
        self._limit = limit
        self._stretches: list[_Stretch] = []

    def __len__(self) -> int:
        return len(self._stretches)

    def add(self, t: float, count: int) -> None:
        """Take a report; they come in the order of time, wall-clock seconds."""
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.low == count == last.high:
            last.until = max(last.until, t)
            return
        self._stretches.append(_Stretch(t, t, count, count))
        if len(self._stretches) > self._limit:
            self._join()

    def _join(self) -> None:
        """Join each stretch with the next one."""
        joined = [
            _Stretch(one.since, two.until, min(one.low, two.low), max(one.high, two.high))
            for one, two in zip(self._stretches[::2], self._stretches[1::2], strict=False)
        ]
        self._stretches = joined + self._stretches[2 * len(joined) :]

    def numbers(self, wanted: int = 1, until: float | None = None, since: float = 0.0) -> list[int]:
        """Return the numbers up to `until`, from the first time that `wanted` workers were ready.

        If that many never were, from the first time that any worker was ready; always after `since`. Numbers that
        repeat without a change in between are there once.
        """
        end = inf if until is None else until
        found = [one for one in self._stretches if one.until >= since and one.since <= end]
        for enough in (max(1, wanted), 1):
            if numbers := list(_from_first(found, enough)):
                return numbers
        return []


def _from_first(stretches: list[_Stretch], enough: int) -> Iterator[int]:
    """Yield the numbers from the first stretch that reaches `enough`, without what its beginning had less."""
    reached = dropwhile(lambda one: one.high < enough, stretches)
    for number, one in enumerate(reached):
        low = max(one.low, enough) if number == 0 else one.low
        yield from (low,) if low == one.high else (low, one.high)
