"""Acts on the agreement of raters: who is down-weighted, and whether groups are withheld. Pure.

After each rated group the agreement of the window decides, on the common scale of the raters:

    fewer than `min_items` answers, or alpha undefined    as before
    alpha at least `low`                                  no outliers, not low
    alpha below `low`                                     low; with `down_weight`, the outliers are those without whom
                                                          alpha would reach `low`

A low agreement ends only at `release`, clearly above `low`: alpha is an estimate, and near `low` it would begin and end
with each group. Until then `release` stands for `low`, also for the outliers.
`min_items` holds for every alpha, also for those without a rater.

A weight is always the configured one or its multiple by `outlier_weight`, so it comes back as soon as the raters agree.
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.config.rewards import AgreementConfig
from rolloutmq.services.rewards.agreement import Alpha, alpha, alphas_without, outliers

Floats = NDArray[np.float64]

LOW: Final = 1 << 63
"""Bit of the marks that says that the agreement is low; the other bits are the outliers."""
MARGIN: Final = 0.05, 0.1
"""Distance of `release` from `low`: at least so much, and at least such a part of `low`."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Agreement of the window, and what follows from it.

    Attributes:
        alpha: Agreement; undefined before the first group.
        marks: Bits of the outliers, and `LOW`.
        before: The marks before.
        without: Alpha without each rater, where alpha is low; else empty.
    """

    alpha: Alpha
    marks: int = 0
    before: int = 0
    without: tuple[float, ...] = field(default=())

    @property
    def is_low(self) -> bool:
        """Whether the agreement is low."""
        return bool(self.marks & LOW)

    def changes(self, bit: int) -> bool:
        """Return whether a mark differs from before."""
        return bool((self.marks ^ self.before) & bit)


def release(low: float) -> float:
    """Return the alpha at which a low agreement ends: above `low`, and within reach."""
    least, part = MARGIN
    return min(low + max(least, part * abs(low)), (low + 1.0) / 2)


def low_problem(judgement: Judgement, config: AgreementConfig) -> str:
    """Return why a low agreement is low."""
    value, low = judgement.alpha.value, config.low
    if not value >= low:
        return f"alpha {value:.3f} of the raters is below {low:g}"
    return f"alpha {value:.3f} of the raters was below {low:g}, and has not come back to {release(low):g}"


def judge(window: Floats, before: int, config: AgreementConfig) -> Judgement:
    """Judge the agreement of a window `[answers][raters]` of ratings on a common scale."""
    found = alpha(window, config.metric)
    if not found.is_defined or found.items < config.min_items:
        return Judgement(found, before, before)
    low = release(config.low) if before & LOW else config.low
    if found.value >= low:
        return Judgement(found, 0, before)
    marks = LOW
    if config.act == "down_weight":
        for rater in outliers(window, low, config.metric, config.min_items):
            marks |= 1 << rater
    without = tuple(alphas_without(window, config.metric, config.min_items).tolist())
    return Judgement(found, marks, before, without)


def weights_in_force(weights: Floats, marks: int, outlier_weight: float) -> Floats:
    """Return the weights `[raters]`, those of outliers multiplied. If nothing were left, the weights as configured."""
    factors = np.array([outlier_weight if marks >> rater & 1 else 1.0 for rater in range(len(weights))])
    found = weights * factors
    return found if found.any() else weights


def numbers_of(judgement: Judgement, names: tuple[str, ...], config: AgreementConfig) -> dict[str, float]:
    """Return the numbers of a judgement for an event; those that are undefined are left out."""
    found = {"alpha": judgement.alpha.value, "low": config.low, "items": float(judgement.alpha.items)}
    found |= {f"alpha_without.{name}": value for name, value in zip(names, judgement.without, strict=False)}
    return {name: value for name, value in found.items() if isfinite(value)}
