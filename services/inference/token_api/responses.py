"""Responses of `/inference/v1/generate`, encoded. Pure; see `requests` for the other direction.

A token of the log-probabilities is named as vLLM names one without a tokenizer, `token_id:5`, and has its `token_id`.
`weight_versions`, `temperature` and `top_p` are as in the responses of OpenAI's interface (`openai.responses`).
"""

from typing import Final

import msgspec

from rolloutmq.services.inference.jobs import Continuation, Job
from rolloutmq.services.inference.openai.responses import (
    Usage,
    VersionSpan,
    encode,
    reported_distribution,
    version_spans,
)
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.token_api.requests import TokenRequest

TOKEN: Final = "token_id:"
"""Beginning of the name of a token."""


class _Token(msgspec.Struct, gc=False):
    token: str
    token_id: int
    logprob: float
    top_logprobs: tuple[()] = ()


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token]


class _Choice(msgspec.Struct, kw_only=True, gc=False):
    index: int = 0
    token_ids: list[int]
    logprobs: _Logprobs | None
    finish_reason: str
    stop_reason: int | None
    weight_versions: list[VersionSpan]
    temperature: float | msgspec.UnsetType
    top_p: float | msgspec.UnsetType


class _Answer(msgspec.Struct, gc=False):
    request_id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: Usage
    prompt_token_ids: list[int] | None


def token_response(request: TokenRequest, job: Job, *, model: str, request_id: str, created: int) -> bytes:
    """Encode the response to a finished job."""
    (prompt,), (result,) = job.prompts, job.results
    sampled = len(result.token_ids)
    return encode(
        _Answer(
            request_id=f"generate-tokens-{request_id}",
            created=created,
            model=model,
            choices=[
                _choice(result, job.sampling, with_logprobs=request.sampling_params.logprobs is not None)
            ],
            usage=Usage(len(prompt), sampled, len(prompt) + sampled),
            prompt_token_ids=prompt if request.return_token_ids else None,
        )
    )


def _choice(result: Continuation, sampling: Sampling, *, with_logprobs: bool) -> _Choice:
    temperature, top_p = reported_distribution(sampling)
    last = result.token_ids[-1]
    return _Choice(
        token_ids=result.token_ids,
        logprobs=_logprobs(result) if with_logprobs else None,
        finish_reason="stop" if result.stopped else "length",
        stop_reason=last if result.stopped and last in sampling.stop_ids else None,
        weight_versions=version_spans(result),
        temperature=temperature,
        top_p=top_p,
    )


def _logprobs(result: Continuation) -> _Logprobs:
    pairs = zip(result.token_ids, result.logprobs, strict=True)
    return _Logprobs([_Token(f"{TOKEN}{token}", token, logprob) for token, logprob in pairs])
