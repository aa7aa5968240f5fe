"""Client of the policy for rollouts of `verifiers`: their client of OpenAI's interface, on the servers of this run.

It asks for token ids and log-probabilities, and keeps what was sampled for each response. Their code sees the text and
the tool calls alone, so whatever it does with messages changes no sampled token.

An empty answer is an answer: a policy that ends at once has to learn that from its reward. Theirs makes it an error.
"""

import secrets
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, Timeout
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError
from verifiers.types import ResponseTokens

from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.openai.client import CONNECT_S, RETRIED
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.verifiers.engine import OVERLONG, Engine
from rolloutmq.services.worker.verifiers.request_fields import check_request


def openai_client(tls: ssl.SSLContext | None = None) -> AsyncOpenAI:
    """Return a client whose address each call replaces. It does not retry, and asks no proxy.

    It waits `CONNECT_S` for a connection, and for an answer without a limit.
    """
    timeout = Timeout(None, connect=CONNECT_S)
    http_client = DefaultAsyncHttpxClient(trust_env=False, timeout=timeout, verify=tls or True)
    return AsyncOpenAI(
        base_url="http://unused", api_key="unused", max_retries=0, timeout=timeout, http_client=http_client
    )


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
        self._trusting: list[AsyncOpenAI] = []
        """Clients of engines with a certificate of the run's own authority."""
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
        made = cls(openai, engine, patience_s)
        try:
            yield made
        finally:
            await engine.close()
            for one in made._trusting:
                await one.close()

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
        return await self._engine.answered(
            lambda endpoint: self._asked(endpoint, prompt, sampling_args, tools, kwargs),
            _is_final,
            self._patience_s,
        )

    def _client_of(self, endpoint: Endpoint) -> AsyncOpenAI:
        openai = self._openai
        if endpoint.tls is not None:
            openai = openai_client(endpoint.tls)
            self._trusting.append(openai)
        return openai.with_options(base_url=endpoint.base_url)

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
            self._at[endpoint.base_url] = self._client_of(endpoint)
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


def _is_final(error: Exception) -> bool:
    if isinstance(error, APIStatusError):
        return error.status_code not in RETRIED
    return not isinstance(error, APIConnectionError)
