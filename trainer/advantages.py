"""From the scores of a group to what its sequences are worth against each other. Pure.

Only differences within a group teach anything. A group whose scores do not differ has no signal and is filtered: its
rounding noise must not be blown up to full size by a division. A group with a score that is no finite number is
rejected. Everything is computed in float64 from the scores as they came, then rounded once to float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Method = Literal["dr_grpo", "grpo"]

SPREAD_FLOOR: Final = 1e-6
"""Scores that differ by less than this part of max(1, |largest|) are equal: it is what is left of float32 sums."""
STD_FLOOR: Final = 1e-4
"""Smallest standard deviation to divide by; a nearly flat group stays small instead of becoming noise."""


class Verdict(StrEnum):
    """What becomes of a group."""

    USABLE = "usable"
    FILTERED = "filtered"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a group is good for.

    Attributes:
        verdict: Whether it is learned from.
        advantages: `[n]`, zero unless it is.
        reason: Why it is rejected, or empty.
    """

    verdict: Verdict
    advantages: NDArray[np.float32]
    reason: str = ""


def judge(scores: NDArray[Any], method: Method) -> Judgement:
    """Compute the advantages of one group from its scores `[n]`."""
    values = np.asarray(scores, np.float64)
    if not np.isfinite(values).all():
        return _nothing(values, Verdict.REJECTED, "a score is not a finite number")
    if not has_spread(values):
        return _nothing(values, Verdict.FILTERED)
    with np.errstate(over="ignore", invalid="ignore"):
        advantages = METHODS[method](values).astype(np.float32)
    if not np.isfinite(advantages).all():
        return _nothing(
            values, Verdict.REJECTED, "its scores are so far apart that an advantage is not finite"
        )
    return Judgement(Verdict.USABLE, advantages)


def _nothing(values: NDArray[np.float64], verdict: Verdict, reason: str = "") -> Judgement:
    return Judgement(verdict, np.zeros(values.shape, np.float32), reason)


def has_spread(scores: NDArray[np.float64]) -> bool:
    """Tell whether the scores `[n]` differ by more than rounding."""
    if not scores.size:
        return False
    high, low = float(scores.max()), float(scores.min())
    return high - low > SPREAD_FLOOR * max(1.0, abs(high), abs(low))


def dr_grpo(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each score to their mean: hard and easy tasks weigh as much as their scores differ."""
    return scores - np.mean(scores)


def grpo(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return that distance in standard deviations (of a sample: n - 1), never of less than `STD_FLOOR`."""
    return dr_grpo(scores) / max(float(scores.std(ddof=1)), STD_FLOOR)


METHODS: Final[Mapping[Method, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = {
    "dr_grpo": dr_grpo,
    "grpo": grpo,
}


def shuffled(scores: NDArray[Any], seed: int, group_id: str) -> NDArray[Any]:
    """Return the scores in an order of chance, the same for the same group whenever it comes: a control."""
    order = np.random.default_rng([seed, crc32(group_id.encode())])
    return order.permutation(scores)
