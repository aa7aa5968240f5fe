"""Combination of the ratings of several raters into one score, and their common scale. Pure.

Ratings are an array `[items][raters]`; NaN is a missing rating, and a score without any rating is NaN. Weights are
`[raters]`, at least 0; a rater without weight never counts.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.statistics.moments import SPREAD_FLOOR

Floats = NDArray[np.float64]
Combination = Literal["mean", "median", "trimmed_mean", "minimum", "majority"]
Scale = Literal["none", "rank", "zscore"]

TIE = 0.5
"""Score of a vote with as much weight on either side."""


def combined(
    ratings: Floats, weights: Floats, how: Combination, *, trim: float = 0.25, pass_at: float = 0.5
) -> Floats:
    """Return the score of each item `[items]`, NaN for one without a rating of a rater with weight.

    Args:
        ratings: `[items][raters]`.
        weights: `[raters]`.
        how: Combination; see `RewardsConfig.combine`.
        trim: Part of the ratings of an item that `trimmed_mean` drops at either end, rounded down.
        pass_at: Least rating that passes, for `majority`.
    """
    return np.array([_of_one(row, weights, how, trim, pass_at) for row in ratings], np.float64)


def _of_one(row: Floats, weights: Floats, how: Combination, trim: float, pass_at: float) -> float:
    counts = ~np.isnan(row) & (weights > 0)
    values, shares = row[counts], weights[counts]
    if not len(values):
        return float("nan")
    match how:
        case "mean":
            return _mean(values, shares)
        case "median":
            return _median(values, shares)
        case "trimmed_mean":
            order = np.argsort(values, kind="stable")
            cut = int(trim * len(values))
            kept = order[cut : len(values) - cut]
            return _mean(values[kept], shares[kept])
        case "minimum":
            return float(values.min())
        case "majority":
            return _majority(values, shares, pass_at)


def _mean(values: Floats, weights: Floats) -> float:
    """Return the weighted mean. It is between the extremes, so it never overflows."""
    shares = weights / weights.max()
    largest = float(np.abs(values).max()) or 1.0
    mean = float((values / largest) @ (shares / shares.sum())) * largest
    return min(max(mean, float(values.min())), float(values.max()))


def _median(values: Floats, weights: Floats) -> float:
    """Return the weighted median: the middle of the values with half of the weight on either side."""
    order = np.argsort(values, kind="stable")
    values, shares = values[order], np.cumsum(weights[order] / weights.max())
    half = shares[-1] / 2
    low = int(np.searchsorted(shares, half * (1 - 1e-12)))
    high = int(np.searchsorted(shares, half * (1 + 1e-12), side="right"))
    return float(values[low] / 2 + values[min(high, len(values) - 1)] / 2)


def _majority(values: Floats, weights: Floats, pass_at: float) -> float:
    shares = weights / weights.max()
    difference = float(shares[values >= pass_at].sum() - shares[values < pass_at].sum())
    if abs(difference) <= 1e-12 * float(shares.sum()):
        return TIE
    return float(difference > 0)


def scaled(ratings: Floats, window: Floats, scale: Scale) -> Floats:
    """Return ratings on a scale that raters share.

    Args:
        ratings: `[items][raters]`.
        window: `[answers][raters]`: the latest ratings of each rater, these included.
        scale: `none`; `rank`, the part of the window below a rating, with half of those equal to it, 0 to 1;
            `zscore`, the distance to the rater's mean in standard deviations, 0 for a rater that always gave the same.

    Rounding is no difference: ratings are equal for `rank` within `SPREAD_FLOOR` of themselves, and for `zscore` if
    their deviation is at most `SPREAD_FLOOR` of the largest in the window.
    """
    if scale == "none":
        return ratings
    column = _ranks if scale == "rank" else _zscores
    columns = [column(ratings[:, rater], window[:, rater]) for rater in range(ratings.shape[1])]
    return np.stack(columns, axis=1) if columns else ratings


def _ranks(values: Floats, window: Floats) -> Floats:
    known = np.sort(window[~np.isnan(window)])
    if not len(known):
        return np.full(values.shape, np.nan)
    with np.errstate(over="ignore"):
        slack = SPREAD_FLOOR * np.abs(values)
        low, high = values - slack, values + slack
    below, up_to = np.searchsorted(known, low, "left"), np.searchsorted(known, high, "right")
    return np.where(np.isnan(values), np.nan, (below + up_to) / (2.0 * len(known)))


def _zscores(values: Floats, window: Floats) -> Floats:
    known = window[~np.isnan(window)]
    if not len(known):
        return np.full(values.shape, np.nan)
    largest = float(np.abs(known).max()) or 1.0  # of no square an overflow
    known = known / largest
    if (deviation := known.std()) <= SPREAD_FLOOR:
        return np.where(np.isnan(values), np.nan, 0.0)
    found: Floats = (values / largest - known.mean()) / deviation
    return found
