"""From groups to what the policy reads: padded tokens, and what is learned from each of them. Pure.

Columns are flat with row lengths, so a batch is put together by indexing, never sequence by sequence. The rows of a
batch that takes several forward passes are sorted by length first, and each pass is only as wide as its own longest
row: the loss is a sum over tokens and does not care.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutmq.schemas.trajectory import Group

IGNORED_LABEL: Final = -100
"""What a label that is not trained on has by convention."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the policy can read: token ids below `vocabulary`, at most `positions` tokens a sequence."""

    vocabulary: int
    positions: int


@dataclass(frozen=True, slots=True)
class Example:
    """A group that is learned from, with the advantages `[n]` of its sequences."""

    group: Group
    advantages: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass of `B` rows, `T` tokens wide, of which `N` tokens are trained.

    Attributes:
        tokens: `(B, T)` i64, padded on the right.
        rows, positions: `(N,)` where the trained tokens are; a position is at least 1.
        old_logprobs: `(N,)` f32, of the policy that sampled.
        advantages: `(N,)` f32, of the token's sequence.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    old_logprobs: Tensor
    advantages: Tensor


def find_fault(group: Group, bounds: Bounds) -> str:
    """Tell why the policy cannot learn from a checked group, or return an empty text."""
    tokens, logprobs = group.columns["tokens"], group.columns.get("inference_logprobs")
    if logprobs is None:
        return "no inference_logprobs: nothing tells how far the policy has moved since"
    longest = int(tokens.lengths[0].max(initial=0))
    if longest > bounds.positions:
        return f"a sequence of {longest} tokens, the policy takes {bounds.positions}"
    if tokens.values.size and not 0 <= tokens.values.min() <= tokens.values.max() < bounds.vocabulary:
        return f"a token id outside 0 to {bounds.vocabulary - 1}"
    trained = trained_tokens(group)
    if not trained.any():
        return "no token is trained"
    if not np.isfinite(logprobs.numbers()[trained]).all():
        return "an inference_logprob of a trained token is not finite"
    return ""


def trained_tokens(group: Group) -> NDArray[np.bool_]:
    """Return which of the group's flat tokens are trained, from a mask of 0 and 1 or of labels.

    The first token of a sequence never is: nothing predicts it.
    """
    mask = group.columns["mask"].numbers()
    labels = bool(mask.size) and (mask.min() < 0 or mask.max() > 1)
    trained: NDArray[np.bool_] = mask != IGNORED_LABEL if labels else mask.astype(bool)
    starts, lengths = _starts(group.columns["tokens"].lengths[0])
    trained[starts[lengths > 0]] = False
    return trained


def _starts(lengths: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    wide = lengths.astype(np.int64)
    return np.cumsum(wide) - wide, wide


def collate(examples: Sequence[Example], micro_batch_sequences: int) -> list[MicroBatch]:
    """Cut the groups into forward passes of at most so many rows. The groups have no fault (`find_fault`)."""
    columns = [example.group.columns for example in examples]
    flat = _Flat(
        tokens=np.concatenate([c["tokens"].values for c in columns]).astype(np.int64),
        trained=np.concatenate([trained_tokens(example.group) for example in examples]),
        logprobs=np.concatenate([c["inference_logprobs"].numbers() for c in columns]).astype(np.float32),
        advantages=np.concatenate([example.advantages for example in examples]),
        lengths=np.concatenate([c["tokens"].lengths[0] for c in columns]),
    )
    rows = np.arange(flat.lengths.size)
    if rows.size > micro_batch_sequences:
        rows = np.argsort(flat.lengths, kind="stable")
    cuts = range(0, rows.size, micro_batch_sequences)
    passes = [_micro_batch(flat, rows[cut : cut + micro_batch_sequences]) for cut in cuts]
    return [one for one in passes if one.rows.numel()]


@dataclass(frozen=True, slots=True)
class _Flat:
    """All sequences of a batch, one after the other; `advantages` and `lengths` have one entry a sequence."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    lengths: NDArray[np.uint32]


def _micro_batch(flat: _Flat, chosen: NDArray[np.int64]) -> MicroBatch:
    starts, lengths = _starts(flat.lengths)
    starts, lengths = starts[chosen, None], lengths[chosen, None]  # (B, 1)
    columns = np.arange(int(lengths.max()))  # (T,)
    inside = columns < lengths  # (B, T)
    # Padding reads the batch's first token: any id will do that the policy knows.
    source = np.where(inside, starts + columns, 0)  # (B, T) index into the flat columns
    rows, positions = np.nonzero(flat.trained[source] & inside)  # (N,) each
    trained = source[rows, positions]
    return MicroBatch(
        tokens=torch.from_numpy(flat.tokens[source]),
        rows=torch.from_numpy(rows),
        positions=torch.from_numpy(positions),
        old_logprobs=torch.from_numpy(flat.logprobs[trained]),
        advantages=torch.from_numpy(flat.advantages[chosen][rows]),
    )
