"""Collation: groups become padded tensors of one forward pass each. Pure.

Columns are flat with row lengths, so batches are built by indexing, never sequence by sequence. `packing` plans which
sequences share a pass or a row. Sequences without a trained token are left out, and the others end at their last
trained token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.wire.envelope import Dtype
from rolloutmq.trainer.step.packing import Pass, plan

TEMPERATURES: Final = "temperatures"
"""Column of sampling temperatures, one per token; 1 if absent."""
PADDING: Final = {True: -1, False: -np.inf}
"""Filler for tokens with fewer entries than others: an invalid id (True), a log-probability of minus infinity
(False).
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the policy: token ids below `vocabulary`, at most `positions` tokens a sequence.

    `columns` are the additional columns a group must have; `tokenizer` is the policy's fingerprint, empty if
    it has none.
    """

    vocabulary: int
    positions: int
    columns: tuple[str, ...] = ()
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """A group to train on.

    Attributes:
        advantages: `[tokens]`, one per flat token.
        staleness: Optimizer steps between the oldest policy that sampled the group and the learner.
        judged: Whether its rewards carry a signal; if not, only the teacher's columns are trained on.
    """

    group: Group
    advantages: NDArray[np.float32]
    staleness: int = 0
    judged: bool = True


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass of `B` rows, `T` tokens wide, with `N` trained tokens. No sequence is split.

    Attributes:
        tokens: `(B, T)` i64, padded on the right.
        rows, positions: `(N,)` locations of the trained tokens; a position is at least 1.
        position_ids: `(B, T)` i64, position within the own sequence if sequences share rows: it restarts with each
            sequence and with each padding token. None if each sequence has its own row.
        sequences: `(N,)` i64, sequence of the token, 0 to `sequence_count` - 1.
        sequence_count: Sequences of this pass.
        behaviour_logprobs: `(N,)` f32, under the policy that sampled.
        advantages: `(N,)` f32.
        staleness: `(N,)` i64, of the token's group.
        judged: `(N,)` bool, whether rewards apply to the token.
        temperatures: `(N,)` f32, sampling temperatures; None if all are 1.
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
        """Return a copy with its tensors on a device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return replace(self, columns=columns, **moved)

    @property
    def judged_sequences(self) -> int:
        """Sequences with at least one trained token that rewards apply to."""
        return int(torch.unique(self.sequences[self.judged]).numel())


def find_fault(group: Group, bounds: Bounds) -> str:
    """Return why the policy cannot learn from a checked group, or an empty string."""
    tokens, logprobs = group.columns["tokens"], group.columns.get("inference_logprobs")
    if logprobs is None:
        return "inference_logprobs: required to correct for the policy's age"
    longest = int(tokens.lengths[0].max(initial=0))
    if longest > bounds.positions:
        return f"tokens: a sequence has {longest}, the policy takes {bounds.positions}"
    if tokens.values.size and not 0 <= tokens.values.min() <= tokens.values.max() < bounds.vocabulary:
        return f"tokens: ids must be from 0 to {bounds.vocabulary - 1}"
    trained = trained_tokens(group)
    if not trained.any():
        return "mask: no trained token"
    for name in bounds.columns:
        if fault := _column_fault(group, name, trained):
            return fault
    if not np.isfinite(logprobs.numbers()[trained]).all():
        return "inference_logprobs: must be finite at trained tokens"
    warm = temperatures(group)[trained]
    if not (np.isfinite(warm) & (warm > 0)).all():
        return "temperatures: must be above 0 at trained tokens"
    return ""


def _column_fault(group: Group, name: str, trained: NDArray[np.bool_]) -> str:
    column = group.columns.get(name)
    if column is None:
        return f"{name}: required by the loss"
    if not column.depth or column.lengths[0].tobytes() != group.columns["tokens"].lengths[0].tobytes():
        return f"{name}: lengths differ from those of tokens"
    chosen = trained if column.depth == 1 else trained.repeat(column.lengths[1])
    if not np.isfinite(column.numbers()[chosen]).all():
        return f"{name}: must be finite at trained tokens"
    return ""


def temperatures(group: Group) -> NDArray[np.float32]:
    """Return the sampling temperature of each of the group's flat tokens."""
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
    """Split groups into forward passes of at most `micro_batch_tokens` tokens.

    Args:
        examples: Groups without a fault (`find_fault`).
        micro_batch_tokens: Most tokens of a pass, padding included. A longer sequence gets its own pass.
        columns: Names of further columns, nested one or two deep; every group has them.
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
    """All sequences of a batch in a row; `lengths` has one entry per sequence, the others one per token."""

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
    """Join columns to one entry per token: `[tokens]`, or `[tokens][k]` padded with `PADDING` to the widest
    trained one.

    Integers become i64, everything else f32. Entries of tokens that are not trained are ignored.
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
    sequence = np.repeat(np.arange(chosen.size), lengths)  # per token read, like the arrays below
    within = np.arange(ends[-1]) - (ends - lengths)[sequence]
    source = _starts(flat.lengths)[0][chosen][sequence] + within  # index into the flat columns
    rows, columns = row_of[sequence], np.arange(ends[-1]) - firsts[row_of[sequence]]
    # Padding is the batch's first token: any valid id will do.
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
