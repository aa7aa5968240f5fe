"""HTTP client of vLLM for an engine: tokens in; tokens, log-probabilities and versions out."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from rolloutmq.schemas.errors import RetryableError
from rolloutmq.services.inference.jobs import Continuation, Span
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.vllm import version_label

logger = logging.getLogger(__name__)

GENERATE: Final = "/inference/v1/generate"
_BASE: Final = "http://vllm"
"""Placeholder host; the socket decides where requests go."""
HEALTH_S: Final = 5.0
"""Timeout of a health check, in seconds; it is repeated anyway."""
CALL_S: Final = 60.0
"""Timeout of an extension call, in seconds: it waits for a step and may verify and bind every tensor."""


class EngineFailedError(RetryableError):
    """vLLM aborted a request or returned no usable response; a retry may succeed."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __str__(self) -> str:
        return self.why


class EngineStalledError(EngineFailedError):
    """vLLM takes no steps; another engine or a later attempt may succeed."""

    def __init__(self, still_s: float) -> None:
        super().__init__(f"vLLM is stalled: no step and no response for {still_s:.0f} s")


class EngineSilentError(EngineFailedError):
    """vLLM did not answer a call in time; `StallDetector` decides whether it is stalled."""


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Token(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Reason(msgspec.Struct):
    finish_reason: str | None = None


class _Reasons(msgspec.Struct):
    choices: list[_Reason] = []


class _Results(msgspec.Struct):
    results: list[dict[str, Any]]


_answers: Final = msgspec.json.Decoder(_Answer)
_reasons: Final = msgspec.json.Decoder(_Reasons)
_results: Final = msgspec.json.Decoder(_Results)
_encode: Final = msgspec.json.Encoder().encode
_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class VllmClient:
    """Calls one vLLM. Made by `opened`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @classmethod
    @asynccontextmanager
    async def opened(cls, socket: Path) -> AsyncIterator["VllmClient"]:
        """Open a client for the duration of the block."""
        connector = aiohttp.UnixConnector(str(socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            _BASE, connector=connector, timeout=timeout, headers=_HEADERS, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            yield cls(session)

    async def answers(self) -> bool:
        """Return whether the health check passes."""
        try:
            async with asyncio.timeout(HEALTH_S), self._session.get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def call(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of the extension; return the result of the first worker.

        Raises:
            EngineFailedError: vLLM refuses, is gone, or does not answer.
        """
        return (await self._call_all(method, *args))[0]

    async def _call_all(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of the extension; return the results of all workers, of which there is one at least."""
        status, body = await self._within(
            method, self._post("/collective_rpc", {"method": method, "args": args})
        )
        with suppress(msgspec.MsgspecError):
            if status == 200 and (results := _results.decode(body).results):
                return results
        raise EngineFailedError(f"{method}: status {status}, {_short(body)}")

    async def _within(self, what: str, answer: Awaitable[tuple[int, bytes]]) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(CALL_S):
                return await answer
        except TimeoutError:
            raise EngineSilentError(f"{what}: vLLM did not answer within {CALL_S:g} s") from None

    async def sent_version(self) -> str | None:
        """Return the version of weights that have arrived whole in each worker; None if there are none.

        They count once vLLM samples again: a sender may die after the weights are whole and before it resumes vLLM.

        Raises:
            EngineFailedError: vLLM refuses, is gone, or does not answer.
        """
        if not all(one.get("whole") for one in await self._call_all("sent_weights")):
            return None
        if await self._state("/is_paused", "is_paused"):
            return None
        return str(await self._state("/weight_info", "weight_version"))

    async def _state(self, path: str, key: str) -> Any:
        status, body = await self._within(path, self._get(path))
        with suppress(msgspec.MsgspecError, KeyError, TypeError):
            if status == 200:
                return msgspec.json.decode(body)[key]
        raise EngineFailedError(f"{path}: status {status}, {_short(body)}")

    async def steps(self) -> int:
        """Return the number of steps vLLM has taken; it answers between two of them.

        Raises:
            EngineFailedError: vLLM refuses, is gone, or does not answer.
        """
        steps = (await self.call("steps_taken")).get("steps")
        if not isinstance(steps, int):
            raise EngineFailedError(f"steps_taken: must be a number (got {steps!r})")
        return steps

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, end_ids: Sequence[int]
    ) -> list[Continuation]:
        """Sample `n` continuations of one prompt. Cancelling the call aborts them.

        Raises:
            ApiError: vLLM refuses the request.
            EngineFailedError: vLLM aborted the request, or is gone.
        """
        # Greedy sampling gives the same sequence each time: sample it once and copy it.
        copies = sampling.n if sampling.temperature == 0 else 1
        asked = _request(prompt, sampling, end_ids, sampling.n // copies)
        status, body = await self._post(GENERATE, asked)
        if status == 200:
            return continuations(body, sampling.n // copies) * copies
        if 400 <= status < 500:
            raise ApiError(status, f"vLLM: {_short(body)}")
        raise EngineFailedError(f"vLLM: status {status}, {_short(body)}")

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return await self._ask("POST", path, _encode(body))

    async def _get(self, path: str) -> tuple[int, bytes]:
        return await self._ask("GET", path, None)

    async def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        try:
            async with self._session.request(method, path, data=body) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise EngineFailedError(f"vLLM is unavailable: {type(error).__name__} {error}") from None


def _request(prompt: Sequence[int], sampling: Sampling, end_ids: Sequence[int], n: int) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "n": n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 0,  # of the sampled token only
        # The end tokens come from here only, and from the request: vLLM's own choice from the model's files is off.
        "stop_token_ids": [*end_ids, *sampling.stop_ids],
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        asked["seed"] = sampling.seed
    return {"token_ids": list(prompt), "sampling_params": asked}


def continuations(body: bytes, n: int) -> list[Continuation]:
    """Decode a response of `/inference/v1/generate`. Pure.

    Raises:
        EngineFailedError: A sequence was aborted, or the response lacks what training needs.
    """
    if any(choice.finish_reason == "abort" for choice in _decoded(_reasons, body).choices):
        raise EngineFailedError("vLLM aborted the request: its weights cannot be read")
    choices = sorted(_decoded(_answers, body).choices, key=lambda choice: choice.index)
    if len(choices) != n:
        raise EngineFailedError(f"vLLM: {len(choices)} choices, {n} were requested")
    return [_continuation(choice) for choice in choices]


def _decoded(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineFailedError(f"vLLM: malformed response: {error}") from None


def _continuation(choice: _Choice) -> Continuation:
    content, at = choice.logprobs.content, 0
    if [token.token_id for token in content] != choice.token_ids:
        raise EngineFailedError("vLLM: its log-probabilities do not match its tokens")
    spans = []
    for span in choice.weight_versions:
        version = version_label.version(span.version)
        if version is None or span.start != at or span.end < at:
            raise EngineFailedError(
                f"vLLM: {span.version!r} is not a version of tokens {span.start} to {span.end}"
            )
        spans.append(Span(span.start, span.end, version))
        at = span.end
    if at != len(content):
        raise EngineFailedError(f"vLLM: {len(content) - at} tokens have no version")
    return Continuation(
        choice.token_ids,
        [token.logprob for token in content],
        tuple(spans),
        stopped=choice.finish_reason == "stop",
    )


def _short(body: bytes) -> str:
    return " ".join(body[:300].decode(errors="replace").split())
