"""vLLM's own HTTP interface, as an engine needs it: tokens in, tokens with log-probabilities and versions out."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from rolloutmq.schemas.errors import RetryableError
from rolloutmq.services.inference.generate import Continuation, Span
from rolloutmq.services.inference.protocol import ApiError
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.vllm import label

logger = logging.getLogger(__name__)

GENERATE: Final = "/inference/v1/generate"
_BASE: Final = "http://vllm"
"""Of no meaning on a unix socket."""
HEALTH_S: Final = 5.0
"""How long it may take to say that it is up; it is asked again anyway."""
CALL_S: Final = 60.0
"""How long a method of the extension may take: behind a step of the engine, it proves and binds every tensor."""


class EngineFailedError(RetryableError):
    """vLLM ended a request or gave no usable answer; another attempt may fare better."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __str__(self) -> str:
        return self.why


class EngineStalledError(EngineFailedError):
    """vLLM takes no steps; another engine, or a later attempt, may fare better."""

    def __init__(self, still_s: float) -> None:
        super().__init__(f"vLLM stands still: no step and no answer for {still_s:.0f} s")


class EngineSilentError(EngineFailedError):
    """vLLM did not answer a call in time; whether it stands still, others judge."""


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
    """Asks one vLLM. Made by `opened`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @classmethod
    @asynccontextmanager
    async def opened(cls, socket: Path) -> AsyncIterator["VllmClient"]:
        """Open a client for as long as the block lasts."""
        connector = aiohttp.UnixConnector(str(socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            _BASE, connector=connector, timeout=timeout, headers=_HEADERS, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            yield cls(session)

    async def answers(self) -> bool:
        """Tell whether it is up."""
        try:
            async with asyncio.timeout(HEALTH_S), self._session.get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def call(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of the extension; return what the first worker returns.

        Raises:
            EngineFailedError: vLLM refused, is gone, or does not answer.
        """
        try:
            async with asyncio.timeout(CALL_S):
                status, body = await self._post("/collective_rpc", {"method": method, "args": args})
        except TimeoutError:
            raise EngineSilentError(f"{method}: vLLM did not answer within {CALL_S:g} s") from None
        try:
            if status == 200:
                return _results.decode(body).results[0]
        except (msgspec.MsgspecError, IndexError):
            pass
        raise EngineFailedError(f"{method}: status {status}, {_short(body)}")

    async def steps(self) -> int:
        """Ask how many steps it took, which it says between two of them.

        Raises:
            EngineFailedError: vLLM refused, is gone, or does not answer.
        """
        said = (await self.call("steps_taken")).get("steps")
        if not isinstance(said, int):
            raise EngineFailedError(f"steps_taken: {said!r} is no number")
        return said

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, end_ids: Sequence[int]
    ) -> list[Continuation]:
        """Sample `n` continuations of one prompt. Cancelling it ends them.

        Raises:
            ApiError: vLLM refuses the request.
            EngineFailedError: It ended the request, or is gone.
        """
        # It samples the most likely sequence once only, since it is always the same.
        copies = sampling.n if sampling.temperature == 0 else 1
        asked = _request(prompt, sampling, end_ids, sampling.n // copies)
        status, body = await self._post(GENERATE, asked)
        if status == 200:
            return continuations(body, sampling.n // copies) * copies
        if 400 <= status < 500:
            raise ApiError(status, f"vLLM: {_short(body)}")
        raise EngineFailedError(f"vLLM: status {status}, {_short(body)}")

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        try:
            async with self._session.post(path, data=_encode(body)) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise EngineFailedError(f"vLLM is away: {type(error).__name__} {error}") from None


def _request(prompt: Sequence[int], sampling: Sampling, end_ids: Sequence[int], n: int) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "n": n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 0,  # that of the sampled token alone
        # The end is told here, once for all: what vLLM would take from the model's files is not asked.
        "stop_token_ids": list(end_ids),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        asked["seed"] = sampling.seed
    return {"token_ids": list(prompt), "sampling_params": asked}


def continuations(body: bytes, n: int) -> list[Continuation]:
    """Decode the answer of `/inference/v1/generate`. Pure.

    Raises:
        EngineFailedError: It ended a sequence before its time, or the answer lacks what training needs.
    """
    if any(choice.finish_reason == "abort" for choice in _decoded(_reasons, body).choices):
        raise EngineFailedError("vLLM ended the request: its weights are not to be read")
    choices = sorted(_decoded(_answers, body).choices, key=lambda choice: choice.index)
    if len(choices) != n:
        raise EngineFailedError(f"vLLM: {len(choices)} choices, {n} were asked for")
    return [_continuation(choice) for choice in choices]


def _decoded(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineFailedError(f"vLLM: its answer is not understood: {error}") from None


def _continuation(choice: _Choice) -> Continuation:
    content, at = choice.logprobs.content, 0
    if [token.token_id for token in content] != choice.token_ids:
        raise EngineFailedError("vLLM: its log-probabilities are not of its tokens")
    spans = []
    for span in choice.weight_versions:
        version = label.version(span.version)
        if version is None or span.start != at or span.end < at:
            raise EngineFailedError(
                f"vLLM: {span.version!r} is no version of tokens {span.start} to {span.end}"
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
