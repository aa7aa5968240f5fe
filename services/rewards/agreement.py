"""Agreement of raters: Krippendorff's alpha with missing ratings, disagreement of each item, and outlying raters. Pure.

Ratings are an array `[items][raters]`; NaN is a missing rating. An item with `m >= 2` ratings disagrees by the mean
squared difference over its ordered pairs,

    d = 1 / (m (m - 1)) * sum over i != j of delta^2(v_i, v_j)

and with `N` the number of ratings in such items, and `D` the same mean over all pairs of these `N` ratings,

    alpha = 1 - sum over items of m d / (N D)

A pair of an item with `m` ratings thus has weight `1 / (m - 1)`, which is what missing ratings need (Krippendorff,
Computing Krippendorff's Alpha-Reliability, 2011, section E). Differences `delta` by metric:

    nominal   0 if equal, else 1
    interval  v - w
    ordinal   difference of the mid-ranks among all N ratings: half of both frequencies and all between
    ratio     (v - w) / (v + w), for ratings of at least 0

For interval and ordinal ratings the mean over pairs is twice the sample variance, so all of it takes one pass, O(N),
and O(N log N) for the ranks. Only `ratio` looks at pairs: those of the different values among the ratings, O(U^2), in
blocks of bounded memory.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Metric = Literal["nominal", "ordinal", "interval", "ratio"]
Floats = NDArray[np.float64]

FEWEST_RATERS: Final = 3
"""Raters from which one of them can be the outlier: of two, neither is."""
_BLOCK_VALUES: Final = 1 << 15
"""Most pairs of a block with the metric `ratio`: 256 KB, which stays in the cache of a core."""


@dataclass(frozen=True, slots=True)
class Alpha:
    """Agreement of raters.

    Attributes:
        value: At most 1; 0 is the agreement of chance. NaN if it is undefined.
        items: Items with at least two ratings.
        ratings: Ratings of these items.
        problem: Reason why it is undefined; empty if it is defined.
    """

    value: float
    items: int
    ratings: int
    problem: str = ""

    @property
    def is_defined(self) -> bool:
        """Whether the value is a number."""
        return not self.problem


def alpha(ratings: ArrayLike, metric: Metric = "interval") -> Alpha:
    """Return Krippendorff's alpha of ratings `[items][raters]`, with NaN for a missing one.

    It is undefined, NaN with the reason, if no item has two ratings, if all ratings are equal, or if `ratio` is asked
    of a negative rating.

    Raises:
        ValueError: The array has another number of dimensions, or an infinite rating.
    """
    table = _Table.of(ratings)
    expected, problem = _expected(table, metric)
    if problem:
        return Alpha(float("nan"), table.items, table.size, problem)
    observed = table.counts @ _observed(table, metric)
    return Alpha(float(1.0 - observed / (table.size * expected)), table.items, table.size)


def disagreement(ratings: ArrayLike, metric: Metric = "interval") -> Floats:
    """Return the disagreement of each item `[items]`, relative to that of chance: 0 is none, 1 is that of chance.

    The mean over items, weighted with their number of ratings, is `1 - alpha`. NaN for items with fewer than two
    ratings, and for all where alpha is undefined. Raises ValueError like `alpha`.
    """
    table = _Table.of(ratings)
    found = np.full(table.given, np.nan)
    expected, problem = _expected(table, metric)
    if not problem:
        found[table.places] = _observed(table, metric) / expected
    return found


def alphas_without(ratings: ArrayLike, metric: Metric = "interval", min_items: int = 1) -> Floats:
    """Return alpha without each rater `[raters]`, NaN where it is undefined or of fewer items than `min_items`.

    Raises ValueError like `alpha`.
    """
    table = np.asarray(ratings, np.float64)
    if table.ndim != 2:
        raise ValueError(f"ratings must be [items][raters] (got {table.ndim} dimensions)")
    found = [alpha(np.delete(table, rater, axis=1), metric) for rater in range(table.shape[1])]
    return np.array([one.value if one.items >= min_items else np.nan for one in found], np.float64)


def outliers(
    ratings: ArrayLike, low: float, metric: Metric = "interval", min_items: int = 1
) -> tuple[int, ...]:
    """Return the raters without whom alpha is at least `low`, the most outlying first; none if it is already.

    One rater after another is left out, each time the one without whom alpha is highest, for as long as that raises
    alpha. If alpha stays below `low` with two raters, nobody can be told apart, and none is returned. An alpha of fewer
    items than `min_items` says nothing: a rater who shares few items with the others makes no outlier of anybody.
    Raises ValueError like `alpha`.
    """
    table = np.asarray(ratings, np.float64)
    found = alpha(table, metric)
    kept, left_out = list(range(table.shape[1])), list[int]()
    value = found.value
    while found.is_defined and value < low:
        without = alphas_without(table[:, kept], metric, min_items)
        if len(kept) < FEWEST_RATERS or np.isnan(without).all() or np.nanmax(without) <= value:
            return ()
        best = int(np.nanargmax(without))
        value = float(without[best])
        left_out.append(kept.pop(best))
    return tuple(left_out)


@dataclass(frozen=True, slots=True)
class _Table:
    """The pairable ratings of a table, flat and item after item.

    Attributes:
        values: `[size]`, divided by the largest magnitude, so that no square overflows.
        counts: Ratings of each item `[items]`, at least 2.
        places: Number of each item in the given table `[items]`.
        given: Items of the given table.
    """

    values: Floats
    counts: NDArray[np.int64]
    places: NDArray[np.int64]
    given: int

    @classmethod
    def of(cls, ratings: ArrayLike) -> "_Table":
        table = np.asarray(ratings, np.float64)
        if table.ndim != 2:
            raise ValueError(f"ratings must be [items][raters] (got {table.ndim} dimensions)")
        if np.isinf(table).any():
            raise ValueError("ratings must be finite or NaN (got an infinite one)")
        present = ~np.isnan(table)
        counts = present.sum(axis=1)
        places = np.flatnonzero(counts >= 2)
        values = table[places][present[places]]
        scale = float(np.abs(values).max(initial=0.0))
        return cls(values / scale if scale else values, counts[places], places, len(table))

    @property
    def items(self) -> int:
        return len(self.counts)

    @property
    def size(self) -> int:
        return len(self.values)

    def sums(self, values: Floats) -> Floats:
        """Return the sum over each item `[items]`."""
        return np.add.reduceat(values, self.starts) if self.items else np.empty(0)

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.counts) - self.counts


def _expected(table: _Table, metric: Metric) -> tuple[float, str]:
    """Return the mean squared difference over all pairs of ratings, or why there is none."""
    if not table.items:
        return 0.0, "no item has two ratings"
    values = table.values
    if values.min() == values.max():
        return 0.0, "all ratings are equal"
    if metric == "ratio" and values.min() < 0:
        return 0.0, "the metric `ratio` needs ratings of at least 0"
    size = table.size
    match metric:
        case "nominal":
            _, counts = np.unique(values, return_counts=True)
            return 1.0 - float(counts @ (counts - 1)) / (size * (size - 1)), ""
        case "ratio":
            return _ratio_total(values) / (size * (size - 1)), ""
    spread = _on_line(table, metric)
    return 2.0 * float(np.square(spread - spread.mean()).sum()) / (size - 1), ""


def _observed(table: _Table, metric: Metric) -> Floats:
    """Return the mean squared difference over the pairs of each item `[items]`."""
    match metric:
        case "nominal":
            return 1.0 - _equal_pairs(table) / (table.counts * (table.counts - 1))
        case "ratio":
            return _ratio_totals(table) / (table.counts * (table.counts - 1))
    spread = _on_line(table, metric)
    means = table.sums(spread) / table.counts
    found: Floats = 2.0 * table.sums(np.square(spread - means.repeat(table.counts))) / (table.counts - 1)
    return found


def _on_line(table: _Table, metric: Metric) -> Floats:
    """Return points `[size]` whose differences are those of the metric: the values, or their mid-ranks."""
    if metric == "interval":
        return table.values
    _, place, counts = np.unique(table.values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - counts / 2.0) / table.size
    return ranks[place]


def _equal_pairs(table: _Table) -> Floats:
    """Return the ordered pairs of equal ratings of each item `[items]`."""
    _, codes = np.unique(table.values, return_inverse=True)
    rows = np.arange(table.items).repeat(table.counts)
    cells, counts = np.unique(rows * (codes.max() + 1) + codes, return_counts=True)
    pairs = (counts * (counts - 1)).astype(np.float64)
    return np.bincount(cells // (codes.max() + 1), pairs, table.items).astype(np.float64)


def _ratio_total(values: Floats) -> float:
    """Return the sum of the squared ratio differences over all ordered pairs of values."""
    found, counts = np.unique(values, return_counts=True)
    weights = counts.astype(np.float64)
    rows, total = max(1, _BLOCK_VALUES // len(found)), 0.0
    for at in range(0, len(found), rows):
        ones, own, after = found[at : at + rows, None], weights[at : at + rows], weights[at + rows :]
        # A pair of different blocks counts in both orders.
        total += float(own @ _ratios(ones, found[at : at + rows]) @ own)
        total += 2.0 * float(own @ _ratios(ones, found[at + rows :]) @ after)
    return total


def _ratio_totals(table: _Table) -> Floats:
    """Return the same sum over the pairs within each item `[items]`."""
    rows, totals = np.arange(table.items).repeat(table.counts), np.zeros(table.items)
    for apart in range(1, int(table.counts.max(initial=0))):
        within = rows[apart:] == rows[:-apart]
        squares = _ratios(table.values[apart:][within], table.values[:-apart][within])
        totals += 2.0 * np.bincount(rows[apart:][within], squares, table.items)
    return totals


def _ratios(ones: Floats, others: Floats) -> Floats:
    """Return squared ratio differences, with broadcasting."""
    total, found = ones + others, ones - others
    total[total == 0] = 1.0  # two ratings of 0 are equal: their difference is 0, not 0 / 0
    found /= total
    found *= found
    return found
