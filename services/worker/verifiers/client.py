"""Client of the policy for rollouts of `verifiers`: their client of OpenAI's interface, on the servers of this run.

It asks for token ids and log-probabilities, and keeps what was sampled for each response. Their code sees the text and
the tool calls alone, so whatever it does with messages changes no sampled token.

A server that is away costs a pause, not a rollout: after a connection error, or a status of an overloaded or restarting
server, the call moves to the engine that `Policy.endpoint` chooses then. All calls of a group go to one engine until it
fails, since its cache has their beginning.

An empty answer is an answer: a policy that ends at once has to learn that from its reward. Theirs makes it an error.
"""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError
from verifiers.types import ResponseTokens

from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.openai.client import BACKOFF_MAX_S, BACKOFF_S, RETRIED
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.verifiers.request_fields import check_request

OVERLONG: Final = "context_length_exceeded"
"""Code of a server's error for a prompt without room for the answer."""
OVER: Final = "the rollout is over: nothing is sampled for it any more"


def openai_client() -> AsyncOpenAI:
    """Return a client whose address each call replaces. It neither retries nor gives up, and asks no proxy."""
    http_client = DefaultAsyncHttpxClient(trust_env=False, timeout=None)
    return AsyncOpenAI(
        base_url="http://unused", api_key="unused", max_retries=0, timeout=None, http_client=http_client
    )


class Engine:
    """The engine that the calls of one group go to; another one once it has failed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._endpoint: Endpoint | None = None
        self._closed = False

    async def endpoint(self) -> Endpoint:
        """Return the engine's endpoint; wait until one answers.

        Raises:
            PolicyUnavailableError: No server answered in time.
            RuntimeError: The rollout is over.
        """
        async with self._lock:
            if self._is_closed():
                raise RuntimeError(OVER)
            if self._endpoint is None:
                self._endpoint = await self._stack.enter_async_context(self._policy.endpoint())
            if self._is_closed():  # meanwhile
                await self._stack.aclose()
                raise RuntimeError(OVER)
            return self._endpoint

    def _is_closed(self) -> bool:
        return self._closed

    async def leave(self, failed: Endpoint) -> None:
        """Choose another engine for the next call, if this one is still that which failed."""
        async with self._lock:
            if self._endpoint is failed:
                self._endpoint = None
                await self._stack.aclose()

    async def close(self) -> None:
        """Let go of the engine; calls after this raise."""
        self._closed = True
        await self._stack.aclose()


class PolicyClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """Client of one group.

    Attributes:
        sampled: What the policy sampled, by the id of the response.
        overlong: What the server said of the last prompt without room for an answer; empty if there was none.
    """

    def __init__(self, openai: AsyncOpenAI, engine: Engine, patience_s: float) -> None:
        super().__init__(openai)
        self.sampled: dict[str, Completion] = {}
        self.overlong = ""
        self._openai = openai
        self._engine = engine
        self._patience_s = patience_s
        self._prefix = secrets.token_hex(8)
        self._at: dict[str, AsyncOpenAI] = {}
        self._base_url = ""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, openai: AsyncOpenAI, policy: Policy, patience_s: float
    ) -> AsyncIterator["PolicyClient"]:
        """Open a client for the rollouts of the block; it is of no use after it.

        Args:
            openai: Does the calls.
            policy: Chooses the engines.
            patience_s: Seconds of retries before a call gives up.
        """
        engine = Engine(policy)
        try:
            yield cls(openai, engine, patience_s)
        finally:
            await engine.close()

    @property
    def client(self) -> AsyncOpenAI:
        """OpenAI's client with the address of the engine that the call in preparation goes to."""
        return self._at.get(self._base_url, self._openai)

    async def get_native_response(
        self,
        prompt: Any,
        model: str,  # noqa: ARG002 - that of the engine is asked
        sampling_args: Mapping[str, Any],
        tools: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Ask the policy for the next turn. ConfigError if a rollout has set a field that is refused."""
        check_request(sampling_args)
        until = time.monotonic() + self._patience_s
        longest_s = BACKOFF_S
        while True:
            endpoint = await self._engine.endpoint()
            try:
                return await self._asked(endpoint, prompt, sampling_args, tools, kwargs)
            except (APIConnectionError, APIStatusError) as error:
                if _is_final(error):
                    raise
                await self._engine.leave(endpoint)
                pause_s = longest_s * random.uniform(0.5, 1.0)
                if time.monotonic() + pause_s >= until:
                    raise
            await asyncio.sleep(pause_s)
            longest_s = min(2 * longest_s, BACKOFF_MAX_S)

    async def _asked(
        self,
        endpoint: Endpoint,
        prompt: Any,
        sampling_args: Mapping[str, Any],
        tools: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        asked = dict(endpoint.request)
        model, extra = asked.pop("model"), asked.pop("extra_body")
        arguments = {**sampling_args, **asked}
        arguments["extra_body"] = {**(sampling_args.get("extra_body") or {}), **extra}
        # Nothing awaits between this and the reading of `client`.
        self._base_url = endpoint.base_url
        if endpoint.base_url not in self._at:
            self._at[endpoint.base_url] = self._openai.with_options(base_url=endpoint.base_url)
        try:
            native = await super().get_native_response(prompt, model, arguments, tools, **kwargs)
        except APIStatusError as error:
            if error.code != OVERLONG:
                raise
            self.overlong = str(error)
            raise OverlongPromptError from error
        completions = endpoint.completions(native, arguments.get("temperature") or 1.0)
        if len(completions) != 1:
            raise PolicyRefusedError(200, f"one choice was asked for (got {len(completions)})")
        (completion,) = completions
        # Servers number their responses each for itself, and an environment may ask others.
        native.id = f"{self._prefix}-{len(self.sampled)}"
        self.sampled[native.id] = completion
        return native

    async def raise_from_native_response(self, response: Any) -> None:
        """Refuse a response without exactly one choice; an empty answer is one."""
        if len(getattr(response, "choices", None) or ()) != 1:
            await super().raise_from_native_response(response)

    async def from_native_response(self, response: Any) -> Any:
        """Return their response, with what was sampled; the content of an empty answer is an empty text."""
        found = await super().from_native_response(response)
        sampled = self.sampled[response.id]
        found.message.tokens = ResponseTokens(
            prompt_ids=sampled.prompt_token_ids,
            prompt_mask=[0] * len(sampled.prompt_token_ids),
            completion_ids=sampled.token_ids,
            completion_mask=[1] * len(sampled.token_ids),
            completion_logprobs=sampled.logprobs,
        )
        if found.message.content is None and not found.message.tool_calls:
            found.message.content = ""
        return found


def _is_final(error: APIConnectionError | APIStatusError) -> bool:
    return isinstance(error, APIStatusError) and error.status_code not in RETRIED
