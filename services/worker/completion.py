"""Completions: answers of the policy with everything a trainer needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

from rolloutmq.schemas.wire.envelope import PolicyVersion

MAX_TOKENS: Final = 16
"""Default length of a completion, in tokens; small, so that forgetting the argument costs little."""

ChatMessage: TypeAlias = Mapping[str, Any]
"""One message of a conversation: `{"role": "user", "content": "..."}`, and any other key the server accepts."""

TokenIds: TypeAlias = Sequence[int] | NDArray[Any]
"""Token ids, in a list or in an array."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Attributes:
        text: The answer, without special tokens.
        prompt_token_ids: The tokenized prompt.
        token_ids: The sampled tokens, including an end-of-sequence token.
        logprobs: Log-probability of each sampled token, in nats, under the distribution it was sampled from.
        oldest, newest: Policy versions of the first and the last sampled token.
        finish_reason: `stop` if the model ended the answer, `length` if `max_tokens` did.
        temperature: Temperature that the log-probabilities refer to: the sampling temperature, or 1 for
            greedy sampling.
        tokens: Text of each sampled token, special tokens included. Use it to count positions: tokens without text
            leave no trace in `text`. Empty if the server does not return it.
    """

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    oldest: PolicyVersion = PolicyVersion()
    newest: PolicyVersion = PolicyVersion()
    finish_reason: str = "stop"
    tokens: list[str] = field(default_factory=list)
    temperature: float = 1.0
