"""Responses of OpenAI's interface with vLLM's extensions, encoded. Pure; see `requests` for the other direction.

Extensions: on request, the token ids of prompt and continuation, because training needs the sampled tokens; and always
`weight_versions`, spans of the sampled tokens with their policy versions. A choice also reports `temperature` if it is
not 1 and `top_p` if it is below 1, because its log-probabilities refer to that distribution.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Continuation, Job
from rolloutmq.services.inference.openai.requests import ChatRequest, TextRequest
from rolloutmq.services.inference.sampling import Sampling

encode: Final = msgspec.json.Encoder().encode


class _Version(msgspec.Struct, gc=False):
    incarnation: int
    step: int


class VersionSpan(msgspec.Struct, gc=False):
    """Tokens `start` to `end` of an answer, drawn from one version of the weights."""

    start: int
    end: int
    version: _Version


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float]
    tokens: list[str]


class _Token(msgspec.Struct, gc=False):
    token: str
    logprob: float
    top_logprobs: tuple[()] = ()
    """Never any, but OpenAI's own client refuses a response without the field."""


class _TokenLogprobs(msgspec.Struct, gc=False):
    content: list[_Token]


class _Message(msgspec.Struct, gc=False):
    content: str
    role: str = "assistant"


class _Choice(msgspec.Struct, kw_only=True, gc=False):
    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    message: _Message | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str
    logprobs: _Logprobs | _TokenLogprobs | None = None
    weight_versions: list[VersionSpan]
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    top_p: float | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, gc=False):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Answer(msgspec.Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: Usage


class ResponseTokens(Protocol):
    """The part of a tokenizer that responses use."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of sampled tokens, without special tokens."""
        ...

    def token(self, token: int, /) -> str:
        """Return the text of one token in the vocabulary."""
        ...


def completion_response(
    request: TextRequest | ChatRequest,
    job: Job,
    tokens: ResponseTokens,
    *,
    model: str,
    number: int,
    created: int,
) -> bytes:
    """Encode the response to a finished job."""
    chat = isinstance(request, ChatRequest)
    n = job.sampling.n
    choices = [
        _choice(request, index, job.prompts[index // n], result, job.sampling, tokens)
        for index, result in enumerate(job.results)
    ]
    prompt_tokens = sum(map(len, job.prompts))
    sampled = sum(len(result.token_ids) for result in job.results)
    return encode(
        _Answer(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            object="chat.completion" if chat else "text_completion",
            created=created,
            model=model,
            choices=choices,
            usage=Usage(prompt_tokens, sampled, prompt_tokens + sampled),
        )
    )


def _choice(
    request: TextRequest | ChatRequest,
    index: int,
    prompt: list[int],
    result: Continuation,
    sampling: Sampling,
    tokens: ResponseTokens,
) -> _Choice:
    text = cut(tokens.decode(result.token_ids), sampling.stop)
    ids = bool(request.return_token_ids)
    choice = _Choice(
        index=index,
        token_ids=result.token_ids if ids else None,
        prompt_token_ids=prompt if ids else None,
        finish_reason="stop" if result.stopped else "length",
        weight_versions=version_spans(result),
    )
    choice.temperature, choice.top_p = reported_distribution(sampling)
    if isinstance(request, TextRequest):
        choice.text = text
        if request.logprobs is not None:
            choice.logprobs = _Logprobs(result.logprobs, [tokens.token(token) for token in result.token_ids])
    else:
        choice.message = _Message(text)
        if request.logprobs:
            pairs = zip(result.token_ids, result.logprobs, strict=True)
            choice.logprobs = _TokenLogprobs([_Token(tokens.token(token), value) for token, value in pairs])
    return choice


def version_spans(result: Continuation) -> list[VersionSpan]:
    """Return the spans of an answer with their policy versions."""
    return [VersionSpan(span.start, span.end, _version(span.version)) for span in result.spans]


def reported_distribution(
    sampling: Sampling,
) -> tuple[float | msgspec.UnsetType, float | msgspec.UnsetType]:
    """Return temperature and nucleus that the log-probabilities refer to; unset where they change nothing."""
    temperature, top_p = sampling.reported_temperature, sampling.top_p
    return (
        msgspec.UNSET if temperature == 1 else temperature,
        top_p if sampling.temperature and top_p < 1 else msgspec.UNSET,
    )


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop text."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _version(version: PolicyVersion) -> _Version:
    return _Version(version.incarnation, version.step)


def health(status: str, version: PolicyVersion) -> bytes:
    """Encode the response of `/health`."""
    return encode({"status": status, "version": _version(version)})


def models(model: str, created: int, positions: int, root: str = "") -> bytes:
    """Encode the response of `/v1/models`. As in vLLM, `root` is the directory of the model."""
    served = {"id": model, "object": "model", "created": created, "owned_by": "rolloutmq"}
    return encode({"object": "list", "data": [{**served, "max_model_len": positions, "root": root or model}]})


def error_body(status: int, message: str, code: str) -> bytes:
    """Encode an error in OpenAI's format."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
