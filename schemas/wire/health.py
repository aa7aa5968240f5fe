"""Health of the rewards: what the trainer says of the scores of a batch, and the findings from it."""

from math import isfinite
from sys import float_info
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Count, Message, Name, Seconds

Positive = Annotated[int, Meta(ge=1, le=(1 << 62))]


class LaneScores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw scores of one environment in a batch, with sums that merge exactly over steps and ranks.

    Attributes:
        env: Environment.
        groups: Groups of the batch, filtered ones included.
        flat: Groups in which all scores are equal.
        sequences: Sequences of these groups.
        mean: Mean score.
        m2: Sum of the squared deviations from the mean; at most the largest float.
        low, high: Lowest and highest score.
        at_low, at_high: Sequences with exactly these scores.
        tokens: Tokens of these sequences.
        sxx, syy, sxy: Sums over the sequences of squares and products of deviations, of length (x, in tokens) and score
            (y), from the means of their group: the tasks do not differ within a group.
    """

    env: Name
    groups: Positive
    flat: Count
    sequences: Positive
    mean: float
    m2: Annotated[float, Meta(ge=0)]
    low: float
    high: float
    at_low: Count
    at_high: Count
    tokens: Count
    sxx: float
    syy: float
    sxy: float

    def merged(self, other: Self) -> Self:
        """Return the sums of both (Chan et al. 1979, for mean and m2)."""
        count = self.sequences + other.sequences
        delta = other.mean - self.mean
        share = other.sequences / count
        low, high = min(self.low, other.low), max(self.high, other.high)
        return type(self)(
            env=self.env,
            groups=self.groups + other.groups,
            flat=self.flat + other.flat,
            sequences=count,
            # Not the weighted sum, unless the difference overflows: equal means must stay as they are.
            mean=self.mean + delta * share
            if isfinite(delta)
            else self.mean * (1 - share) + other.mean * share,
            m2=bounded(self.m2 + other.m2 + delta * delta * self.sequences * share),
            low=low,
            high=high,
            at_low=sum(one.at_low for one in (self, other) if one.low == low),
            at_high=sum(one.at_high for one in (self, other) if one.high == high),
            tokens=self.tokens + other.tokens,
            sxx=bounded(self.sxx + other.sxx),
            syy=bounded(self.syy + other.syy),
            sxy=bounded(self.sxy + other.sxy),
        )


def bounded(value: float) -> float:
    """Return a sum, at most the largest float in magnitude: JSON has no infinity. 0 for NaN, of opposite overflows."""
    return max(-float_info.max, min(float_info.max, value)) if value == value else 0.0


class HealthFinding(Message, tag="health_finding", frozen=True, kw_only=True):
    """Something wrong with the rewards of an environment, and what to do; published on `telemetry.health.ENV`."""

    env: Name
    at: Seconds
    finding: str
    """Name of the check or the act, such as `collapse` or `down_weight`."""
    problem: str
    """What was found; empty where a finding ends."""
    remedy: str = ""
    """What to do about it."""
    numbers: dict[str, float] = {}
    """Numbers that led to it, by name."""
    source: str = ""
    """Process that found it."""
    ended: bool = False
    """The finding of that name no longer holds."""
