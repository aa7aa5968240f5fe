"""Requests to a teacher and its replies.

A teacher is another model with the same tokenizer. It returns log-probabilities for the positions of the trained
tokens; they are part of the group, in the columns `distill_token_ids` and `distill_logprobs`.
"""

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Message

IDS_COLUMN: Final = "distill_token_ids"

LOGPROBS_COLUMN: Final = "distill_logprobs"
"""Columns of the teacher's log-probabilities, `[sequence][position][k]`. An untrained position may have no entry."""

TOKENIZER_COLUMN: Final = "distill_tokenizer"
"""Column of the fingerprint of the teacher's tokenizer, one text for each sequence."""


TEACH_PATH: Final = "/v1/token_logprobs"
"""Path of requests to a teacher: POST, msgpack."""

HEALTH_PATH: Final = "/health"
"""Path of its health check: status 200 if it can answer."""

AWAY: Final = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of a teacher, or of a proxy before it, that pass: the client retries."""


class TeacherLogprobs(StrEnum):
    """Tokens whose log-probabilities a teacher returns for each wanted position."""

    NONE = "none"
    TOP_K = "top_k"
    """The likeliest tokens."""
    FULL = "full"
    """The whole vocabulary in the order of the ids, for small ones."""
    SAMPLED = "sampled"
    """The token that the student sampled."""


Bytes = Annotated[bytes, Meta(max_length=1 << 28)]

Lengths = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=1 << 16)]


class TeachRequest(Message, tag="teach", frozen=True, kw_only=True):
    """Request the teacher's log-probabilities for some positions. Arrays are flat and little-endian.

    Attributes:
        tokenizer: Fingerprint of the student's tokenizer.
        vocabulary: Size of the student's vocabulary; 0 if unknown.
        teacher_logprobs: Tokens whose log-probabilities the teacher returns.
        top_k: Number of tokens, for `top_k`.
        tokens: Token ids of all sequences, i32 `[tokens]`.
        lengths: Length of each sequence `[n]`.
        wanted: One byte for each token `[tokens]`: 1 for a wanted position; never the first of a sequence.
    """

    tokenizer: str
    vocabulary: Annotated[int, Meta(ge=0)] = 0
    teacher_logprobs: TeacherLogprobs
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    tokens: Bytes
    lengths: Lengths
    wanted: Bytes


class TeachReply(Message, tag="taught", frozen=True, kw_only=True):
    """`k` log-probabilities for each wanted position, in order.

    Attributes:
        model: Name of the teacher.
        k: Entries for each position.
        token_ids: i32 `[wanted][k]`.
        logprobs: f32 `[wanted][k]`, at temperature 1 over the whole vocabulary; the rest to probability 1 is the tail.
    """

    model: str
    k: int
    token_ids: bytes
    logprobs: bytes
