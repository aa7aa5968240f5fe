"""The policy, as an environment calls it: prompts in, completions with everything a trainer needs out.

`services.worker.openai.client` implements it over HTTP, `services.worker.scripted` from a script for tests.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.completion import MAX_TOKENS, ChatMessage, Completion, TokenIds
from rolloutmq.services.worker.trajectory import Trajectory

if TYPE_CHECKING:
    from rolloutmq.services.worker.openai.wire import Endpoint


class Policy(Protocol):
    """The model under training, in its current version.

    Calls wait while a server is away or restarts. Calls may run concurrently and may be cancelled at any
    time.
    """

    async def complete(
        self,
        prompt: str | TokenIds,
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """Sample `n` continuations of a text or of token ids.

        Args:
            prompt: Text, or token ids; with `after` only what follows it.
            after: Turns so far. Their exact tokens are the beginning of the prompt; nothing is tokenized again.
            n: Number of completions.
            max_tokens: Longest completion, in tokens.
            temperature: Sampling temperature; 0 takes the most likely token.
            stop: Texts that end a completion.

        Raises:
            PolicyRefusedError: The server does not accept the prompt, or its response lacks what training
                needs.
            UsageError: The prompt begins with the tokens of `after`, which would be in it twice.
            PolicyUnavailableError: No server answered within 0.9 of `rollout_timeout_s`.
        """
        ...

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """Sample `n` answers to a conversation; the server applies its chat template. See `complete`.

        Args:
            messages: The whole conversation, or with `after` only the messages since its last answer.
            after: Turns so far. Their exact tokens are the beginning of the prompt; the chat template renders the new
                messages alone, behind the answer.
            n: Number of answers.
            max_tokens: Longest answer, in tokens.
            temperature: Sampling temperature; 0 takes the most likely token.
            stop: Texts that end an answer.

        Raises:
            PolicyRefusedError: As `complete`; or the chat template fails, or does not keep earlier answers.
            UsageError: There is an answer among messages with `after`.
            PolicyUnavailableError: No server answered within 0.9 of `rollout_timeout_s`.
        """
        ...

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text as part of a longer one: without a token for its beginning (BOS) or end.

        Raises:
            PolicyRefusedError: The vocabulary lacks a character, or the server has no `/tokenize`.
            PolicyUnavailableError: No server answered within 0.9 of `rollout_timeout_s`.
        """
        ...

    async def detokenize(self, tokens: TokenIds) -> str:
        """Return the text of token ids, special tokens included. Raises the errors of `tokenize`."""
        ...

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Trajectory | None = None,
    ) -> list[int]:
        """Return the prompt of `chat` as token ids: the chat template of the model, and the beginning of its answer.

        Sample from it with `complete`, without `after`: the result has the turns so far. Needed for tools, which `chat`
        does not take.

        Args:
            messages: The whole conversation, or with `after` only the messages since its last answer.
            tools: Definitions of tools in OpenAI's format, if the template knows tools.
            after: Turns so far. The prompt begins with their exact tokens.

        Raises:
            PolicyRefusedError: The tokenizer has no chat template; the template fails, or does not keep earlier
                answers; the server has no `/tokenize`.
            UsageError: There is an answer among messages with `after`.
            PolicyUnavailableError: No server answered within 0.9 of `rollout_timeout_s`.
        """
        ...

    def endpoint(self) -> AbstractAsyncContextManager["Endpoint"]:
        """Choose a server for one conversation of your own client, such as `openai.AsyncOpenAI`.

            async with policy.endpoint() as endpoint:
                client = AsyncOpenAI(base_url=endpoint.base_url, api_key="unused")
                answer = await client.chat.completions.create(messages=messages, **endpoint.request)
                (completion,) = endpoint.completions(answer)

        Entering waits until a server answers. After that the client talks to the server directly; if the server goes
        away, the client has to retry.

        Raises:
            PolicyUnavailableError: No server answered within 0.9 of `rollout_timeout_s`.
        """
        ...


class _WrappedPolicy:
    """What a policy around another one passes on unchanged."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def tokenize(self, text: str) -> list[int]:
        """See `Policy.tokenize`."""
        return await self._policy.tokenize(text)

    async def detokenize(self, tokens: TokenIds) -> str:
        """See `Policy.detokenize`."""
        return await self._policy.detokenize(tokens)

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Trajectory | None = None,
    ) -> list[int]:
        """See `Policy.render`."""
        return await self._policy.render(messages, tools=tools, after=after)


class GreedyPolicy(_WrappedPolicy):
    """A policy whose answers are the most likely ones: every call has temperature 0, whatever it asks for."""

    async def complete(
        self,
        prompt: str | TokenIds,
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 0.0,  # noqa: ARG002 - replaced by 0
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `Policy.complete`."""
        return await self._policy.complete(
            prompt, after=after, n=n, max_tokens=max_tokens, temperature=0.0, stop=stop
        )

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 0.0,  # noqa: ARG002 - replaced by 0
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `Policy.chat`."""
        return await self._policy.chat(
            messages, after=after, n=n, max_tokens=max_tokens, temperature=0.0, stop=stop
        )

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator["Endpoint"]:
        """See `Policy.endpoint`. The temperature of 0 is in `Endpoint.request`, which the client must pass on."""
        async with self._policy.endpoint() as endpoint:
            yield replace(endpoint, greedy=True)


class CountingPolicy(_WrappedPolicy):
    """A policy that counts what it samples: the autoscaler reads from it how fast running rollouts advance.

    Attributes:
        completions: Completions so far.
        tokens: Their sampled tokens.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.completions = 0
        self.tokens = 0

    async def complete(
        self,
        prompt: str | TokenIds,
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `Policy.complete`."""
        completions = await self._policy.complete(
            prompt, after=after, n=n, max_tokens=max_tokens, temperature=temperature, stop=stop
        )
        self._count(completions)
        return completions

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `Policy.chat`."""
        completions = await self._policy.chat(
            messages, after=after, n=n, max_tokens=max_tokens, temperature=temperature, stop=stop
        )
        self._count(completions)
        return completions

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator["Endpoint"]:
        """See `Policy.endpoint`."""
        async with self._policy.endpoint() as endpoint:
            yield replace(endpoint, heard=self._count)

    def _count(self, completions: list[Completion]) -> None:
        self.completions += len(completions)
        self.tokens += sum(len(one.token_ids) for one in completions)


class NoPolicy:
    """The policy of a run without an inference server: an environment that samples by itself never asks it."""

    async def complete(self, *_: object, **__: object) -> list[Completion]:
        """Raise ConfigError."""
        raise self._error

    async def chat(self, *_: object, **__: object) -> list[Completion]:
        """Raise ConfigError."""
        raise self._error

    async def tokenize(self, *_: object, **__: object) -> list[int]:
        """Raise ConfigError."""
        raise self._error

    async def detokenize(self, *_: object, **__: object) -> str:
        """Raise ConfigError."""
        raise self._error

    async def render(self, *_: object, **__: object) -> list[int]:
        """Raise ConfigError."""
        raise self._error

    def endpoint(self) -> AbstractAsyncContextManager["Endpoint"]:
        """Raise ConfigError."""
        raise self._error

    @property
    def _error(self) -> ConfigError:
        return ConfigError(
            "inference.kind",
            "must not be `none` for an environment that asks its policy (got none); "
            "choose a server, or sample in the environment",
        )
