"""From groups to what the policy reads: padded tokens, and what is learned from each of them. Pure.

Columns are flat with row lengths, so a batch is put together by indexing, never sequence by sequence. Which sequences
are read together, and which of them share a row, is planned elsewhere (`packing`): a loss does not care. Nothing is
read that teaches nothing: no sequence without a trained token, and none further than its last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutmq.schemas.envelope import Dtype
from rolloutmq.schemas.mask import trained_tokens
from rolloutmq.schemas.trajectory import Column, Group
from rolloutmq.trainer.packing import Pass, plan

TEMPERATURES: Final = "temperatures"
"""Column of what the logits were divided by before a token was drawn. Absent: by 1."""
PADDING: Final = {True: -1, False: -np.inf}
"""What fills up `[k]` where a token has fewer than others: ids (True) that are none, log-probabilities of nothing."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the policy can read: token ids below `vocabulary`, at most `positions` tokens a sequence.

    `columns` are those that a group must have beside those that every loss needs, `tokenizer` is the fingerprint of the
    policy's own, empty if it has none.
    """

    vocabulary: int
    positions: int
    columns: tuple[str, ...] = ()
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """A group that is learned from.

    Attributes:
        advantages: `[tokens]`, of its flat tokens.
        staleness: Policy versions between the one that learns and the oldest that sampled it.
        judged: Its rewards have a signal; without one there is only a teacher to learn from.
    """

    group: Group
    advantages: NDArray[np.float32]
    staleness: int = 0
    judged: bool = True


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass of `B` rows, `T` tokens wide, of which `N` tokens are trained. No sequence is cut.

    Attributes:
        tokens: `(B, T)` i64, padded on the right.
        rows, positions: `(N,)` where the trained tokens are; a position is at least 1.
        position_ids: `(B, T)` i64, places in the own sequence where sequences share rows: it begins anew with each,
            and with each token of padding. None where each sequence has a row.
        sequences: `(N,)` i64, the token's sequence, 0 to `sequence_count` - 1.
        sequence_count: Sequences of this pass.
        behaviour_logprobs: `(N,)` f32, of the policy that sampled.
        advantages: `(N,)` f32.
        staleness: `(N,)` i64, of the token's group.
        judged: `(N,)` bool, whether rewards say anything of it.
        temperatures: `(N,)` f32, that the tokens were sampled at; None if all were at 1.
        columns: Further columns at the trained tokens, `(N,)`, or `(N, K)` padded on the right (`PADDING`).
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    sequences: Tensor
    sequence_count: int
    behaviour_logprobs: Tensor
    advantages: Tensor
    staleness: Tensor
    judged: Tensor
    columns: Mapping[str, Tensor]
    position_ids: Tensor | None = None
    temperatures: Tensor | None = None

    def on(self, device: torch.device) -> "MicroBatch":
        """Return it with its tensors on a device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return replace(self, columns=columns, **moved)

    @property
    def judged_sequences(self) -> int:
        """How many of its sequences have a trained token of which rewards say something."""
        return int(torch.unique(self.sequences[self.judged]).numel())


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
    for name in bounds.columns:
        if fault := _column_fault(group, name, trained):
            return fault
    if not np.isfinite(logprobs.numbers()[trained]).all():
        return "an inference_logprob of a trained token is not finite"
    warm = temperatures(group)[trained]
    if not (np.isfinite(warm) & (warm > 0)).all():
        return "a temperature of a trained token is not above 0"
    return ""


def _column_fault(group: Group, name: str, trained: NDArray[np.bool_]) -> str:
    column = group.columns.get(name)
    if column is None:
        return f"no {name}: the loss cannot do without"
    if not column.depth or column.lengths[0].tobytes() != group.columns["tokens"].lengths[0].tobytes():
        return f"{name} has other lengths than tokens"
    chosen = trained if column.depth == 1 else trained.repeat(column.lengths[1])
    if not np.isfinite(column.numbers()[chosen]).all():
        return f"a value of {name} at a trained token is not finite"
    return ""


def temperatures(group: Group) -> NDArray[np.float32]:
    """Return for each of the group's flat tokens at which temperature it was sampled: 1 unless the group says so."""
    column = group.columns.get(TEMPERATURES)
    if column is None:
        return np.ones(group.tokens, np.float32)
    return column.numbers().astype(np.float32)


def _starts(lengths: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    wide = lengths.astype(np.int64)
    return np.cumsum(wide) - wide, wide


def collate(
    examples: Sequence[Example], micro_batch_tokens: int, columns: Sequence[str] = (), *, pack: bool = True
) -> list[MicroBatch]:
    """Cut the groups into forward passes of at most so many tokens.

    Args:
        examples: Groups without a fault (`find_fault`).
        micro_batch_tokens: Most tokens of a pass, padding included. A sequence that is longer has one of its own.
        columns: Names of further columns to carry along, each nested one or two deep; every group has them.
        pack: Whether sequences may share a row.
    """
    groups = [example.group for example in examples]
    lengths = np.concatenate([group.columns["tokens"].lengths[0] for group in groups])
    trained = np.concatenate([trained_tokens(group) for group in groups])
    flat = _Flat(
        tokens=np.concatenate([group.columns["tokens"].values for group in groups]).astype(np.int64),
        trained=trained,
        logprobs=np.concatenate([group.columns["inference_logprobs"].numbers() for group in groups]),
        advantages=np.concatenate([example.advantages for example in examples]),
        staleness=np.concatenate([_repeated(example.staleness, example.group) for example in examples]),
        judged=np.concatenate([_repeated(example.judged, example.group) for example in examples]).astype(
            bool
        ),
        columns={name: flat_column([group.columns[name] for group in groups], trained) for name in columns},
        temperatures=np.concatenate([temperatures(group) for group in groups])
        if any(TEMPERATURES in group for group in groups)
        else None,
        lengths=lengths,
    )
    read = _lengths_to_read(flat)
    return [_micro_batch(flat, read, one) for one in plan(read, micro_batch_tokens, share=pack)]


def _lengths_to_read(flat: "_Flat") -> NDArray[np.int64]:
    """Return the length of each sequence up to its last trained token, 0 if it has none."""
    starts, lengths = _starts(flat.lengths)
    sequence = np.repeat(np.arange(lengths.size), lengths)  # of each token
    (trained,) = np.nonzero(flat.trained)
    read = np.zeros(lengths.size, np.int64)
    np.maximum.at(read, sequence[trained], trained - starts[sequence[trained]] + 1)
    return read


def _repeated(value: int, group: Group) -> NDArray[np.int64]:
    return np.full(group.tokens, value, np.int64)


@dataclass(frozen=True, slots=True)
class _Flat:
    """All sequences of a batch, one after the other; `lengths` has one entry a sequence, the rest one a token."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    advantages: NDArray[np.float32]
    staleness: NDArray[np.int64]
    judged: NDArray[np.bool_]
    columns: Mapping[str, NDArray[Any]]
    temperatures: NDArray[np.float32] | None
    lengths: NDArray[np.uint32]


def flat_column(columns: Sequence[Column], trained: NDArray[np.bool_]) -> NDArray[Any]:
    """Join columns to one entry a token: `[tokens]`, or `[tokens][k]` padded with `PADDING` to the widest trained one.

    Integers become i64, everything else f32. What a token has that is not trained is not looked at.
    """
    whole = columns[0].values.dtype.kind in "iu" and columns[0].dtype is not Dtype.BF16
    values = np.concatenate([column.values if whole else column.numbers() for column in columns])
    values = values.astype(np.int64 if whole else np.float32)
    if columns[0].depth == 1:
        return values
    cells = np.concatenate([column.lengths[1] for column in columns])
    kept = cells[trained]
    rows = np.full((kept.size, int(kept.max(initial=0))), PADDING[whole], values.dtype)
    rows[np.arange(rows.shape[1]) < kept[:, None]] = values[trained.repeat(cells)]
    wide = np.full((cells.size, rows.shape[1]), PADDING[whole], values.dtype)
    wide[trained] = rows
    return wide


def _micro_batch(flat: _Flat, read: NDArray[np.int64], one: Pass) -> MicroBatch:
    chosen = np.array([number for row in one.rows for number in row])  # (S,)
    lengths = read[chosen]
    row_of = np.repeat(np.arange(len(one.rows)), [len(row) for row in one.rows])  # (S,)
    ends = np.cumsum(lengths)
    firsts = np.concatenate([[0], ends[np.flatnonzero(np.diff(row_of))]])  # tokens before each row
    sequence = np.repeat(np.arange(chosen.size), lengths)  # of each token that is read, as are the following
    within = np.arange(ends[-1]) - (ends - lengths)[sequence]
    source = _starts(flat.lengths)[0][chosen][sequence] + within  # index into the flat columns
    rows, columns = row_of[sequence], np.arange(ends[-1]) - firsts[row_of[sequence]]
    # Padding is the batch's first token: any id will do that the policy knows.
    tokens = np.full((len(one.rows), one.width), flat.tokens[0])
    tokens[rows, columns] = flat.tokens[source]
    places = np.zeros_like(tokens)
    places[rows, columns] = within
    asked = flat.trained[source]
    trained = source[asked]
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        rows=torch.from_numpy(rows[asked]),
        positions=torch.from_numpy(columns[asked]),
        sequences=torch.from_numpy(sequence[asked]),
        sequence_count=len(chosen),
        behaviour_logprobs=torch.from_numpy(flat.logprobs[trained].astype(np.float32)),
        advantages=torch.from_numpy(flat.advantages[trained]),
        staleness=torch.from_numpy(flat.staleness[trained]),
        judged=torch.from_numpy(flat.judged[trained]),
        columns={name: torch.from_numpy(values[trained]) for name, values in flat.columns.items()},
        position_ids=torch.from_numpy(places) if one.shared else None,
        temperatures=None if flat.temperatures is None else torch.from_numpy(flat.temperatures[trained]),
    )
