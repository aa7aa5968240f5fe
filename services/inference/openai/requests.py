"""Requests of OpenAI's interface with vLLM's extensions, decoded and checked. Pure; see `responses` for the
answers.

The server refuses a bad request before it generates anything, and names the field: unknown fields, unsupported fields
that would change the distribution, prompts outside the vocabulary or too long. Null means the default. Extensions:
prompts as token ids, and `return_token_ids`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from rolloutmq.schemas.errors import UsageError
from rolloutmq.services.inference.jobs import Job
from rolloutmq.services.inference.sampling import Sampling

BODY_LIMIT_BYTES: Final = 4 << 20
"""Largest request body, in bytes; a prompt of 100,000 tokens takes less than 1 MiB."""
MAX_TOKENS: Final = 16
"""OpenAI's default for completions; for chat the default is the rest of the context."""
STOPS_LIMIT: Final = 16
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
}
"""Accepted values of fields that are known but not supported; they change nothing."""

Positive = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class ApiError(UsageError):
    """A refused request, as HTTP status and error object."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        self.status = status
        self.message = message
        self.code = code

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this server."""

    model: str
    positions: int
    """Longest sequence in tokens, prompt and continuation together."""
    vocabulary: int
    max_rows: int
    """Most sequences of one request."""


class _Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    model: str | None = None
    n: Positive | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=STOPS_LIMIT)] | None = (
        None
    )
    return_token_ids: bool | None = None
    user: str | None = None
    best_of: Positive | None = None
    stream: Any = None
    echo: Any = None
    suffix: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    top_logprobs: Any = None


class TextRequest(_Request):
    """Body of `/v1/completions`."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0)] | None = None


class ChatRequest(_Request):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    logprobs: bool | None = None
    max_completion_tokens: Positive | None = None


_texts: Final = msgspec.json.Decoder(TextRequest)
_chats: Final = msgspec.json.Decoder(ChatRequest)


_R = TypeVar("_R", TextRequest, ChatRequest)


def text_request(body: bytes) -> TextRequest:
    """Decode the body of `/v1/completions`. Raises `ApiError`."""
    return _checked(_decoded(_texts, body))


def chat_request(body: bytes) -> ChatRequest:
    """Decode the body of `/v1/chat/completions`. Raises `ApiError`."""
    return _checked(_decoded(_chats, body))


def _decoded(decoder: "msgspec.json.Decoder[_R]", body: bytes) -> _R:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"invalid request: {error}") from None


def refuse_unsupported(request: Any, neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Refuse a field that is known but not supported, unless its value changes nothing. Raises `ApiError`."""
    for name, allowed in neutral.items():
        value = getattr(request, name)
        if value is not None and value not in allowed:
            raise ApiError(400, f"{prefix}{name}: {value!r:.80} is not supported by this server")


def check_model(asked: str | None, limits: Limits) -> None:
    """Refuse another model than the served one. Raises `ApiError`."""
    if asked is not None and asked != limits.model:
        raise ApiError(404, f"the model `{asked}` does not exist", "model_not_found")


def _checked(request: _R) -> _R:
    refuse_unsupported(request, NEUTRAL)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of: must equal n on this server")
    if isinstance(request, TextRequest) and (request.logprobs or 0) > 1:
        raise ApiError(
            400, f"logprobs: must be 0 or 1 (got {request.logprobs}); only sampled tokens have one"
        )
    if request.temperature is not None and not isfinite(request.temperature):
        raise ApiError(400, "temperature: must be finite")
    return request


def prompts_of(request: TextRequest, encode_text: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the prompts of a request as token ids."""
    given = request.prompt
    if isinstance(given, str):
        return [encode_text(given)]
    if given and all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]
    if not given or any(isinstance(item, int) for item in given):
        raise ApiError(
            400, "prompt: must be a string, a list of token ids, or a list of strings or token id lists"
        )
    return [encode_text(item) if isinstance(item, str) else item for item in given]  # type: ignore[misc]


def job_of(request: TextRequest | ChatRequest, prompts: list[list[int]], limits: Limits) -> Job:
    """Return the job of a request. Raises `ApiError` for requests beyond the limits."""
    check_model(request.model, limits)
    longest = max(map(len, prompts))
    job = Job(prompts, _sampling(request, limits.positions - longest))
    if job.rows > limits.max_rows:
        raise ApiError(400, f"n: at most {limits.max_rows} sequences a request (got {job.rows})")
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, "prompt: must have at least one token (got none)")
        if min(prompt) < 0 or max(prompt) >= limits.vocabulary:
            raise ApiError(400, f"prompt: token ids must be from 0 to {limits.vocabulary - 1}")
    if longest + job.sampling.max_tokens > limits.positions:
        raise ApiError(
            400,
            f"the context has {limits.positions} tokens; the prompt has {longest} and max_tokens is "
            f"{job.sampling.max_tokens}",
            "context_length_exceeded",
        )
    return job


def _sampling(request: TextRequest | ChatRequest, room: int) -> Sampling:
    if isinstance(request, ChatRequest):
        max_tokens = request.max_completion_tokens or request.max_tokens or max(1, room)
    else:
        max_tokens = request.max_tokens or max(1, min(MAX_TOKENS, room))
    stop = request.stop or ()
    return Sampling(
        n=request.n or 1,
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=request.seed,
    )
