"""Scoring by a teacher: log-probabilities of given tokens over its vocabulary, or the requested part of them.

Sequences of several requests share forward passes, shortest first, up to `pass_tokens` tokens a pass. Only requested
positions become probabilities, in float32 and at temperature 1. Blocks; one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutmq.schemas.errors import TokenizerMismatchError, VocabularyMismatchError
from rolloutmq.schemas.wire.distillation import TeacherLogprobs, TeachRequest
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.trainer.policy.head import float32_head


@dataclass(frozen=True, slots=True)
class TeacherLimits:
    """Limits of a teacher.

    Attributes:
        tokenizer: Fingerprint of its tokenizer.
        vocabulary: Size of its vocabulary.
        positions: Longest sequence, in tokens.
        max_rows: Most sequences of one request.
    """

    tokenizer: str
    vocabulary: int
    positions: int
    max_rows: int


@dataclass(eq=False, slots=True)
class ScoreRequest:
    """Sequences with the positions to score, and later the scores.

    Attributes:
        sequences: Token ids `(T,)` i64 of each.
        wanted: Positions of each, all at least 1.
        k: Entries per position.
        token_ids, logprobs: `(sum of positions, k)` i32 and f32, once scored.
    """

    teacher_logprobs: TeacherLogprobs
    k: int
    sequences: list[NDArray[np.int64]]
    wanted: list[NDArray[np.int64]]
    cancelled: bool = False
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.sequences)


def question_of(request: TeachRequest, reach: TeacherLimits) -> ScoreRequest:
    """Return the score request of a client. Raises `ApiError` if this teacher cannot answer it."""
    if request.tokenizer != reach.tokenizer:
        mismatch = TokenizerMismatchError.of(reach.tokenizer, request.tokenizer)
        raise ApiError(409, mismatch.problem, "tokenizer_mismatch")
    try:
        VocabularyMismatchError.check(request.teacher_logprobs, reach.vocabulary, request.vocabulary)
    except VocabularyMismatchError as error:
        raise ApiError(409, error.problem, error.CODE) from None
    if len(request.tokens) % 4 or len(request.wanted) * 4 != len(request.tokens):
        raise ApiError(400, "tokens and wanted: must have the same length")
    tokens = np.frombuffer(request.tokens, "<i4").astype(np.int64)
    wanted = np.frombuffer(request.wanted, np.uint8).astype(bool)
    lengths = np.array(request.lengths, np.int64)
    if lengths.sum() != tokens.size:
        raise ApiError(400, f"lengths: must add up to {tokens.size} tokens (got {lengths.sum()})")
    if lengths.size > reach.max_rows:
        raise ApiError(400, f"lengths: at most {reach.max_rows} sequences a request (got {lengths.size})")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < reach.vocabulary:
        raise ApiError(400, f"tokens: must be from 0 to {reach.vocabulary - 1}")
    if lengths.max(initial=0) > reach.positions:
        raise ApiError(400, f"lengths: at most {reach.positions} tokens a sequence (got {lengths.max()})")
    cuts = np.cumsum(lengths)[:-1]
    places = [np.flatnonzero(part) for part in np.split(wanted, cuts)]
    if any(place.size and place[0] == 0 for place in places):
        raise ApiError(400, "wanted: the first token of a sequence has no log-probability")
    return ScoreRequest(request.teacher_logprobs, _entries(request, reach), np.split(tokens, cuts), places)


def _entries(request: TeachRequest, reach: TeacherLimits) -> int:
    match request.teacher_logprobs:
        case TeacherLogprobs.FULL:
            return reach.vocabulary
        case TeacherLogprobs.SAMPLED:
            return 1
        case TeacherLogprobs.TOP_K if request.top_k:
            return min(request.top_k, reach.vocabulary)
        case TeacherLogprobs.TOP_K:
            raise ApiError(400, "top_k: required when teacher_logprobs is 'top_k' (got 0)")
        case _:
            raise ApiError(400, "teacher_logprobs: must be 'top_k', 'full' or 'sampled' (got 'none')")


class TeacherScorer:
    """Scores with one model.

    Args:
        model: A transformers causal language model without randomness (no dropout).
        pass_tokens: Most tokens of one forward pass, unless one sequence has more.
    """

    def __init__(self, model: Any, pass_tokens: int) -> None:
        self._model = model
        self._pass_tokens = pass_tokens

    @torch.inference_mode()
    def answer(
        self, questions: Sequence[ScoreRequest], on_done: Callable[[list[ScoreRequest]], None]
    ) -> None:
        """Score all requests. Blocks until the last is done, then calls `on_done` with all."""
        living = sorted((one for one in questions if not one.cancelled), key=_kind)
        for _, alike in groupby(living, _kind):
            self._answer_alike(list(alike))
        on_done(living)

    def _answer_alike(self, questions: list[ScoreRequest]) -> None:
        """Score requests of one kind, whose results have one shape."""
        sequences = [tokens for one in questions for tokens in one.sequences]
        wanted = [places for one in questions for places in one.wanted]
        first = np.cumsum([0, *map(len, wanted)])  # first result row of each sequence
        teacher_logprobs, k = questions[0].teacher_logprobs, questions[0].k
        token_ids, logprobs = np.empty((first[-1], k), np.int32), np.empty((first[-1], k), np.float32)
        for rows in self._passes(sequences, wanted):
            ids, values = self._read(
                [sequences[row] for row in rows], [wanted[row] for row in rows], teacher_logprobs, k
            )
            there = np.concatenate([np.arange(first[row], first[row + 1]) for row in rows])
            token_ids[there], logprobs[there] = ids.numpy(), values.numpy()
        ends = np.cumsum([sum(map(len, one.wanted)) for one in questions])[:-1]
        for one, ids_, logprobs_ in zip(
            questions, np.split(token_ids, ends), np.split(logprobs, ends), strict=True
        ):
            one.token_ids, one.logprobs = ids_, logprobs_

    def _passes(
        self, sequences: list[NDArray[np.int64]], wanted: list[NDArray[np.int64]]
    ) -> Iterator[list[int]]:
        """Yield the sequences of each forward pass, shortest first; those without a position are left out."""
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
        self,
        sequences: list[NDArray[np.int64]],
        wanted: list[NDArray[np.int64]],
        teacher_logprobs: TeacherLogprobs,
        k: int,
    ) -> tuple[Tensor, Tensor]:
        """Run one forward pass; return `(N, k)` token ids and log-probabilities of the positions, in order."""
        tokens = np.zeros((len(sequences), len(sequences[-1])), np.int64)  # (B, T); the last is the longest
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = sequence
        rows = torch.from_numpy(np.repeat(np.arange(len(wanted)), list(map(len, wanted))))
        places = torch.from_numpy(np.concatenate(wanted))
        given = torch.from_numpy(tokens)
        # Right padding needs no attention mask: a causal model looks back only.
        with float32_head(self._model):
            logits = self._model(input_ids=given[:, :-1], use_cache=False).logits  # (B, T - 1, V)
        logprobs = logits[rows, places - 1].float().log_softmax(-1)  # (N, V)
        if teacher_logprobs is TeacherLogprobs.TOP_K:
            best = logprobs.topk(k, -1)
            return best.indices, best.values
        if teacher_logprobs is TeacherLogprobs.SAMPLED:
            sampled = given[rows, places, None]
            return sampled, logprobs.gather(-1, sampled)
        return torch.arange(k).expand(len(logprobs), k), logprobs


def _kind(one: ScoreRequest) -> tuple[str, int]:
    return one.teacher_logprobs.value, one.k
