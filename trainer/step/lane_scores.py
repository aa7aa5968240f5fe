"""Scores of each environment in a batch, as sums for the checks of their health. Pure."""

from collections.abc import Sequence

import numpy as np

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.health import LaneScores, bounded


def lane_scores(groups: Sequence[Group]) -> tuple[LaneScores, ...]:
    """Return the sums over the groups of each environment, by name. Groups without an environment are left out."""
    return merged([_of_group(group) for group in groups if group.env])


def merged(parts: Sequence[LaneScores]) -> tuple[LaneScores, ...]:
    """Merge sums by environment, for example those of all ranks."""
    found: dict[str, LaneScores] = {}
    for part in parts:
        found[part.env] = found[part.env].merged(part) if part.env in found else part
    return tuple(found[env] for env in sorted(found))


def _of_group(group: Group) -> LaneScores:
    rewards, scores = group.rewards(), group.columns["scores"].numbers()
    lengths = group.columns["tokens"].lengths[0].astype(np.float64)
    x = lengths - lengths.mean()
    with np.errstate(over="ignore", invalid="ignore"):
        y = scores - rewards.mean
        syy, sxy = float(y @ y), float(x @ y)
    return LaneScores(
        env=group.env,
        groups=1,
        flat=int(rewards.low == rewards.high),
        sequences=group.sequences,
        mean=rewards.mean,
        m2=bounded(rewards.m2),
        low=rewards.low,
        high=rewards.high,
        at_low=int((scores == rewards.low).sum()),
        at_high=int((scores == rewards.high).sum()),
        tokens=group.tokens,
        sxx=float(x @ x),
        syy=bounded(syy),
        sxy=bounded(sxy),
    )
