"""What an environment sees of the model: ask it, and get completions with everything a trainer needs.

`services.worker.openai` is the real one, `services.worker.scripted` the one for tests.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from rolloutmq.schemas.envelope import PolicyVersion

if TYPE_CHECKING:
    from rolloutmq.services.worker.endpoint import Endpoint

ChatMessage: TypeAlias = Mapping[str, Any]
"""One message of a conversation: `{"role": "user", "content": "..."}`, and what else the server knows."""

MAX_TOKENS: Final = 16
"""Tokens of a completion where nobody says how many; small, so that forgetting it costs little."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Attributes:
        text: The answer, without special tokens.
        prompt_token_ids: What the model was given, as it was tokenised.
        token_ids: What it sampled, an end-of-sequence token included.
        logprobs: Of each sampled token, under the distribution that it was sampled from.
        oldest, newest: Policy versions of the first and the last sampled token.
        finish_reason: `stop` if the model ended it, `length` if `max_tokens` did.
        temperature: That its log-probabilities are of: that of the sampling, but 1 where the likeliest token was taken.
        tokens: The text of each sampled token, special ones included: what counts places, since a token without a
            text leaves no trace in `text`. Empty if the server does not tell.
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


class Policy(Protocol):
    """The model that is being trained, as it is at this moment.

    A server that is away or restarting makes a call wait, not fail. Calls may be made concurrently, and are
    cancellation safe.
    """

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """Sample `n` continuations of a text, or of token ids.

        Raises:
            PolicyRefusedError: The server does not accept the prompt; the rollout is lost.
            PolicyUnavailableError: The server stayed away for too long.
        """
        ...

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """Sample `n` answers to a conversation, put into a prompt by the server. Raises what `complete` does."""
        ...

    def endpoint(self) -> AbstractAsyncContextManager["Endpoint"]:
        """Choose a server for one conversation of a client of your own, such as `openai.AsyncOpenAI`.

            async with policy.endpoint() as endpoint:
                client = AsyncOpenAI(base_url=endpoint.base_url, api_key="unused")
                answer = await client.chat.completions.create(messages=messages, **endpoint.request)
                (completion,) = endpoint.completions(answer)

        Waits until there is a server that answers. What it does after that is between the client and the server, also
        when it goes away: a client that tries again bridges a pause.

        Raises:
            PolicyUnavailableError: No server answered for too long.
        """
        ...
