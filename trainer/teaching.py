"""What a teacher said of a group: whether it can be learned from, and how it reaches the loss.

The columns are `[sequence][position][k]`, a position for each token: position t tells what could stand in the place
of token t. Positions that are not trained are not looked at; they may have entries, or none. Everything else must be
as the configuration says, or the group is rejected with the reason. Pure.
"""

from dataclasses import dataclass, replace
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rolloutmq.schemas.mask import trained_tokens
from rolloutmq.schemas.teaching import (
    IDS_COLUMN,
    LOGPROBS_COLUMN,
    TOKENIZER_COLUMN,
    DistillationConfig,
    Lore,
    TokenizerMismatchError,
)
from rolloutmq.schemas.trajectory import Group
from rolloutmq.trainer.collate import MicroBatch, temperatures

SUM_SLACK: Final = 1e-3
"""By so much the probabilities of one place may exceed 1: rounding, also of a server that answers in half precision."""


def columns_needed(config: DistillationConfig) -> tuple[str, ...]:
    """Return the columns that a group must have so that something can be learned from a teacher."""
    return () if config.lore is Lore.NONE else (IDS_COLUMN, LOGPROBS_COLUMN)


def find_fault(group: Group, config: DistillationConfig, vocabulary: int, tokenizer: str = "") -> str:
    """Tell why nothing can be learned from what a teacher said of a group, or return an empty text.

    The group has the columns, as long as its tokens and finite where they are trained (`collate.find_fault`).
    `tokenizer` is the fingerprint of the student's.
    """
    if config.lore is Lore.NONE:
        return ""
    if fault := _of_another_tokenizer(group, tokenizer):
        return fault
    if (temperatures(group)[trained_tokens(group)] != 1).any():
        return "sampled at a temperature other than 1, of which the teacher says nothing"
    ids, logprobs = group.columns[IDS_COLUMN], group.columns[LOGPROBS_COLUMN]
    if ids.values.dtype.kind not in "iu":
        return f"{IDS_COLUMN} are not integers"
    if not all(map(np.array_equal, ids.lengths, logprobs.lengths)):
        return f"{LOGPROBS_COLUMN} has other lengths than {IDS_COLUMN}"
    trained = trained_tokens(group)
    counts = ids.lengths[1][trained].astype(np.int64)
    if fault := _miscounted(counts, config, vocabulary):
        return fault
    told = np.repeat(trained, ids.lengths[1])  # which entries belong to trained tokens
    if fault := _unusable(ids.values[told].astype(np.int64), logprobs.numbers()[told], counts, vocabulary):
        return fault
    if config.lore is Lore.SAMPLED and (_entries_of_tokens(group, trained) < 0).any():
        return "a trained token is not among those that the teacher told of"
    return ""


def _of_another_tokenizer(group: Group, student: str) -> str:
    """Tell whether the teacher means something else by its token ids; a group that does not tell is believed."""
    if TOKENIZER_COLUMN not in group:
        return ""
    told = group.columns[TOKENIZER_COLUMN].values
    for teacher in told if isinstance(told, list | tuple) else [told]:
        if not isinstance(teacher, str):
            return f"{TOKENIZER_COLUMN} is no fingerprint of a tokenizer"
        if not teacher or teacher != student:
            return str(TokenizerMismatchError.of(teacher, student))
    return ""


def _miscounted(counts: NDArray[np.int64], config: DistillationConfig, vocabulary: int) -> str:
    """Tell whether there are fewer or more entries than there should be in the place of a trained token."""
    if config.lore is Lore.SAMPLED:
        return "" if counts.min() else "a trained token of which the teacher said nothing"
    wanted = vocabulary if config.lore is Lore.FULL else min(config.top_k, vocabulary)
    wrong = counts[counts != wanted]
    return f"{wrong[0]} tokens of the teacher for a trained one, {wanted} expected" if wrong.size else ""


def _unusable(
    ids: NDArray[np.int64], logprobs: NDArray[np.float64], counts: NDArray[np.int64], vocabulary: int
) -> str:
    """Tell what is wrong with the entries of the trained tokens, `counts` of each, one after the other."""
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"a token id of the teacher outside 0 to {vocabulary - 1}"
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(np.exp(np.minimum(logprobs, 1.0)), starts)
    if sums.max() > 1 + SUM_SLACK:
        return f"probabilities of the teacher that add up to {sums.max():.4g}"
    keyed = np.sort(np.repeat(np.arange(counts.size), counts) * vocabulary + ids)
    return "the teacher told twice of one token" if (np.diff(keyed) == 0).any() else ""


def _entries_of_tokens(group: Group, trained: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each trained token where among the entries it stands itself, -1 if it does not."""
    column = group.columns[IDS_COLUMN]
    owners = np.repeat(np.arange(trained.size), column.lengths[1])
    tokens = group.columns["tokens"].values
    places = np.flatnonzero(trained[owners] & (column.values == tokens[owners]))
    found = np.full(trained.size, -1, np.int64)
    found[owners[places]] = places
    return found[trained]


def shuffled(group: Group, config: DistillationConfig, seed: int) -> Group:
    """Return the group with what the teacher said in other places, the same ones whenever it comes: a control."""
    if config.lore is Lore.NONE:
        return group
    trained = trained_tokens(group)
    ids, logprobs = group.columns[IDS_COLUMN], group.columns[LOGPROBS_COLUMN]
    if config.lore is Lore.SAMPLED:
        entries = _entries_of_tokens(group, trained)
    else:
        cells = ids.lengths[1].astype(np.int64)
        firsts = (np.cumsum(cells) - cells)[trained]
        entries = firsts[:, None] + np.arange(int(cells[trained][0]))  # as many of each, see `find_fault`
    order = np.random.default_rng([seed, crc32(group.group_id.encode())]).permutation(len(entries))
    values = {IDS_COLUMN: ids.values.copy(), LOGPROBS_COLUMN: logprobs.values.copy()}
    for name, column in ((IDS_COLUMN, ids), (LOGPROBS_COLUMN, logprobs)):
        if name == LOGPROBS_COLUMN or config.lore is not Lore.SAMPLED:  # the sampled tokens are what they are
            values[name][entries] = column.values[entries[order]]
    moved = {name: replace(group.columns[name], values=values[name]) for name in values}
    return replace(group, columns={**group.columns, **moved})


@dataclass(frozen=True, slots=True)
class Taught:
    """What was said of the `N` trained tokens of a forward pass.

    Attributes:
        asked: `(N, K)` i64 of which tokens the student must say how likely it finds them; None: of the sampled alone.
        logprobs: `(N, K)` f32, how likely the teacher finds these; of the sampled, `(N, 1)`.
    """

    asked: Tensor | None
    logprobs: Tensor


def taught(one: MicroBatch, config: DistillationConfig) -> Taught | None:
    """Return what a teacher said of the tokens of a forward pass, if anything is learned from it."""
    if config.lore is Lore.NONE:
        return None
    ids, logprobs = one.columns[IDS_COLUMN], one.columns[LOGPROBS_COLUMN]
    if config.lore is not Lore.SAMPLED:
        return Taught(ids, logprobs)
    sampled = one.tokens[one.rows, one.positions]
    place = (ids == sampled[:, None]).int().argmax(-1, keepdim=True)  # there is one, see `find_fault`
    return Taught(None, logprobs.gather(-1, place))


def apart(scores: Tensor, asked: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tell the student's log-probabilities `(N,)` of the sampled tokens from those `(N, K)` of the teacher's tokens.

    Args:
        scores: `(N, 1 + K)`, or `(N,)` where nothing else was asked: the sampled token is then the teacher's, too.
        asked: What was asked.
    """
    return (scores, scores[:, None]) if asked is None else (scores[:, 0], scores[:, 1:])
