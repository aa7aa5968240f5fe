"""From the scores of a group to what its sequences are worth against each other. Pure.

Only differences within a group teach anything. A group whose scores do not differ has no signal and is filtered: its
rounding noise must not be blown up to full size by a division. A group with a score that is no finite number is
rejected. Everything is computed in float64 from the scores as they came, then rounded once to float32.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.losses import LossSection, Method

SPREAD_FLOOR: Final = 1e-6
"""Scores that differ by no more than this part of the largest magnitude are equal: it is what is left of float32 sums.

That is assumed of numbers that are as large as what they were summed from. What cancelled to nearly zero (1e-17, from
parts of size 1) cannot be told from a reward of that size, and is learned from as one: it moves next to nothing, for
`std_floor` keeps it as small as it is.
"""
SMALLEST_SPREAD: Final = 1e-30
"""Scores that differ by no more are equal whatever their size: in float32 their advantages would hardly be numbers."""


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
        advantages: `[n]`, or `[tokens]` where they came with the group; zero unless it is.
        reason: Why it is rejected, or empty.
    """

    verdict: Verdict
    advantages: NDArray[np.float32]
    reason: str = ""


def judge(
    scores: NDArray[Any], config: LossSection, penalties: NDArray[np.float64] | None = None
) -> Judgement:
    """Compute the advantages of one group.

    Args:
        scores: `[n]` as the environment gave them.
        config: How they are compared.
        penalties: `[n]`, what each sequence loses for being far from a reference. They are compared as the scores are
            but never divided by a deviation: a group whose scores hardly differ must not make much of its penalties.
            Whether a group has a signal is for its scores alone to say.
    """
    values = np.asarray(scores, np.float64)
    if not np.isfinite(values).all():
        return _nothing(values, Verdict.REJECTED, "a score is not a finite number")
    if not has_spread(values):
        return _nothing(values, Verdict.FILTERED)
    with np.errstate(over="ignore", invalid="ignore"):
        found = compare(values, config.advantage, ddof=config.std_ddof, floor=config.std_floor)
        if penalties is not None:
            found = found - (leave_one_out if config.advantage == "rloo" else centre)(penalties)
        advantages = found.astype(np.float32)
    if not np.isfinite(advantages).all():
        return _nothing(
            values, Verdict.REJECTED, "its scores are so far apart that an advantage is not finite"
        )
    return Judgement(Verdict.USABLE, advantages)


def judge_given(given: NDArray[np.float64], trained: NDArray[np.bool_]) -> Judgement:
    """Take the advantages `[tokens]` that came with a group; only those of trained tokens have to make sense."""
    if not np.isfinite(given[trained]).all():
        return _nothing(given, Verdict.REJECTED, "an advantage of a trained token is not a finite number")
    with np.errstate(over="ignore", invalid="ignore"):
        advantages = np.where(trained, given, 0.0).astype(np.float32)
    if not np.isfinite(advantages).all():
        return _nothing(given, Verdict.REJECTED, "an advantage is too large for float32")
    if not advantages.any():
        return _nothing(given, Verdict.FILTERED)
    return Judgement(Verdict.USABLE, advantages)


def _nothing(values: NDArray[np.float64], verdict: Verdict, reason: str = "") -> Judgement:
    return Judgement(verdict, np.zeros(values.shape, np.float32), reason)


def has_spread(scores: NDArray[np.float64]) -> bool:
    """Tell whether the scores `[n]` differ by more than rounding, on whatever scale they are."""
    if not scores.size:
        return False
    high, low = float(scores.max()), float(scores.min())
    return high - low > max(SMALLEST_SPREAD, SPREAD_FLOOR * max(abs(high), abs(low)))


def compare(scores: NDArray[np.float64], method: Method, *, ddof: int, floor: float) -> NDArray[np.float64]:
    """Return what each score `[n]` is worth against the others of its group."""
    match method:
        case "dr_grpo":
            return centre(scores)
        case "grpo":
            return centre(scores) / max(float(scores.std(ddof=ddof)), floor)
        case "rloo":
            return leave_one_out(scores)


def centre(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each score to their mean: hard and easy tasks weigh as much as their scores differ."""
    return scores - np.mean(scores)


def leave_one_out(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each of two or more scores to the mean of the others.

    A baseline that the sequence itself has no part in leaves the gradient unbiased.
    """
    return centre(scores) * (len(scores) / (len(scores) - 1))


def shuffled(scores: NDArray[Any], seed: int, group_id: str) -> NDArray[Any]:
    """Return the scores in an order of chance, the same for the same group whenever it comes: a control."""
    order = np.random.default_rng([seed, crc32(group_id.encode())])
    return order.permutation(scores)
