"""Durations in buckets of equal ratio: percentiles with a known relative error, merged over processes. Pure.

The buckets are those of DDSketch (Masson, Rim and Lee 2019, "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", section 2.1): bucket i holds the values in (g^(i-1), g^i] with g = (1 + e) / (1 - e), and
stands for 2 g^i / (g + 1), which is within the part e of each of them. All histograms have the same buckets, so the sum
of the counts of two is the histogram of both, in any order and exactly.

The buckets reach from a microsecond to eleven days. What is shorter counts in the first, what is longer as eleven days.
"""

from bisect import bisect_left
from itertools import accumulate
from math import ceil, inf, isfinite, log
from typing import Annotated, Final, Self

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

RELATIVE_ERROR: Final = 0.01
"""Largest error of a percentile, as a part of it."""
SHORTEST_S: Final = 1e-6
LONGEST_S: Final = 1e6

_RATIO: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_SCALE: Final = 1 / log(_RATIO)
_LEAST: Final = ceil(log(SHORTEST_S) * _SCALE)
BUCKETS: Final = ceil(log(LONGEST_S) * _SCALE) - _LEAST + 1
"""Number of buckets of every histogram."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """Counts of durations by bucket, without the empty buckets at both ends.

    Attributes:
        first: Bucket of the first count; 0 without any.
        counts: Durations in this bucket and in those that follow; the first and the last are not 0.
        total_s: Sum of the durations, in seconds.
    """

    first: Annotated[int, Meta(ge=0, lt=BUCKETS)] = 0
    counts: tuple[Count, ...] = ()
    total_s: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if self.first + len(self.counts) > BUCKETS:
            problem = f"must end before bucket {BUCKETS} (got {len(self.counts)} from {self.first} on)"
            raise ValueError(f"histogram: counts: {problem}")
        if not isfinite(self.total_s):
            raise ValueError(f"histogram: total_s: must be finite (got {self.total_s})")

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """Mean duration in seconds, without the error of a bucket; 0 without any."""
        return self.total_s / count if (count := self.count) else 0.0

    def merged(self, other: "Histogram") -> "Histogram":
        """Return the histogram of the durations of both."""
        if not self.counts or not other.counts:
            return self if self.counts else other
        first = min(self.first, other.first)
        end = max(self.first + len(self.counts), other.first + len(other.counts))
        counts = [0] * (end - first)
        for one in (self, other):
            for at, count in enumerate(one.counts, one.first - first):
                counts[at] += count
        return Histogram(first, tuple(counts), self.total_s + other.total_s)

    def percentile_s(self, percent: float, slowest_s: float = 0.0) -> float:
        """Return the shortest duration that so many percent of all do not exceed.

        Args:
            percent: Above 0, at most 100.
            slowest_s: The longest duration; 0 if it is not known. The result does not exceed it, as a bucket may.

        Returns:
            Seconds, with a relative error of at most `RELATIVE_ERROR` between `SHORTEST_S` and `LONGEST_S`; 0 without
            any duration.

        Raises:
            ValueError: The percent is out of range.
        """
        _require_percent(percent)
        if not self.counts:
            return 0.0
        below = [*accumulate(self.counts)]
        rank = max(1, ceil(below[-1] * percent / 100))
        return min(slowest_s or inf, _duration_of(self.first + bisect_left(below, rank)))


class HistogramBuilder:
    """Collects durations for a `Histogram`, thousands in a call as cheaply as one. Not safe for threads."""

    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS, np.int64)
        self._total_s = 0.0

    def add(self, durations_s: ArrayLike, times: ArrayLike | None = None) -> Self:
        """Count durations.

        Args:
            durations_s: One or several, in seconds, in any shape. One that is negative counts as 0, since the wall
                clock may have been set, and one above `LONGEST_S` as that, which bounds the sum. One that is infinite
                or not a number is left out.
            times: How often each of them counts, once by default.
        """
        values = np.atleast_1d(np.asarray(durations_s, np.float64)).ravel()
        weights = None if times is None else np.asarray(times, np.float64).ravel()
        finite = np.isfinite(values)
        if not finite.all():
            values, weights = values[finite], None if weights is None else weights[finite]
        values = np.minimum(np.maximum(values, 0.0), LONGEST_S)
        self._counts += np.bincount(_buckets_of(values), weights, minlength=BUCKETS).astype(np.int64)
        self._total_s += float(values.sum() if weights is None else values @ weights)
        return self

    def merge(self, one: Histogram) -> Self:
        """Count what another histogram counts; thousands of them cost less than `Histogram.merged` for each."""
        self._counts[one.first : one.first + len(one.counts)] += np.array(one.counts, np.int64)
        self._total_s += one.total_s
        return self

    def histogram(self) -> Histogram:
        """Return what was counted so far."""
        filled = np.flatnonzero(self._counts)
        if not filled.size:
            return Histogram()
        first, last = int(filled[0]), int(filled[-1])
        return Histogram(first, tuple(self._counts[first : last + 1].tolist()), self._total_s)

    def percentile_s(self, percent: float) -> float:
        """Return a percentile of what was counted so far, see `Histogram.percentile_s`.

        Raises:
            ValueError: The percent is out of range.
        """
        _require_percent(percent)
        below = self._counts.cumsum()
        if not below[-1]:
            return 0.0
        rank = max(1, ceil(int(below[-1]) * percent / 100))
        return _duration_of(int(below.searchsorted(rank)))

    def clear(self) -> None:
        """Forget everything."""
        self._counts[:] = 0
        self._total_s = 0.0


def _require_percent(percent: float) -> None:
    if not 0 < percent <= 100:
        raise ValueError(f"percent: must be above 0 and at most 100 (got {percent})")


def _buckets_of(values: NDArray[np.float64]) -> NDArray[np.int64]:
    logs = np.log(np.maximum(values, SHORTEST_S))
    logs *= _SCALE
    buckets = np.ceil(logs, out=logs).astype(np.int64)
    buckets -= _LEAST
    return np.minimum(np.maximum(buckets, 0, out=buckets), BUCKETS - 1, out=buckets)


def _duration_of(bucket: int) -> float:
    return 2 * _RATIO ** (bucket + _LEAST) / (_RATIO + 1)
