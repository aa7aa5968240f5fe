"""The OpenAI dialect as vLLM speaks it: bodies of requests, and answers to `Completion`s. Pure.

What is asked for beyond OpenAI's own: `return_token_ids`, since what is trained on must be the very tokens that were
sampled, and never text that was tokenised again. What may come beyond it: `weight_versions`, spans of the sampled
tokens with the policy version that sampled each. A server that does not tell is given the version known here. So is one
that does not tell at which `temperature` it sampled; a trainer has to score the tokens at the same one. Of a nucleus
(`top_p`) no trainer knows which tokens were in it, and such answers are refused.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.services.worker.policy import ChatMessage, Completion

BASE: Final = "/v1"
COMPLETIONS: Final = f"{BASE}/completions"
CHAT: Final = f"{BASE}/chat/completions"
MODELS: Final = f"{BASE}/models"

BEYOND: Final = {"return_token_ids": True}
"""What is asked for beyond OpenAI's own."""


class _Version(msgspec.Struct, gc=False):
    incarnation: int = 0
    step: int = 0


class _Span(msgspec.Struct, gc=False):
    start: int
    end: int
    version: _Version | int | str


class _Listed(msgspec.Struct):
    """Log-probabilities of `/v1/completions`."""

    token_logprobs: list[float]
    tokens: list[str] | None = None


class _Token(msgspec.Struct, gc=False):
    logprob: float
    token: str = ""


class _ByToken(msgspec.Struct):
    """Log-probabilities of `/v1/chat/completions`."""

    content: list[_Token]


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None
    temperature: float | None = None
    top_p: float | None = None


class _TextChoice(_Choice):
    text: str = ""
    logprobs: _Listed | None = None


class _ChatChoice(_Choice):
    message: _Message = _Message()
    logprobs: _ByToken | None = None


class _TextAnswer(msgspec.Struct):
    choices: list[_TextChoice]


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice]
    prompt_token_ids: list[int] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_text: Final = msgspec.json.Decoder(_TextAnswer)
_chat: Final = msgspec.json.Decoder(_ChatAnswer)
_error: Final = msgspec.json.Decoder(_ErrorAnswer)
_models: Final = msgspec.json.Decoder(_Models)
_encode: Final = msgspec.json.Encoder().encode


def text_request(model: str, prompt: str | Sequence[int], **sampling: Any) -> bytes:
    """Encode the body of `/v1/completions`."""
    given = prompt if isinstance(prompt, str) else list(prompt)
    return _encode({"model": model, "prompt": given, "logprobs": 0, **BEYOND, **sampling})


def chat_request(model: str, messages: Sequence[ChatMessage], **sampling: Any) -> bytes:
    """Encode the body of `/v1/chat/completions`."""
    return _encode({"model": model, "messages": list(messages), "logprobs": True, **BEYOND, **sampling})


def text_completions(
    body: bytes, known: tuple[PolicyVersion, PolicyVersion], temperature: float = 1.0
) -> list[Completion]:
    """Decode the answer of `/v1/completions`.

    Args:
        body: JSON.
        known: Policy versions before and after the call, for a server that does not tell.
        temperature: That was asked for, for a server that does not tell.

    Raises:
        PolicyRefusedError: The answer lacks what training needs.
    """
    try:
        answer = _text.decode(body)
    except msgspec.MsgspecError as error:
        raise PolicyRefusedError(200, f"its answer is not of the dialect: {error}") from None
    return [
        _completion(
            choice,
            choice.text,
            choice.prompt_token_ids,
            choice.logprobs.token_logprobs if choice.logprobs else None,
            (choice.logprobs.tokens if choice.logprobs else None) or [],
            known,
            temperature,
        )
        for choice in answer.choices
    ]


def chat_completions(
    answered: Any, known: tuple[PolicyVersion, PolicyVersion], temperature: float = 1.0
) -> list[Completion]:
    """Decode the answer of `/v1/chat/completions`, see `text_completions`; or take what a client decoded, as it is."""
    try:
        if isinstance(answered, bytes):
            answer = _chat.decode(answered)
        else:
            answer = msgspec.convert(answered, _ChatAnswer, from_attributes=True)
    except msgspec.MsgspecError as error:
        raise PolicyRefusedError(200, f"its answer is not of the dialect: {error}") from None
    return [
        _completion(
            choice,
            choice.message.content or "",
            choice.prompt_token_ids or answer.prompt_token_ids,
            [token.logprob for token in choice.logprobs.content] if choice.logprobs else None,
            [token.token for token in choice.logprobs.content] if choice.logprobs else [],
            known,
            temperature,
        )
        for choice in answer.choices
    ]


def error_text(body: bytes) -> str:
    """Return what an error answer says, whatever its form, in one line."""
    try:
        return " ".join(_error.decode(body).error.message.split())
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return " ".join(body[:200].decode(errors="replace").split())


def error_code(body: bytes) -> str:
    """Return what an error answer calls the error; empty if it does not say."""
    try:
        return str(_error.decode(body).error.code or "")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def first_model(body: bytes) -> str:
    """Return the model that a server names first."""
    try:
        return _models.decode(body).data[0].id
    except (msgspec.MsgspecError, IndexError):
        raise PolicyRefusedError(200, f"{MODELS} names no model") from None


def _completion(
    choice: _Choice,
    text: str,
    prompt_token_ids: list[int] | None,
    logprobs: list[float] | None,
    tokens: list[str],
    known: tuple[PolicyVersion, PolicyVersion],
    temperature: float,
) -> Completion:
    if choice.token_ids is None or prompt_token_ids is None:
        raise PolicyRefusedError(200, "its answer has no token ids: it must know `return_token_ids`")
    if logprobs is None or len(logprobs) != len(choice.token_ids):
        raise PolicyRefusedError(200, "its answer has not one log-probability for each token")
    if choice.top_p is not None and choice.top_p < 1:
        why = "its log-probabilities are of the nucleus alone, which no trainer can compute; leave top_p at 1"
        raise PolicyRefusedError(200, f"it sampled with top_p {choice.top_p:g}: {why}")
    oldest, newest = _versions(choice.weight_versions, known)
    return Completion(
        text,
        prompt_token_ids,
        choice.token_ids,
        logprobs,
        oldest,
        newest,
        choice.finish_reason or "",
        tokens,
        (temperature if choice.temperature is None else choice.temperature) or 1.0,
    )


def _versions(
    spans: list[_Span] | None, known: tuple[PolicyVersion, PolicyVersion]
) -> tuple[PolicyVersion, PolicyVersion]:
    if not spans:
        return known
    found = [version for span in spans if (version := _version(span.version)) is not None]
    return (min(found), max(found)) if found else known


def _version(told: _Version | int | str) -> PolicyVersion | None:
    """Read a version; a label that is no number, as other trainers may set, tells nothing."""
    if isinstance(told, _Version):
        return PolicyVersion(told.incarnation, told.step)
    if isinstance(told, int):
        return PolicyVersion(0, told)
    return PolicyVersion(0, int(told)) if told.isdecimal() else None
