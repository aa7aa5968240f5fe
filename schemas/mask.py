"""What the column `mask` of a group means: 0 and 1, or labels as other trainers have them. Pure.

Labels are token ids, with -100 where nothing is learned. A mask is taken for labels if it has any other number than 0
and 1.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.trajectory import Group

IGNORED_LABEL: Final = -100
"""What a label that is not trained on has by convention."""


def marked_tokens(group: Group) -> NDArray[np.bool_]:
    """Return which of the group's flat tokens `[tokens]` its mask marks. A copy."""
    mask = group.columns["mask"].numbers()
    labels = bool(mask.size) and (mask.min() < 0 or mask.max() > 1)
    marked: NDArray[np.bool_] = mask != IGNORED_LABEL if labels else mask.astype(bool)
    return marked


def trained_tokens(group: Group) -> NDArray[np.bool_]:
    """Return which of the group's flat tokens `[tokens]` can be learned from: marked ones that something predicts.

    So the first token of a sequence never is.
    """
    trained = marked_tokens(group)
    lengths: NDArray[Any] = group.columns["tokens"].lengths[0]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    trained[starts[lengths > 0]] = False
    return trained
