"""Completions: answers of the policy with everything a trainer needs, and the messages that ask for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.wire.envelope import PolicyVersion

MAX_TOKENS: Final = 16
"""Default length of a completion, in tokens; small, so that forgetting the argument costs little."""

SHOWN_CHARS: Final = 80
"""Longest content that an error shows."""

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


def is_stop(stop: Any) -> bool:
    """Return whether servers take a `stop`: None, or one or several texts, none of them empty or without UTF-8."""
    if stop is None:
        return True
    texts = [stop] if isinstance(stop, str) else stop
    return isinstance(texts, Sequence) and all(
        isinstance(text, str) and text and text == text.encode(errors="ignore").decode() for text in texts
    )


def contents_of(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the text of each message, that of its parts joined; parts without text, such as images, have none.

    Raises:
        UsageError: A content is neither a text nor a list of parts. Only an answer, which may call tools instead, may
            have none.
    """
    return ["".join(_texts(at, message)) for at, message in enumerate(messages)]


def _texts(at: int, message: ChatMessage) -> Iterator[str]:
    content = message.get("content")
    if content is None and message.get("role") == "assistant":
        return
    parts: Any = [content] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str | Mapping) for part in parts):
        got = f"{content!r:.{SHOWN_CHARS}}" if "content" in message else "none"
        raise UsageError(
            f"messages[{at}].content: must be a text or a list of parts (got {got}); write the text there"
        )
    texts = (part if isinstance(part, str) else part.get("text") for part in parts)
    yield from (text for text in texts if isinstance(text, str))
