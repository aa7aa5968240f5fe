"""Values of a group that no trainer could use. Pure.

Of all tokens:

    tokens                              not negative
    mask                                whole numbers: 0 and 1, or labels

Of the trained tokens:

    inference_logprobs, ref_logprobs    finite, and at most `LOGPROB_MAX`: a sampled token has a probability above 0
    advantages                          finite
    temperatures                        finite, and not negative; 0 is greedy

Any of these may be unusable at a token that the loss does not use: environments write placeholders such as 1.0 there.
Only the builder of a group checks values, because a checksum protects them afterwards. The trainer checks the teacher's
columns: what they may hold depends on its loss.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.loss_mask import Masked, trained_tokens
from rolloutmq.schemas.wire.envelope import Dtype

LOGPROB_MAX: Final = 0.5
"""Highest accepted logprob: engines that compute in bfloat16 round certain tokens to a little above 0."""
_LARGEST: Final = float(np.finfo(np.float64).max)


class _Range(NamedTuple):
    low: float
    high: float
    rule: str


_LOGPROBS: Final = _Range(
    -_LARGEST, LOGPROB_MAX, f"a finite logprob of at most 0, or {LOGPROB_MAX} by rounding"
)
_RANGES: Final[Mapping[str, _Range]] = {
    "inference_logprobs": _LOGPROBS,
    "ref_logprobs": _LOGPROBS,
    "advantages": _Range(-_LARGEST, _LARGEST, "finite"),
    "temperatures": _Range(0.0, _LARGEST, "finite and not negative"),
}


def check_token_values(group: Masked) -> None:
    """Raise InvalidGroupError, naming row and token, if a token has an unusable value."""
    _check_ids_and_mask(group.columns["tokens"], group.columns["mask"])
    for name, column in group.columns.items():
        wanted = _RANGES.get(name)
        if wanted is None or _all_within(column, wanted):
            continue
        values = column.numbers()
        outside = ~((values >= wanted.low) & (values <= wanted.high)) & trained_tokens(group)
        if outside.any():
            at = int(np.argmax(outside))
            raise _unusable(name, column, at, f"{wanted.rule} where the mask trains")


def _check_ids_and_mask(tokens: Any, mask: Any) -> None:
    ids: NDArray[Any] = tokens.values
    if ids.dtype.kind == "i" and ids.size and np.minimum.reduce(ids) < 0:
        raise _unusable("tokens", tokens, int(np.argmax(ids < 0)), "not negative")
    if mask.values.dtype.kind in "iub" and mask.dtype is not Dtype.BF16:
        return
    marks = mask.numbers()
    whole = np.isfinite(marks) & (marks == np.trunc(marks))
    if not whole.all():
        raise _unusable("mask", mask, int(np.argmin(whole)), "0, 1 or an integer label")


def _unusable(name: str, column: Any, at: int, rule: str) -> InvalidGroupError:
    """Return the error about a flat value."""
    row, token = _place(column, at)
    values = column.numbers() if column.dtype is Dtype.BF16 else column.values
    return InvalidGroupError(name, f"row {row}, token {token}: must be {rule} (got {values[at]})")


def _all_within(column: Any, wanted: _Range) -> bool:
    """Return whether all values are in the range, at little cost; False for NaN."""
    values: NDArray[Any] = column.numbers() if column.dtype is Dtype.BF16 else column.values
    if not values.size:
        return True
    # The ufuncs cost half of `min` and `max`.
    lowest, highest = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    return lowest >= wanted.low and highest <= wanted.high


def _place(column: Any, at: int) -> tuple[int, int]:
    """Return the row of a flat value, and its token in that row."""
    ends = np.cumsum(column.lengths[0], dtype=np.int64)
    row = int(np.searchsorted(ends, at, side="right"))
    return row, at - int(ends[row] - column.lengths[0][row])
