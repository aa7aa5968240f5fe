"""How much the throughput of workers differs by chance, and how precisely a mean of groups tells it. Pure.

Groups arrive at random times: 24 independent ones tell a pace to 20 %, a thousand to 3 %. Rollouts of one length arrive
more evenly than that, and groups that end together less evenly. How evenly is measured by comparing neighbouring blocks
of time. At first, groups count as independent; with each block the measurement counts more.

The length of a block is fixed when it begins. If it ended with the arrival of some group, its pace would depend on what
it counts: it would seem too high, and always about the same. Groups that arrive eight at a time need longer blocks.
"""

import math
from itertools import pairwise
from statistics import NormalDist
from typing import Final

import msgspec
from msgspec.structs import replace

BLOCK_GROUPS: Final = 8.0
"""Expected groups of a block, if they arrive one at a time."""
MOST_TOGETHER: Final = 8.0
"""Most groups that count as one since they arrive together: a backlog that arrives at once says nothing about later."""
BLOCKS: Final = 48
"""Blocks remembered."""
LEAST: Final = 4
KNOWN: Final = 16
"""Blocks from which the scatter is known, and from which it counts alone: no longer the assumption before."""
BLOM: Final = (0.375, 0.25)
"""Constants of Blom's approximation of the largest of some values of a normal distribution."""

_Block = tuple[float, float]
"""Groups and busy worker time."""


class PaceScatter(msgspec.Struct, frozen=True):
    """The last blocks of time, oldest first.

    Attributes:
        blocks: Groups and busy worker time of each.
        dispersion: Variance of the number of groups relative to that of independent ones.
        lasts_s: Busy worker time of the open block; 0 while no pace is known.
        groups, busy_s, spans_s: Groups and time of the open block, and the time it spans.
    """

    blocks: tuple[_Block, ...] = ()
    dispersion: float = 1.0
    lasts_s: float = 0.0
    groups: float = 0.0
    busy_s: float = 0.0
    spans_s: float = 0.0

    def looked(self, groups: float, busy_s: float, elapsed_s: float, least_s: float) -> "PaceScatter":
        """Return the blocks with one more sample; a block spans at least `least_s`: workers may deliver together."""
        new = replace(
            self,
            groups=self.groups + groups,
            busy_s=self.busy_s + busy_s,
            spans_s=self.spans_s + elapsed_s,
        )
        if new.spans_s < least_s or new.busy_s <= 0.0:
            return new
        if (
            not self.lasts_s
        ):  # the first groups tell a pace, and nothing else: what they count ends their time
            if new.groups < BLOCK_GROUPS:
                return new
            return PaceScatter(lasts_s=BLOCK_GROUPS * new.busy_s / new.groups)
        if new.busy_s < self.lasts_s:
            return new
        blocks = (*self.blocks[1 - BLOCKS :], (new.groups, new.busy_s))
        dispersion = _dispersion(blocks) if len(blocks) >= LEAST else 1.0
        counted, total_s = sum(of for of, _ in blocks), sum(busy_s for _, busy_s in blocks)
        new = PaceScatter(blocks, dispersion, self.lasts_s)
        if not counted:
            return new
        return replace(new, lasts_s=BLOCK_GROUPS * new.together * total_s / counted)

    @property
    def together(self) -> float:
        """Return how many groups count as one, since they arrive together; at least 1."""
        return min(max(1.0, self.dispersion), MOST_TOGETHER)

    def error(self, groups: float) -> float:
        """Return the relative standard error of a throughput that so many groups tell."""
        return math.sqrt(self.dispersion / max(groups, 1.0))

    def groups_for(self, error: float) -> float:
        """Return the time constant, in groups, of a mean with this relative standard error.

        A mean that decays counts groups twice as old as its time constant.
        """
        return self.dispersion / (2.0 * error**2) if len(self.blocks) >= LEAST else 0.0


def _dispersion(blocks: tuple[_Block, ...]) -> float:
    squares = sorted(_square(early, late) for early, late in pairwise(blocks))
    told = sum(squares[:-1])  # the largest one may be a change of the pace
    found = told / (len(squares) - _largest_square(len(squares)))
    return float(found ** min(1.0, len(blocks) / KNOWN))


def _square(early: _Block, late: _Block) -> float:
    """Return the squared difference of two paces, relative to that of independent groups."""
    (groups, busy_s), (more, more_s) = early, late
    if not groups + more:
        return 0.0
    return (groups * more_s - more * busy_s) ** 2 / (busy_s * more_s * (groups + more))


def _largest_square(count: int) -> float:
    """Return the expected largest square of so many values of a standard normal distribution."""
    part = (count - BLOM[0]) / (count + BLOM[1])
    return NormalDist().inv_cdf((1.0 + part) / 2.0) ** 2
