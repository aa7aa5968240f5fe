"""What a teacher says of given tokens: log-probabilities over its whole vocabulary, of which a part is told.

Sequences of several requests are read together, the shortest first, as many in one forward pass as `pass_tokens` lets
in. Only the places that are asked for become probabilities, in float32 and at temperature 1. Blocks; one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutmq.schemas.teaching import Lore, TeachRequest, TokenizerMismatchError, VocabularyMismatchError
from rolloutmq.services.inference.protocol import ApiError


@dataclass(frozen=True, slots=True)
class Reach:
    """What a teacher can read, and of whom.

    Attributes:
        tokenizer: Fingerprint of its tokenizer.
        vocabulary: Token ids that it knows.
        positions: Longest sequence.
        max_rows: Most sequences of one request.
    """

    tokenizer: str
    vocabulary: int
    positions: int
    max_rows: int


@dataclass(eq=False, slots=True)
class Question:
    """Sequences, where in them the teacher is to speak, and then what it said.

    Attributes:
        sequences: Token ids `(T,)` i64 of each.
        wanted: Places of each, all at least 1.
        k: Entries of each place.
        token_ids, logprobs: `(sum of places, k)` i32 and f32, once it was answered.
    """

    lore: Lore
    k: int
    sequences: list[NDArray[np.int64]]
    wanted: list[NDArray[np.int64]]
    cancelled: bool = False
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    @property
    def rows(self) -> int:
        """Sequences to read."""
        return len(self.sequences)


def question_of(request: TeachRequest, reach: Reach) -> Question:
    """Make the question of a request, or refuse what this teacher cannot answer. Raises `ApiError`."""
    if request.tokenizer != reach.tokenizer:
        mismatch = TokenizerMismatchError.of(reach.tokenizer, request.tokenizer)
        raise ApiError(409, mismatch.problem, "tokenizer_mismatch")
    try:
        VocabularyMismatchError.check(request.lore, reach.vocabulary, request.vocabulary)
    except VocabularyMismatchError as error:
        raise ApiError(409, error.problem, error.CODE) from None
    if len(request.tokens) % 4 or len(request.wanted) * 4 != len(request.tokens):
        raise ApiError(400, "tokens and wanted: have other lengths")
    tokens = np.frombuffer(request.tokens, "<i4").astype(np.int64)
    wanted = np.frombuffer(request.wanted, np.uint8).astype(bool)
    lengths = np.array(request.lengths, np.int64)
    if lengths.sum() != tokens.size:
        raise ApiError(400, "lengths: do not add up to the tokens")
    if lengths.size > reach.max_rows:
        raise ApiError(400, f"lengths: {lengths.size} sequences, at most {reach.max_rows} are read at once")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < reach.vocabulary:
        raise ApiError(400, f"tokens: must be from 0 to {reach.vocabulary - 1}")
    if lengths.max(initial=0) > reach.positions:
        raise ApiError(400, f"lengths: the teacher takes {reach.positions} tokens, one has {lengths.max()}")
    cuts = np.cumsum(lengths)[:-1]
    places = [np.flatnonzero(part) for part in np.split(wanted, cuts)]
    if any(place.size and place[0] == 0 for place in places):
        raise ApiError(400, "wanted: nothing predicts the first token of a sequence")
    return Question(request.lore, _entries(request, reach), np.split(tokens, cuts), places)


def _entries(request: TeachRequest, reach: Reach) -> int:
    match request.lore:
        case Lore.FULL:
            return reach.vocabulary
        case Lore.SAMPLED:
            return 1
        case Lore.TOP_K if request.top_k:
            return min(request.top_k, reach.vocabulary)
        case _:
            raise ApiError(400, "lore, top_k: say of how many tokens the teacher is to tell")


class Scorer:
    """Answers questions by one model.

    Args:
        model: A transformers causal language model in which nothing is random.
        pass_tokens: Most tokens of one forward pass, unless a single sequence has more.
    """

    def __init__(self, model: Any, pass_tokens: int) -> None:
        self._model = model
        self._pass_tokens = pass_tokens

    @torch.inference_mode()
    def answer(self, questions: Sequence[Question], on_done: Callable[[list[Question]], None]) -> None:
        """Answer all questions. Blocks until the last is answered; `on_done` is called with each."""
        living = sorted((one for one in questions if not one.cancelled), key=_kind)
        for _, alike in groupby(living, _kind):
            self._answer_alike(list(alike))
        on_done(living)

    def _answer_alike(self, questions: list[Question]) -> None:
        """Answer questions of one kind, so that what is told of each place has one shape."""
        sequences = [tokens for one in questions for tokens in one.sequences]
        wanted = [places for one in questions for places in one.wanted]
        first = np.cumsum([0, *map(len, wanted)])  # where the answers of each sequence begin
        lore, k = questions[0].lore, questions[0].k
        token_ids, logprobs = np.empty((first[-1], k), np.int32), np.empty((first[-1], k), np.float32)
        for rows in self._passes(sequences, wanted):
            ids, told = self._read([sequences[row] for row in rows], [wanted[row] for row in rows], lore, k)
            there = np.concatenate([np.arange(first[row], first[row + 1]) for row in rows])
            token_ids[there], logprobs[there] = ids.numpy(), told.numpy()
        ends = np.cumsum([sum(map(len, one.wanted)) for one in questions])[:-1]
        for one, ids_, told_ in zip(
            questions, np.split(token_ids, ends), np.split(logprobs, ends), strict=True
        ):
            one.token_ids, one.logprobs = ids_, told_

    def _passes(
        self, sequences: list[NDArray[np.int64]], wanted: list[NDArray[np.int64]]
    ) -> Iterator[list[int]]:
        """Yield the sequences of each forward pass: those that are asked about, the shortest first."""
        asked = [row for row in range(len(sequences)) if len(wanted[row])]
        rows: list[int] = []
        for row in sorted(asked, key=lambda row: len(sequences[row])):
            if rows and (len(rows) + 1) * len(sequences[row]) > self._pass_tokens:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _read(
        self, sequences: list[NDArray[np.int64]], wanted: list[NDArray[np.int64]], lore: Lore, k: int
    ) -> tuple[Tensor, Tensor]:
        """Read some sequences at once; return `(N, k)` token ids and log-probabilities of the places, in order."""
        tokens = np.zeros((len(sequences), len(sequences[-1])), np.int64)  # (B, T); the last is the longest
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = sequence
        rows = torch.from_numpy(np.repeat(np.arange(len(wanted)), list(map(len, wanted))))
        places = torch.from_numpy(np.concatenate(wanted))
        given = torch.from_numpy(tokens)
        # Right padding needs no attention mask: a causal model looks back only.
        logits = self._model(input_ids=given[:, :-1], use_cache=False).logits  # (B, T - 1, V)
        logprobs = logits[rows, places - 1].float().log_softmax(-1)  # (N, V)
        if lore is Lore.TOP_K:
            best = logprobs.topk(k, -1)
            return best.indices, best.values
        if lore is Lore.SAMPLED:
            sampled = given[rows, places, None]
            return sampled, logprobs.gather(-1, sampled)
        return torch.arange(k).expand(len(logprobs), k), logprobs


def _kind(one: Question) -> tuple[str, int]:
    return one.lore.value, one.k
