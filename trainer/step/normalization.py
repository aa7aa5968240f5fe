"""Normalization of scores by the moments of their environment (`[trainer.rewards]`). Pure.

    zscore   (score - mean) / deviation      moments of all groups accepted before the lease of the batch
    minmax   (score - low) / (high - low)

Every advantage is a difference of scores of one group, so the offset cancels and only the divisor acts. It is the same
for all groups of an environment in a batch. `grpo` divides by the deviation of the group, and the divisor cancels too.
A clip acts on the distance from the environment's mean, in units of the divisor.

The moments of an environment count after `warmup_groups` groups, if its scores differ by more than rounding. Before, a
group is normalized by its own moments: it is on the right scale from the first step on. Raw scores would let the
environment with the largest ones dominate these steps, and the second moments of Adam would remember it for hundreds
more. No sequence is further than sqrt(n - 1) deviations from the mean of n sequences, so nothing blows up.

One extreme score may make a unit in which all others are alike. A group that spans less than `NEGLIGIBLE` units teaches
nothing; it is left out and counted, and the trainer says so.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.config.trainer import NormalizationConfig
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.statistics.moments import Moments

NEGLIGIBLE: Final = 1e-6
"""Range of the scores of a group, in units, below which it has no signal."""


@dataclass(frozen=True, slots=True)
class ScoreScale:
    """Scale of the scores of a group.

    Attributes:
        divisor: Score of one unit, above 0.
        mean: Mean from which the clip counts.
        clip: Largest distance from the mean, in units; None: no limit.
    """

    divisor: float = 1.0
    mean: float = 0.0
    clip: float | None = None

    def apply(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return scores `[n]` in units, up to an offset: nothing is subtracted unless a clip has to be applied."""
        if self.clip is None:
            return scores / self.divisor
        return np.clip((scores - self.mean) / self.divisor, -self.clip, self.clip)

    def hides(self, scores: NDArray[np.float64]) -> bool:
        """Return whether the scores `[n]` of a group differ by a negligible part of a unit; raw ones never do."""
        return self != RAW and float(np.ptp(scores)) < NEGLIGIBLE * self.divisor


RAW: Final = ScoreScale()


def scale_of(group: Group, config: NormalizationConfig, moments: Moments | None) -> ScoreScale:
    """Return the scale for the scores of a group.

    Args:
        group: The group, with raw scores.
        config: The section.
        moments: Moments of its environment; None if the batch brought none.
    """
    if config.normalize == "none":
        return RAW
    if moments is None or moments.groups < config.warmup_groups or not moments.spread:
        moments = Moments().after(group.rewards(), group.sequences)
        if not moments.spread:
            return RAW
    divisor = moments.deviation if config.normalize == "zscore" else moments.high - moments.low
    return ScoreScale(divisor, moments.mean, config.clip) if isfinite(divisor) else RAW
