"""The bias report: produced against trained groups, by environment, length, duration and reward. Pure.

Staleness bounds and filters select rollouts. If the rejected ones are longer, slower or worse than the rest, the
policy learns from another distribution than it samples. So the report cuts each environment's groups at the quartiles
of its produced groups, and compares the parts: the share of each that was trained, and the share each reason took.

A group counts in a share once its fate is final: trained, filtered, expired, dead or discarded. Groups the broker still
holds, and groups no list names, are open: counted, but in no share. Evaluation groups are left out.

The test is Pearson's chi-square of homogeneity over all parts, so that a low share in the middle shows as well as a
trend from end to end. It requires an expected count of at least 5 everywhere (Cochran 1954, "Some methods for
strengthening the common chi-square tests"). With many groups any difference is significant, so the largest difference
must also be at least small by Cohen's h, `2 asin(sqrt(p)) - 2 asin(sqrt(q))` (Cohen 1988, "Statistical power analysis
for the behavioral sciences", chapter 6).

The test assumes independent groups. Groups dropped in one sweep are not quite independent, so near the threshold the
rate of false alarms exceeds `ALPHA`.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.files import AckedGroup
from rolloutmq.schemas.wire.envelope import GroupHeader, Split
from rolloutmq.services.monitor.report.summary import GroupCounts

ALPHA: Final = 0.001
"""Rate of false alarms of one test without any bias."""

EXPECTED_MIN: Final = 5.0
"""Minimum expected count of each part, for hits and for misses."""

SMALL_H: Final = 0.2
"""Cohen's "small" effect: 50 % against 60 %, or 90 % against 95 %."""


class BiasVerdict(StrEnum):
    """Result of a comparison."""

    BIASED = "biased"
    NONE_SHOWS = "none shows"
    TOO_FEW = "too few"
    ONE_PART = "nothing to compare"
    """All groups are alike."""


class Comparison(msgspec.Struct, frozen=True):
    """Comparison of the shares of several parts.

    Attributes:
        verdict: Result.
        p: Probability of such a difference by chance; None if not tested.
        h: Cohen's h of the highest and the lowest share, 0 to pi.
    """

    verdict: BiasVerdict
    p: float | None = None
    h: float = 0.0


def compare(hits: Sequence[int], totals: Sequence[int]) -> Comparison:
    """Compare the shares `hits / totals` of the parts; empty parts are ignored."""
    parts = [(hit, total) for hit, total in zip(hits, totals, strict=True) if total > 0]
    if not parts:
        return Comparison(BiasVerdict.TOO_FEW)
    if len(parts) == 1:
        return Comparison(BiasVerdict.ONE_PART)
    share = sum(hit for hit, _ in parts) / sum(total for _, total in parts)
    if share in {0.0, 1.0}:
        return Comparison(BiasVerdict.NONE_SHOWS, 1.0)
    h = _cohens_h([hit / total for hit, total in parts])
    if min(total for _, total in parts) * min(share, 1 - share) < EXPECTED_MIN:
        return Comparison(BiasVerdict.TOO_FEW, None, h)
    chi2 = sum((hit - total * share) ** 2 / (total * share * (1 - share)) for hit, total in parts)
    p = chi2_tail(chi2, len(parts) - 1)
    biased = p < ALPHA and h >= SMALL_H
    return Comparison(BiasVerdict.BIASED if biased else BiasVerdict.NONE_SHOWS, p, h)


def _cohens_h(shares: Sequence[float]) -> float:
    return 2 * math.asin(math.sqrt(max(shares))) - 2 * math.asin(math.sqrt(min(shares)))


def chi2_tail(x: float, df: int) -> float:
    """Return the probability that chi-square with `df` degrees of freedom exceeds `x`.

    The method is the finite series of Abramowitz and Stegun, 26.4.4 and 26.4.5.
    """
    if x <= 0:
        return 1.0
    half, odd = x / 2, df % 2
    tail = math.erfc(math.sqrt(half)) if odd else 0.0
    # Terms half**k * exp(-half) / gamma(k + 1) with k from 1/2 or 0 up to df/2 - 1; logarithms avoid overflow.
    for twice in range(odd, df, 2):
        k = twice / 2
        tail += math.exp(k * math.log(half) - half - math.lgamma(k + 1))
    return min(tail, 1.0)


TRAINED: Final = "trained"

FILTERED: Final = "filtered"

REASONS: Final = (FILTERED, "expired", "dead", "discarded")
"""Reasons why a group was not trained."""

OPEN: Final = ("in_flight", "lost")
"""States without an outcome."""

FATES: Final = (TRAINED, *REASONS, *OPEN)

SEALED: Final = 1 + len(REASONS)
"""Number of final fates, which come first."""

QUARTILES: Final = (0.25, 0.5, 0.75)


class Produced(NamedTuple):
    """One produced group; NaN means unknown."""

    env: str
    sequences: int
    length: float
    """Tokens per sequence, mean of the group."""
    duration: float
    """Seconds."""
    reward: float
    """Mean raw score."""
    split: Split = Split.TRAIN


DIMENSIONS: Final = ("length", "duration", "reward")
"""Compared figures; fields of `Produced`."""


def described(acked: AckedGroup) -> Produced | None:
    """Return the group of an ack log line; None if an earlier version wrote the line without figures."""
    if acked.sequences == 0:
        return None
    return Produced(
        acked.env,
        acked.sequences,
        acked.tokens / acked.sequences,
        # A clock set back during the rollout makes its duration unknown.
        math.nan if acked.duration_s is None or acked.duration_s < 0 else acked.duration_s,
        math.nan if acked.reward is None else acked.reward,
        acked.split,
    )


def headed(env: str, split: Split, header: GroupHeader) -> Produced:
    """Return the group described by its header."""
    duration = header.finished_at - header.started_at if header.started_at else math.nan
    known = math.isfinite(duration) and duration >= 0
    return Produced(
        env,
        header.sequences,
        header.tokens / header.sequences,
        duration if known else math.nan,
        header.rewards.mean,
        split,
    )


class Side(msgspec.Struct, frozen=True):
    """Groups, and means over those with a known figure; None if there are none."""

    groups: int
    sequences: int
    length: float | None
    duration: float | None
    reward: float | None


class Bin(msgspec.Struct, frozen=True):
    """Groups with a figure from `low` to `high`, both included, and their fates.

    Attributes:
        produced: All groups of the bin.
        sealed: Groups with a final fate; the shares refer to these.
        trained: Trained share; None without sealed groups.
        dropped: Share by reason, without zeros.
    """

    low: float
    high: float
    produced: int
    sealed: int
    trained: float | None
    dropped: dict[str, float]


class Dimension(msgspec.Struct, frozen=True):
    """One figure of an environment's groups.

    Attributes:
        verdict: Verdict on the trained share.
        ratio: Highest over lowest trained share; None if undefined.
        trained: Comparison of the trained shares.
        reasons: Comparison for each reason that took a group; two biased reasons may cancel out. For the filter, among
            the groups that reached it.
        unknown: Sealed groups without the figure.
        bins: From low to high; fewer than four if many groups have the same value.
    """

    verdict: BiasVerdict
    ratio: float | None
    trained: Comparison
    reasons: dict[str, Comparison]
    unknown: int
    bins: tuple[Bin, ...]

    @property
    def biased(self) -> list[str]:
        """Return the uneven shares: `trained`, and reasons."""
        every = {TRAINED: self.trained, **self.reasons}
        return [name for name, one in every.items() if one.verdict is BiasVerdict.BIASED]


class EnvironmentBias(msgspec.Struct, frozen=True):
    """Produced against trained groups of one environment. `fates` adds up to the produced groups."""

    produced: Side
    trained: Side
    fates: dict[str, int]
    dimensions: dict[str, Dimension]


class Bias(msgspec.Struct, frozen=True):
    """Produced against trained groups.

    Attributes:
        environments: By name.
        across: Comparison of the trained shares of the environments.
        evaluation: Evaluation groups, not compared.
        undescribed: Groups by fate with a known id only, not compared.
    """

    environments: dict[str, EnvironmentBias]
    across: Comparison
    evaluation: int
    undescribed: dict[str, int]

    def short(self) -> dict[str, Any]:
        """Return only the verdicts; a dimension is biased if a reason is."""
        return {
            "across_environments": self.across.verdict.value,
            "environments": {
                name: {
                    dimension: (BiasVerdict.BIASED if found.biased else found.verdict).value
                    for dimension, found in env.dimensions.items()
                }
                for name, env in self.environments.items()
            },
            "undescribed": sum(self.undescribed.values()),
        }


def find_bias(produced: Mapping[str, Produced], accounts: GroupCounts) -> Bias:
    """Compare produced with trained groups.

    Args:
        produced: Descriptions of groups, by id.
        accounts: Fate of every accepted group.
    """
    figures = GroupFigures()
    figures.add(produced, accounts)
    return figures.bias()


class GroupFigures:
    """Figures and fates of produced groups: 33 bytes for each, since the comparison needs their quartiles."""

    def __init__(self) -> None:
        self._figures: dict[str, array[float]] = {}
        self._fates: dict[str, array[int]] = {}
        self._evaluation = 0
        self._undescribed = Counter[str]()

    def add(self, produced: Mapping[str, Produced], accounts: GroupCounts) -> None:
        """Take groups; arguments as for `find_bias`, each group once."""
        for number, fate in enumerate(FATES):
            for name in getattr(accounts, fate):
                group = produced.get(name)
                if group is None:
                    self._undescribed[fate] += 1
                elif group.split is Split.EVAL:
                    self._evaluation += 1
                else:
                    self._figures.setdefault(group.env, array("d")).extend(group[1:5])
                    self._fates.setdefault(group.env, array("b")).append(number)

    def bias(self) -> Bias:
        """Compare produced with trained groups."""
        found = {
            env: _environment(
                np.array(self._figures[env]).reshape(-1, 4), np.array(self._fates[env], np.int8)
            )
            for env in sorted(self._figures)
        }
        return Bias(found, _across(found.values()), self._evaluation, dict(self._undescribed))


def _across(found: Iterable[EnvironmentBias]) -> Comparison:
    fates = [one.fates for one in found]
    return compare(
        [one.get(TRAINED, 0) for one in fates],
        [sum(one.get(fate, 0) for fate in FATES[:SEALED]) for one in fates],
    )


def _environment(figures: NDArray[np.float64], fates: NDArray[np.int8]) -> EnvironmentBias:
    """Return the comparison of one environment; `figures` has a row for each group."""
    counts = np.bincount(fates, minlength=len(FATES)).tolist()
    return EnvironmentBias(
        produced=_side(figures),
        trained=_side(figures[fates == 0]),
        fates={name: count for name, count in zip(FATES, counts, strict=True) if count},
        dimensions={
            name: _dimension(figures[:, column], fates) for column, name in enumerate(DIMENSIONS, start=1)
        },
    )


def _side(figures: NDArray[np.float64]) -> Side:
    means = (_mean(figures[:, column]) for column, _ in enumerate(DIMENSIONS, start=1))
    return Side(len(figures), int(figures[:, 0].sum()), *means)


def _mean(values: NDArray[np.float64]) -> float | None:
    known = np.sort(values[~np.isnan(values)])
    # Divide first: the sum may overflow where the mean does not. Sorted input makes the result reproducible.
    return float((known / known.size).sum()) if known.size else None


def _dimension(values: NDArray[np.float64], fates: NDArray[np.int8]) -> Dimension:
    known = ~np.isnan(values)
    unknown = int((fates[~known] < SEALED).sum())
    values, fates = values[known], fates[known]
    if not values.size:
        return Dimension(BiasVerdict.TOO_FEW, None, Comparison(BiasVerdict.TOO_FEW), {}, unknown, ())
    parts = np.searchsorted(_edges(values), values, side="left")
    bins, sealed = [], []
    for part in np.unique(parts):
        mine = parts == part
        counts = np.bincount(fates[mine], minlength=len(FATES)).tolist()
        sealed.append(counts[:SEALED])
        bins.append(_bin(values[mine], sealed[-1]))
    by_fate = {
        name: compare([counts[number] for counts in sealed], [_reached(name, counts) for counts in sealed])
        for number, name in enumerate(FATES[:SEALED])
        if number == 0 or any(counts[number] for counts in sealed)
    }
    trained = by_fate.pop(TRAINED)
    return Dimension(trained.verdict, _ratio(bins), trained, by_fate, unknown, tuple(bins))


def _reached(fate: str, counts: Sequence[int]) -> int:
    """Return how many groups could have met a fate: the filter sees no group that was given up earlier."""
    trained, filtered, *_ = counts
    return trained + filtered if fate == FILTERED else sum(counts)


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the upper bounds of all parts but the last, which must not be empty if many groups share the maximum."""
    top = values.max()
    edges = np.unique(np.quantile(values, QUARTILES, method="inverted_cdf"))
    if edges[-1] < top:
        return edges
    below = values[values < top]
    return np.unique(np.append(edges[:-1], below.max())) if below.size else edges[:0]


def _bin(values: NDArray[np.float64], counts: Sequence[int]) -> Bin:
    total = sum(counts)
    return Bin(
        low=float(values.min()),
        high=float(values.max()),
        produced=int(values.size),
        sealed=total,
        trained=counts[0] / total if total else None,
        dropped={name: count / total for name, count in zip(REASONS, counts[1:], strict=True) if count},
    )


def _ratio(bins: Sequence[Bin]) -> float | None:
    shares = [one.trained for one in bins if one.trained is not None]
    return shares[-1] / shares[0] if len(shares) > 1 and shares[0] else None
