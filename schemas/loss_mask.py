"""The loss mask of a group: the column `mask` as 0 and 1, or as labels. Pure.

Labels are token ids, with -100 where nothing is learned. A mask counts as labels if any value is neither 0 nor 1.
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray


class Masked(Protocol):
    """A group, whose builder uses this module: its columns `tokens` and `mask`."""

    @property
    def columns(self) -> Mapping[str, Any]: ...


IGNORED_LABEL: Final = -100
"""Conventional label of a token that is not trained on."""


def marked_tokens(group: Masked) -> NDArray[np.bool_]:
    """Return a bool for each token of the group, flat `[tokens]`: the mask marks it. A copy."""
    mask: NDArray[np.float64] = group.columns["mask"].numbers()
    labels = bool(mask.size) and (mask.min() < 0 or mask.max() > 1)
    marked: NDArray[np.bool_] = mask != IGNORED_LABEL if labels else mask.astype(bool)
    return marked


def trained_tokens(group: Masked) -> NDArray[np.bool_]:
    """Return a bool for each token of the group, flat `[tokens]`: the loss uses it.

    The loss uses every marked token except the first of a sequence, which no token predicts.
    """
    trained = marked_tokens(group)
    lengths: NDArray[Any] = group.columns["tokens"].lengths[0]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    trained[starts[lengths > 0]] = False
    return trained
