"""Moments of scores: number, mean, squared deviations and range, merged group by group. Pure, in float64.

Groups arrive with their own moments (`RewardSummary`), so a lane's moments follow without a single score. The merge is
that of Chan, Golub and LeVeque (1979, "Updating formulae and a pairwise algorithm for computing sample variances", eq.
2.1), which is Welford's update for a group of one. It begins with nothing: a small invented count would bias the
first estimates.

Without decay the result does not depend on the order of the groups, up to rounding. With a half-life of h groups it
does, and the order is that of acceptance in the lane. Before the k-th group is merged, `weight` and `m2` are multiplied
by 2^(-1/h), and both ends of the range move to the mean by the same factor. A sequence accepted k groups ago then
weighs 2^(-k/h), and an extreme value has half its distance from the mean left after h groups.

A group that would make a moment infinite or not a number is left out and counted.
"""

from collections.abc import Sequence
from math import inf, isfinite, sqrt
from typing import Annotated, Final, NamedTuple, Protocol

import msgspec
from msgspec import Meta
from msgspec.structs import replace

SPREAD_FLOOR: Final = 1e-6
"""Deviation relative to the largest score below which scores are equal, above the rounding of float32 sums."""
SMALLEST_SPREAD: Final = 1e-30
"""Absolute deviation below which scores are equal."""
ROUNDING: Final = 1e-9
"""Relative error of a mean that was summed elsewhere."""

Number = Annotated[int, Meta(ge=0, le=(1 << 62))]


class Summary(Protocol):
    """Moments of one group; see `schemas.wire.envelope.RewardSummary`."""

    @property
    def mean(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def m2(self) -> float: ...


class ScoredGroup(Protocol):
    """A group with the moments of its scores and their number; see `schemas.wire.envelope.GroupHeader`."""

    @property
    def rewards(self) -> Summary: ...
    @property
    def sequences(self) -> int: ...


class _Scored(NamedTuple):
    rewards: Summary
    sequences: int


class Moments(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Moments of the scores of a lane. Every value is finite.

    Attributes:
        groups: Groups in the moments. It grows with each, so it is the version of the state.
        weight: Sequences in the moments; with decay the sum of their weights.
        mean: Mean score; 0 without any.
        m2: Sum of the weighted squared deviations from the mean.
        low: Lowest score.
        high: Highest score.
        left_out: Groups left out, because their moments or the merged ones are not finite or contradict each other.
    """

    groups: Number = 0
    weight: Annotated[float, Meta(ge=0)] = 0.0
    mean: float = 0.0
    m2: Annotated[float, Meta(ge=0)] = 0.0
    low: float = 0.0
    high: float = 0.0
    left_out: Number = 0

    @property
    def deviation(self) -> float:
        """Population standard deviation; 0 without any score."""
        return sqrt(self.m2 / self.weight) if self.weight else 0.0

    @property
    def spread(self) -> bool:
        """Whether the scores differ by more than rounding, so that dividing by the deviation has a meaning."""
        return self.deviation > max(SMALLEST_SPREAD, SPREAD_FLOOR * max(abs(self.low), abs(self.high)))

    def after(self, group: Summary, sequences: int, half_life_groups: float | None = None) -> "Moments":
        """Return the moments with one more group.

        Args:
            group: Its moments, from an untrusted peer.
            sequences: Number of its scores.
            half_life_groups: Groups after which a sequence has half its weight; None: all weigh the same.
        """
        return self.after_all((_Scored(group, sequences),), half_life_groups)

    def after_all(self, groups: Sequence["ScoredGroup"], half_life_groups: float | None = None) -> "Moments":
        """Return the moments with more groups, to the last bit those of one `after` the other.

        Each group is `merged` into the `faded` moments; here in one loop, without an object for each.
        """
        keep = None if half_life_groups is None else 0.5 ** (1.0 / half_life_groups)
        weight, mean, m2, low, high, left_out = (
            self.weight, self.mean, self.m2, self.low, self.high, self.left_out,
        )  # fmt: skip
        for scored in groups:
            group, scores = scored.rewards, scored.sequences
            center, least, most, spread = group.mean, group.low, group.high, group.m2
            width = most - least
            if not (
                scores > 0
                and least <= center <= most
                and 0.0 <= spread <= 0.25 * scores * width * width < inf
            ):
                if not _is_sound(group, scores):
                    left_out += 1
                    continue
                center = min(max(center, least), most)
            kept = weight if keep is None else weight * keep
            total = scores + kept
            apart, part = center - mean, scores / total
            if kept:
                spread = (m2 if keep is None else m2 * keep) + spread + apart * apart * (kept * part)
            if not spread < inf:  # whatever else overflows takes it along
                left_out += 1
                continue
            if kept:
                if keep is not None:
                    low, high = mean + (low - mean) * keep, mean + (high - mean) * keep
                # As `min` and `max` do it, at a third of their time.
                least = low if low <= least else least
                most = high if high >= most else most
                center = mean + apart * part
                center = least if least > center else center
                center = most if most < center else center
            weight, mean, m2, low, high = total, center, spread, least, most
        merged = self.groups + len(groups) - (left_out - self.left_out)
        return Moments(merged, weight, mean, m2, low, high, left_out)

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of both, of which no group is in the other. They may overflow; see `finite`."""
        groups, left_out = self.groups + other.groups, self.left_out + other.left_out
        if not self.weight or not other.weight:
            return replace(self if self.weight else other, groups=groups, left_out=left_out)
        weight = self.weight + other.weight
        low, high = min(self.low, other.low), max(self.high, other.high)
        apart, part = other.mean - self.mean, other.weight / weight
        return Moments(
            groups,
            weight,
            min(max(self.mean + apart * part, low), high),
            self.m2 + other.m2 + apart * apart * (self.weight * part),
            low,
            high,
            left_out,
        )

    def faded(self, half_life_groups: float | None) -> "Moments":
        """Return the moments one group later."""
        if half_life_groups is None:
            return self
        keep, mean = 0.5 ** (1.0 / half_life_groups), self.mean
        return Moments(
            self.groups,
            self.weight * keep,
            mean,
            self.m2 * keep,
            mean + (self.low - mean) * keep,
            mean + (self.high - mean) * keep,
            self.left_out,
        )

    @property
    def finite(self) -> bool:
        """Whether nothing has overflowed."""
        return all(map(isfinite, (self.weight, self.mean, self.m2, self.low, self.high)))


def _is_sound(group: Summary, sequences: int) -> bool:
    """Return whether the moments of a group can be those of so many scores; no comparison holds for NaN."""
    mean, low, high, m2 = group.mean, group.low, group.high, group.m2
    if not (sequences > 0 and isfinite(high - low)):
        return False
    slack = ROUNDING * max(abs(low), abs(high))
    # Popoviciu: no scores within a range deviate from their mean by more than half of it.
    widest = 0.5 * (high - low) + slack
    return low - slack <= mean <= high + slack and 0.0 <= m2 <= sequences * widest * widest * (1 + ROUNDING)
