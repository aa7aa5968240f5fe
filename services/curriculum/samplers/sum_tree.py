"""A tree of weights: change one weight and draw by weight, each in O(log n).

An inner node is the sum of its two children, computed anew at each change. So the sums depend on the weights alone, not
on the order of changes, and rounding errors do not grow.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SumTree:
    """Weights of the numbers 0 to `count` - 1, none negative. Memory: at most 32 bytes a number.

    Args:
        weights: First weight of each number.
    """

    def __init__(self, weights: Sequence[float] | NDArray[np.floating[Any]]) -> None:
        self.count = len(weights)
        self._leaves = 1 << max(0, self.count - 1).bit_length()
        levels = [np.zeros(self._leaves)]
        levels[0][: self.count] = weights
        while len(levels[-1]) > 1:
            levels.append(levels[-1][0::2] + levels[-1][1::2])
        self._nodes = array("d", bytes(8))
        for level in reversed(levels):
            self._nodes.frombytes(level.tobytes())

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return self._nodes[1]

    def __getitem__(self, number: int) -> float:
        return self._nodes[self._leaves + number]

    def __setitem__(self, number: int, weight: float) -> None:
        nodes, at = self._nodes, self._leaves + number
        nodes[at] = weight
        at >>= 1
        while at:
            nodes[at] = nodes[2 * at] + nodes[2 * at + 1]
            at >>= 1

    def draw(self, u: float) -> int:
        """Return a number with a probability in proportion to its weight; a number without weight is never drawn.

        Args:
            u: A uniform random number from 0 to below 1.

        Raises:
            ValueError: No number has a weight.
        """
        return self.find(u * self.total)[0]

    def find(self, target: float) -> tuple[int, float]:
        """Return the number in which the running sum of the weights passes `target`, and the sum before it.

        Raises:
            ValueError: No number has a weight.
        """
        nodes, at, before = self._nodes, 1, 0.0
        if not nodes[1] > 0:
            raise ValueError("no number has a weight")
        while at < self._leaves:
            at *= 2
            # By rounding the target may pass the end of the sum: then the last number with a weight is meant.
            if nodes[at + 1] > 0 and target - before >= nodes[at]:
                before += nodes[at]
                at += 1
        return at - self._leaves, before

    def draw_less(self, other: "SumTree", u: float, factor: float) -> int:
        """Return a number by the weights `factor` times those here, less those of another tree of the same size.

        Args:
            other: Weights to subtract; no difference may be negative.
            u: A uniform random number from 0 to below 1.
            factor: Factor of the weights here.

        Raises:
            ValueError: No difference is positive.
        """
        ours, theirs, at = self._nodes, other._nodes, 1
        left = u * (factor * ours[1] - theirs[1])
        if not factor * ours[1] - theirs[1] > 0:
            raise ValueError("no number has a weight")
        while at < self._leaves:
            at *= 2
            here = factor * ours[at] - theirs[at]
            if left >= here and factor * ours[at + 1] - theirs[at + 1] > 0:
                left -= here
                at += 1
        return at - self._leaves
