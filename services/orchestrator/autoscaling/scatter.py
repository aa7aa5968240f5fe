"""How much the throughput of workers differs by chance, and how precisely a mean of groups tells it. Pure.

Groups arrive at random times: 24 independent ones tell a pace to 20 %, a thousand to 3 %. Rollouts of one length arrive
more evenly than that. How evenly is measured by comparing neighbouring blocks of groups. At first, groups count as
independent; with each block the measurement counts more.
"""

import math
from itertools import pairwise
from statistics import fmean
from typing import Final

import msgspec
from msgspec.structs import replace

BLOCK_GROUPS: Final = 8.0
"""Least groups of a block."""
BLOCKS: Final = 48
"""Blocks remembered."""
LEAST: Final = 4
"""Blocks from which the scatter is known; with so many, it counts as much as the assumption before."""
OF_NEIGHBOURS: Final = 2.0 / math.sqrt(math.pi)
"""Mean difference of two values of a normal distribution, in standard deviations."""


class PaceScatter(msgspec.Struct, frozen=True):
    """The last blocks of groups, oldest first.

    Attributes:
        blocks: Groups and busy worker time of each.
        dispersion: Variance of the number of groups relative to that of independent ones.
        groups, busy_s, spans_s: Groups and time of the open block, and the time it spans.
    """

    blocks: tuple[tuple[float, float], ...] = ()
    dispersion: float = 1.0
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
        if new.groups < BLOCK_GROUPS or new.spans_s < least_s or new.busy_s <= 0.0:
            return new
        blocks = (*self.blocks[1 - BLOCKS :], (new.groups, new.busy_s))
        return PaceScatter(blocks, _dispersion(blocks) if len(blocks) >= LEAST else 1.0)

    def error(self, groups: float) -> float:
        """Return the relative standard error of a throughput that so many groups tell."""
        return math.sqrt(self.dispersion / max(groups, 1.0))

    def groups_for(self, error: float) -> float:
        """Return the time constant, in groups, of a mean with this relative standard error.

        A mean that decays counts groups twice as old as its time constant.
        """
        return self.dispersion / (2.0 * error**2) if len(self.blocks) >= LEAST else 0.0


def _dispersion(blocks: tuple[tuple[float, float], ...]) -> float:
    paces = [groups / busy_s for groups, busy_s in blocks]
    differences = sorted(abs(late - early) for early, late in pairwise(paces))
    spread = (
        fmean(differences[:-1]) / OF_NEIGHBOURS / fmean(paces)
    )  # the largest one may be a change of the pace
    found = spread**2 * fmean(groups for groups, _ in blocks)
    return float(found ** (len(blocks) / (len(blocks) + LEAST)))
