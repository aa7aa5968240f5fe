"""Sequences of a group, cut at their first trained token. Pure.

The mask may be 0 and 1 or labels, see `schemas.loss_mask`. The first token of a sequence belongs to the prompt even if
it is marked, because nothing predicts it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import trained_tokens

STOP = "stop"
"""Reason of a sequence whose group has none."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sequence; without a trained token, or without log-probabilities, all of it is prompt.

    Attributes:
        prompt: `(P,)` tokens before the first trained one.
        response: `(R,)` the other tokens, tool results included.
        mask: `(R,)` bool, the trained ones of them.
        logprobs: `(R,)` log-probabilities of the sampling policy, 0 where the mask is.
        score: Raw score.
        stop_reason: Why it ended.
    """

    prompt: NDArray[Any]
    response: NDArray[Any]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    score: float
    stop_reason: str

    @property
    def usable(self) -> bool:
        """Return whether a trainer can learn from it."""
        return len(self.response) > 0


def sampled_sequences(group: Group) -> list[SampledSequence]:
    """Return the sequences of a group in their order."""
    columns = group.columns
    tokens, scores = columns["tokens"].rows(), columns["scores"].numbers().tolist()
    ends = np.cumsum(columns["tokens"].lengths[0])[:-1]
    masks = np.split(trained_tokens(group), ends)
    rated = columns.get("inference_logprobs")
    logprobs: list[Any] = [None] * len(tokens) if rated is None else np.split(rated.numbers(), ends)
    return [_cut(*row) for row in zip(tokens, masks, logprobs, scores, _stop_reasons(group), strict=True)]


def _cut(
    tokens: NDArray[Any],
    mask: NDArray[np.bool_],
    logprobs: NDArray[Any] | None,
    score: float,
    stop_reason: str,
) -> SampledSequence:
    start = len(tokens) if logprobs is None or not mask.any() else int(mask.argmax())
    rated = np.where(mask, 0.0 if logprobs is None else logprobs, 0.0)
    return SampledSequence(tokens[:start], tokens[start:], mask[start:], rated[start:], score, stop_reason)


def _stop_reasons(group: Group) -> list[str]:
    column = group.columns.get("stop_reasons")
    told = column.values if column is not None else None
    if not isinstance(told, list | tuple) or len(told) != group.sequences:
        return [STOP] * group.sequences
    return [one if isinstance(one, str) and one else STOP for one in told]
