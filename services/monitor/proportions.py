"""Whether shares differ by more than chance: one test, and how large the difference is. Pure.

The test is Pearson's chi-square of homogeneity over all parts, so that a share that is low in the middle shows as well
as one that falls from end to end. It is trusted only where it may be: every expected count at least 5 (Cochran 1954,
"Some methods for strengthening the common chi-square tests"). Among many groups any difference is more than chance,
so the largest one must also be at least small by Cohen's h, `2 asin(sqrt(p)) - 2 asin(sqrt(q))` (Cohen 1988,
"Statistical power analysis for the behavioral sciences", chapter 6).

Groups are taken for independent of each other. Those that are dropped in one sweep are not quite, so near the threshold
more alarms are false than it says.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

ALPHA: Final = 0.001
"""Share of false alarms of one test where there is nothing to find."""
EXPECTED_MIN: Final = 5.0
"""Fewest groups that each part must be expected to have of either kind."""
SMALL_H: Final = 0.2
"""Cohen's "small": 50 % against 60 %, or 90 % against 95 %."""


class Verdict(StrEnum):
    """What a comparison came to."""

    BIASED = "biased"
    NONE_SHOWS = "none shows"
    TOO_FEW = "too few"
    ONE_PART = "nothing to compare"
    """All are alike."""


class Comparison(msgspec.Struct, frozen=True):
    """Shares of several parts, compared.

    Attributes:
        verdict: What it came to.
        p: Probability of such a difference by chance; None if it was not tested.
        h: Cohen's h of the highest and the lowest share, 0 to pi.
    """

    verdict: Verdict
    p: float | None = None
    h: float = 0.0


def compare(hits: Sequence[int], totals: Sequence[int]) -> Comparison:
    """Compare the shares `hits / totals` of the parts; empty parts count for nothing."""
    parts = [(hit, total) for hit, total in zip(hits, totals, strict=True) if total > 0]
    if not parts:
        return Comparison(Verdict.TOO_FEW)
    if len(parts) == 1:
        return Comparison(Verdict.ONE_PART)
    share = sum(hit for hit, _ in parts) / sum(total for _, total in parts)
    if share in {0.0, 1.0}:
        return Comparison(Verdict.NONE_SHOWS, 1.0)
    h = _cohens_h([hit / total for hit, total in parts])
    if min(total for _, total in parts) * min(share, 1 - share) < EXPECTED_MIN:
        return Comparison(Verdict.TOO_FEW, None, h)
    chi2 = sum((hit - total * share) ** 2 / (total * share * (1 - share)) for hit, total in parts)
    p = chi2_tail(chi2, len(parts) - 1)
    biased = p < ALPHA and h >= SMALL_H
    return Comparison(Verdict.BIASED if biased else Verdict.NONE_SHOWS, p, h)


def _cohens_h(shares: Sequence[float]) -> float:
    return 2 * math.asin(math.sqrt(max(shares))) - 2 * math.asin(math.sqrt(min(shares)))


def chi2_tail(x: float, df: int) -> float:
    """Return the probability that chi-square with `df` degrees of freedom exceeds `x`.

    The finite series of Abramowitz and Stegun, 26.4.4 and 26.4.5.
    """
    if x <= 0:
        return 1.0
    half, odd = x / 2, df % 2
    tail = math.erfc(math.sqrt(half)) if odd else 0.0
    # Terms half**k * exp(-half) / gamma(k + 1) with k from 1/2 or 0 up to df/2 - 1; logarithms cannot overflow.
    for twice in range(odd, df, 2):
        k = twice / 2
        tail += math.exp(k * math.log(half) - half - math.lgamma(k + 1))
    return min(tail, 1.0)
