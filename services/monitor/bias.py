"""Whether what is trained is like what was produced: by environment, length, duration and reward. Pure.

Bounds and filters choose among rollouts. If what they leave out is longer, slower or worse than the rest, the policy
learns from another distribution than it samples. So each environment's groups are cut at the quartiles of what it
produced, and the parts are compared: which share of each was trained, and which share each reason took.

A group counts in a share once its fate is sealed: trained, filtered, expired, dead or discarded. Whatever the broker
still holds, and what no list names, is open: it is counted, and in no share. Groups for evaluation are left out.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.envelope import GroupHeader, Split
from rolloutmq.schemas.records import AckedGroup
from rolloutmq.services.monitor.proportions import Comparison, Verdict, compare
from rolloutmq.services.monitor.summary import Accounts

TRAINED: Final = "trained"
FILTERED: Final = "filtered"
REASONS: Final = (FILTERED, "expired", "dead", "discarded")
"""Why a group was not trained."""
OPEN: Final = ("in_flight", "lost")
"""Places that are no end yet; while a run lives, what is queued looks lost."""
FATES: Final = (TRAINED, *REASONS, *OPEN)
SEALED: Final = 1 + len(REASONS)
"""So many of the fates, the first ones, are final."""
QUARTILES: Final = (0.25, 0.5, 0.75)


class Produced(NamedTuple):
    """One group as it was produced; NaN is what nobody knows."""

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
"""By what produced and trained are compared; fields of `Produced`."""


def described(acked: AckedGroup) -> Produced | None:
    """Return what a line tells of its group; None if it is of an earlier version and tells nothing."""
    if acked.sequences == 0:
        return None
    return Produced(
        acked.env,
        acked.sequences,
        acked.tokens / acked.sequences,
        # A clock that was set back makes a duration that nobody knows.
        math.nan if acked.duration_s is None or acked.duration_s < 0 else acked.duration_s,
        math.nan if acked.reward is None else acked.reward,
        acked.split,
    )


def headed(env: str, split: Split, header: GroupHeader) -> Produced:
    """Return what the header of a group tells."""
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
    """Groups, and means over those of them whose figure is known; a mean of none is None."""

    groups: int
    sequences: int
    length: float | None
    duration: float | None
    reward: float | None


class Bin(msgspec.Struct, frozen=True):
    """Groups whose figure is from `low` to `high`, both included, and what became of them.

    Attributes:
        produced: All of them.
        sealed: Those whose fate is final; the shares are of these.
        trained: Share that was trained, None if there are no sealed ones.
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
        verdict: Of the trained share.
        ratio: Trained share of the highest part over that of the lowest, None if there is none.
        trained: The comparison of the trained shares.
        reasons: The same for each reason that took a group; one may be biased and another make up for it. Of the
            filter, among the groups that came as far.
        unknown: Sealed groups without the figure.
        bins: From low to high; fewer than four where many groups have the same value.
    """

    verdict: Verdict
    ratio: float | None
    trained: Comparison
    reasons: dict[str, Comparison]
    unknown: int
    bins: tuple[Bin, ...]

    @property
    def biased(self) -> list[str]:
        """What is unevenly spread: `trained`, and reasons."""
        every = {TRAINED: self.trained, **self.reasons}
        return [name for name, one in every.items() if one.verdict is Verdict.BIASED]


class EnvironmentBias(msgspec.Struct, frozen=True):
    """Produced against trained, of one environment. `fates` adds up to what was produced."""

    produced: Side
    trained: Side
    fates: dict[str, int]
    dimensions: dict[str, Dimension]


class Bias(msgspec.Struct, frozen=True):
    """What was produced against what was trained.

    Attributes:
        environments: By name.
        across: The trained shares of the environments, compared.
        evaluation: Groups for evaluation, which are not compared.
        undescribed: Groups by fate that are known by their ids only, which are not compared either.
    """

    environments: dict[str, EnvironmentBias]
    across: Comparison
    evaluation: int
    undescribed: dict[str, int]

    def short(self) -> dict[str, Any]:
        """Return the verdicts alone; a dimension is biased if a reason is."""
        return {
            "across_environments": self.across.verdict.value,
            "environments": {
                name: {
                    dimension: (Verdict.BIASED if found.biased else found.verdict).value
                    for dimension, found in env.dimensions.items()
                }
                for name, env in self.environments.items()
            },
            "undescribed": sum(self.undescribed.values()),
        }


def find_bias(produced: Mapping[str, Produced], accounts: Accounts) -> Bias:
    """Compare what was produced with what was trained.

    Args:
        produced: What is known of groups, by id.
        accounts: What became of every accepted group.
    """
    groups: dict[str, list[Produced]] = {}
    fates: dict[str, array[int]] = {}
    evaluation, undescribed = 0, Counter[str]()
    for number, fate in enumerate(FATES):
        for name in getattr(accounts, fate):
            group = produced.get(name)
            if group is None:
                undescribed[fate] += 1
            elif group.split is Split.EVAL:
                evaluation += 1
            else:
                groups.setdefault(group.env, []).append(group)
                fates.setdefault(group.env, array("b")).append(number)
    found = {env: _environment(groups[env], np.array(fates[env], np.int8)) for env in sorted(groups)}
    return Bias(found, _across(found.values()), evaluation, dict(undescribed))


def _across(found: Iterable[EnvironmentBias]) -> Comparison:
    fates = [one.fates for one in found]
    return compare(
        [one.get(TRAINED, 0) for one in fates],
        [sum(one.get(fate, 0) for fate in FATES[:SEALED]) for one in fates],
    )


def _environment(groups: Sequence[Produced], fates: NDArray[np.int8]) -> EnvironmentBias:
    # One array of all figures: a run has a hundred thousand groups.
    figures = np.array([group[1:5] for group in groups], np.float64)
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
    # Divided first, since the sum may be too large where the mean is not; sorted, so that it is the same each time.
    return float((known / known.size).sum()) if known.size else None


def _dimension(values: NDArray[np.float64], fates: NDArray[np.int8]) -> Dimension:
    known = ~np.isnan(values)
    unknown = int((fates[~known] < SEALED).sum())
    values, fates = values[known], fates[known]
    if not values.size:
        return Dimension(Verdict.TOO_FEW, None, Comparison(Verdict.TOO_FEW), {}, unknown, ())
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
    """Return how many groups a fate could have taken: the filter never saw what was given up before it."""
    trained, filtered, *_ = counts
    return trained + filtered if fate == FILTERED else sum(counts)


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return upper bounds of all parts but the last. The last must not be empty where many share the highest value."""
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
