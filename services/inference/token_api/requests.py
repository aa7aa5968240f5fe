"""Requests of `/inference/v1/generate`, decoded and checked. Pure; see `responses` for the answers.

A request is one prompt as token ids and one object `sampling_params`, as vLLM takes them. The server refuses a bad
request before it generates anything, and names the field. A request has one answer: clients that want several send
several. Null means the default. If the prompt leaves less room than `max_tokens`, the answer ends where the context
does, with the reason `length`, as in vLLM.

Fields that shape text alone, such as `skip_special_tokens`, have no effect on tokens and are accepted.
"""

from math import isfinite
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rolloutmq.services.inference.jobs import Job
from rolloutmq.services.inference.openai.requests import (
    NEUTRAL,
    STOPS_LIMIT,
    ApiError,
    Limits,
    Positive,
    Seed,
    check_model,
    refuse_unsupported,
)
from rolloutmq.services.inference.sampling import Sampling

STOP_IDS_LIMIT: Final = 128
"""Most `stop_token_ids` of a request."""
_SAMPLING: Final = "sampling_params"
_NEUTRAL_SAMPLING: Final[dict[str, tuple[Any, ...]]] = {
    **{name: NEUTRAL[name] for name in ("top_k", "min_p", "presence_penalty", "frequency_penalty")},
    **{name: NEUTRAL[name] for name in ("repetition_penalty", "logit_bias")},
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
}
"""Accepted values of fields of `sampling_params` that are known but not supported."""
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "stream": (False,),
    "output_mode": ("tokens",),
    "priority": (0,),
    "features": (),
    "content_parts": ([],),
}


class TokenSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """`sampling_params` of a request."""

    n: Positive | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=STOPS_LIMIT)] | None = (
        None
    )
    stop_token_ids: Annotated[list[int], Meta(max_length=STOP_IDS_LIMIT)] | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None
    """Of a mixture of experts whose routing is returned; this server returns none."""
    ignore_eos: Any = None
    min_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    prompt_logprobs: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Body of `/inference/v1/generate`."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    """Keeps prefixes of several users apart; no answer of this server depends on it."""
    return_token_ids: bool | None = None
    stream: Any = None
    output_mode: Any = None
    priority: Any = None
    features: Any = None
    content_parts: Any = None


_requests: Final = msgspec.json.Decoder(TokenRequest)


def token_request(body: bytes) -> TokenRequest:
    """Decode the body of `/inference/v1/generate`. Raises `ApiError`."""
    try:
        request = _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"invalid request: {error}") from None
    sampling = request.sampling_params
    refuse_unsupported(request, _NEUTRAL)
    refuse_unsupported(sampling, _NEUTRAL_SAMPLING, f"{_SAMPLING}.")
    if (sampling.n or 1) != 1:
        raise ApiError(400, f"{_SAMPLING}.n: must be 1 (got {sampling.n}); send a request for each answer")
    if (sampling.logprobs or 0) > 1:
        why = f"must be 0 or 1 (got {sampling.logprobs}); only sampled tokens have one"
        raise ApiError(400, f"{_SAMPLING}.logprobs: {why}")
    if sampling.temperature is not None and not isfinite(sampling.temperature):
        raise ApiError(400, f"{_SAMPLING}.temperature: must be finite")
    return request


def token_job(request: TokenRequest, limits: Limits) -> Job:
    """Return the job of a request. Raises `ApiError` for requests beyond the limits."""
    check_model(request.model, limits)
    prompt = request.token_ids
    _check_ids("token_ids", prompt, limits)
    _check_ids(f"{_SAMPLING}.stop_token_ids", request.sampling_params.stop_token_ids or [], limits)
    room = limits.positions - len(prompt)
    if room < 1:
        raise ApiError(
            400,
            f"the context has {limits.positions} tokens; the prompt has {len(prompt)}, which leaves none for an "
            "answer",
            "context_length_exceeded",
        )
    return Job([prompt], _sampling(request.sampling_params, room))


def _check_ids(key: str, ids: list[int], limits: Limits) -> None:
    if ids and (min(ids) < 0 or max(ids) >= limits.vocabulary):
        raise ApiError(400, f"{key}: token ids must be from 0 to {limits.vocabulary - 1}")


def _sampling(asked: TokenSampling, room: int) -> Sampling:
    stop = asked.stop or ()
    return Sampling(
        max_tokens=min(asked.max_tokens or room, room),
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=tuple(asked.stop_token_ids or ()),
        seed=asked.seed,
    )
