"""Teacher columns of a group: their checks, and their way into the loss. Pure.

The columns are `[sequence][position][k]`: position t has the candidates for token t. Positions that are not trained are
ignored. Everything else must fit the configuration, or the group is rejected with the reason.
"""

from dataclasses import dataclass, replace
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rolloutmq.schemas.config.distillation import DistillationConfig
from rolloutmq.schemas.errors import TokenizerMismatchError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.wire.distillation import IDS_COLUMN, LOGPROBS_COLUMN, TOKENIZER_COLUMN, TeacherLogprobs
from rolloutmq.trainer.step.collate import MicroBatch, temperatures

SUM_SLACK: Final = 1e-3
"""Tolerance of a sum of probabilities above 1: rounding, also of half-precision servers."""


def columns_needed(config: DistillationConfig) -> tuple[str, ...]:
    """Return the columns that a group needs for distillation."""
    return () if config.teacher_logprobs is TeacherLogprobs.NONE else (IDS_COLUMN, LOGPROBS_COLUMN)


def find_fault(group: Group, config: DistillationConfig, vocabulary: int, tokenizer: str = "") -> str:
    """Return why the teacher columns of a group cannot be trained on, or an empty string.

    The columns exist, match the tokens in length and are finite where trained (`collate.find_fault`). `tokenizer` is
    the student's fingerprint.
    """
    if config.teacher_logprobs is TeacherLogprobs.NONE:
        return ""
    if fault := _of_another_tokenizer(group, tokenizer):
        return fault
    if (temperatures(group)[trained_tokens(group)] != 1).any():
        return "temperatures: must be 1, the temperature of the teacher's log-probabilities"
    ids, logprobs = group.columns[IDS_COLUMN], group.columns[LOGPROBS_COLUMN]
    if ids.values.dtype.kind not in "iu":
        return f"{IDS_COLUMN}: must be integers"
    if not all(map(np.array_equal, ids.lengths, logprobs.lengths)):
        return f"{LOGPROBS_COLUMN}: lengths differ from those of {IDS_COLUMN}"
    trained = trained_tokens(group)
    counts = ids.lengths[1][trained].astype(np.int64)
    if fault := _miscounted(counts, config, vocabulary):
        return fault
    chosen = np.repeat(trained, ids.lengths[1])  # entries of trained tokens
    if fault := _unusable(
        ids.values[chosen].astype(np.int64), logprobs.numbers()[chosen], counts, vocabulary
    ):
        return fault
    if config.teacher_logprobs is TeacherLogprobs.SAMPLED and (_entries_of_tokens(group, trained) < 0).any():
        return f"{IDS_COLUMN}: a trained token is not among its entries"
    return ""


def _of_another_tokenizer(group: Group, student: str) -> str:
    """Check the teacher's tokenizer; a group without that column passes."""
    if TOKENIZER_COLUMN not in group:
        return ""
    found = group.columns[TOKENIZER_COLUMN].values
    for teacher in found if isinstance(found, list | tuple) else [found]:
        if not isinstance(teacher, str):
            return f"{TOKENIZER_COLUMN}: must be a tokenizer fingerprint"
        if not teacher or teacher != student:
            return str(TokenizerMismatchError.of(teacher, student))
    return ""


def _miscounted(counts: NDArray[np.int64], config: DistillationConfig, vocabulary: int) -> str:
    """Check the number of entries of each trained token."""
    if config.teacher_logprobs is TeacherLogprobs.SAMPLED:
        return "" if counts.min() else f"{IDS_COLUMN}: a trained token has no entry"
    if config.teacher_logprobs is TeacherLogprobs.FULL:
        wrong, expected = counts[counts != vocabulary], f"{vocabulary} expected"
    else:
        wanted = min(config.top_k, vocabulary)
        wrong, expected = counts[counts < wanted], f"at least {wanted} expected (trainer.distillation.top_k)"
    return f"{IDS_COLUMN}: a trained token has {wrong[0]} entries, {expected}" if wrong.size else ""


def _unusable(
    ids: NDArray[np.int64], logprobs: NDArray[np.float64], counts: NDArray[np.int64], vocabulary: int
) -> str:
    """Check the entries of the trained tokens, `counts` of each, in a row."""
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"{IDS_COLUMN}: ids must be from 0 to {vocabulary - 1}"
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(np.exp(np.minimum(logprobs, 1.0)), starts)
    if sums.max() > 1 + SUM_SLACK:
        return f"{LOGPROBS_COLUMN}: probabilities must not add up to more than 1 (got {sums.max():.4g})"
    keyed = np.sort(np.repeat(np.arange(counts.size), counts) * vocabulary + ids)
    return f"{IDS_COLUMN}: an id occurs twice at one token" if (np.diff(keyed) == 0).any() else ""


def _entries_of_tokens(group: Group, trained: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index of the entry of each trained token itself, -1 if it has none."""
    column = group.columns[IDS_COLUMN]
    owners = np.repeat(np.arange(trained.size), column.lengths[1])
    tokens = group.columns["tokens"].values
    places = np.flatnonzero(trained[owners] & (column.values == tokens[owners]))
    found = np.full(trained.size, -1, np.int64)
    found[owners[places]] = places
    return found[trained]


def likeliest(group: Group, config: DistillationConfig, vocabulary: int) -> Group:
    """Return the group with the `top_k` likeliest entries of each token, which the loss compares; for other kinds, as
    it is.

    A server of prompt log-probabilities, such as vLLM, adds the token itself where it is not among them: `top_k + 1`.
    """
    if config.teacher_logprobs is not TeacherLogprobs.TOP_K:
        return group
    ids, logprobs = group.columns[IDS_COLUMN], group.columns[LOGPROBS_COLUMN]
    rows, cells = ids.lengths
    wanted = min(config.top_k, vocabulary)
    if (cells <= wanted).all():
        return group
    owners = np.repeat(np.arange(cells.size), cells)
    order = np.lexsort((-logprobs.numbers(), owners))
    ends = np.cumsum(cells, dtype=np.int64)
    rank = np.arange(owners.size) - (ends - cells)[owners]  # of the entries in that order
    kept = np.sort(order[rank < wanted])
    lengths = rows, np.minimum(cells, wanted).astype(cells.dtype)
    cut = {
        name: replace(column, values=column.values[kept], lengths=lengths)
        for name, column in ((IDS_COLUMN, ids), (LOGPROBS_COLUMN, logprobs))
    }
    return replace(group, columns={**group.columns, **cut})


def shuffled(group: Group, config: DistillationConfig, seed: int) -> Group:
    """Return the group with its teacher entries permuted, always the same way: a control experiment."""
    if config.teacher_logprobs is TeacherLogprobs.NONE:
        return group
    trained = trained_tokens(group)
    ids, logprobs = group.columns[IDS_COLUMN], group.columns[LOGPROBS_COLUMN]
    if config.teacher_logprobs is TeacherLogprobs.SAMPLED:
        entries = _entries_of_tokens(group, trained)
    else:
        cells = ids.lengths[1].astype(np.int64)
        firsts = (np.cumsum(cells) - cells)[trained]
        entries = firsts[:, None] + np.arange(int(cells[trained][0]))  # as many of each, see `find_fault`
    order = np.random.default_rng([seed, crc32(group.group_id.encode())]).permutation(len(entries))
    values = {IDS_COLUMN: ids.values.copy(), LOGPROBS_COLUMN: logprobs.values.copy()}
    for name, column in ((IDS_COLUMN, ids), (LOGPROBS_COLUMN, logprobs)):
        if (
            name == LOGPROBS_COLUMN or config.teacher_logprobs is not TeacherLogprobs.SAMPLED
        ):  # the sampled tokens are what they are
            values[name][entries] = column.values[entries[order]]
    moved = {name: replace(group.columns[name], values=values[name]) for name in values}
    return replace(group, columns={**group.columns, **moved})


@dataclass(frozen=True, slots=True)
class TeacherColumns:
    """Teacher entries of the `N` trained tokens of a forward pass.

    Attributes:
        asked: `(N, K)` i64 token ids that the student must score; None for the sampled token only.
        logprobs: `(N, K)` f32 log-probabilities under the teacher; `(N, 1)` for the sampled token.
    """

    asked: Tensor | None
    logprobs: Tensor


def taught(one: MicroBatch, config: DistillationConfig) -> TeacherColumns | None:
    """Return the teacher entries of a forward pass, or None without distillation."""
    if config.teacher_logprobs is TeacherLogprobs.NONE:
        return None
    ids, logprobs = one.columns[IDS_COLUMN], one.columns[LOGPROBS_COLUMN]
    if config.teacher_logprobs is not TeacherLogprobs.SAMPLED:
        return TeacherColumns(ids, logprobs)
    sampled = one.tokens[one.rows, one.positions]
    place = (ids == sampled[:, None]).int().argmax(-1, keepdim=True)  # there is one, see `find_fault`
    return TeacherColumns(None, logprobs.gather(-1, place))


def apart(scores: Tensor, asked: Tensor | None) -> tuple[Tensor, Tensor]:
    """Split the student's log-probabilities into those `(N,)` of sampled tokens and `(N, K)` of the teacher's
    tokens.

    Args:
        scores: `(N, 1 + K)`, or `(N,)` if only sampled tokens were scored, which are then the teacher's too.
        asked: Token ids that were scored in addition.
    """
    return (scores, scores[:, None]) if asked is None else (scores[:, 0], scores[:, 1:])
