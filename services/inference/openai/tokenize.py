"""`/tokenize` and `/detokenize`, as vLLM has them: text, conversations and token ids into each other. Pure.

A text gets the special tokens in front that a prompt of text gets, unless `add_special_tokens` is false. A conversation
needs a chat template.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta

from rolloutmq.services.inference.openai.requests import ApiError, Limits, check_model
from rolloutmq.services.inference.openai.responses import encode


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    """None: yes for a prompt, no for messages, whose template writes them."""
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class Codec(Protocol):
    """The part of a tokenizer that these requests use. Its methods raise `ApiError`."""

    def encode(self, text: str, /, *, special: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        generation_prompt: bool,
        /,
    ) -> list[int]:
        """Return the token ids of a conversation."""
        ...

    def shown(self, ids: Sequence[int], /) -> str:
        """Return the text of tokens, special tokens included."""
        ...

    def token(self, token: int, /) -> str:
        """Return the text of one token in the vocabulary."""
        ...


_R = TypeVar("_R", TokenizeRequest, DetokenizeRequest)
_tokenize: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize: Final = msgspec.json.Decoder(DetokenizeRequest)


def tokenize_response(body: bytes, codec: Codec, limits: Limits) -> bytes:
    """Answer a request of `/tokenize`. Raises `ApiError`."""
    asked = _decoded(_tokenize, body)
    check_model(asked.model, limits)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "prompt, messages: one of them must be given, and only one")
    if asked.messages is None:
        ids = codec.encode(asked.prompt or "", special=asked.add_special_tokens is not False)
    elif asked.add_special_tokens:
        raise ApiError(400, "add_special_tokens: must be false for messages, whose template writes them")
    else:
        ids = codec.render(asked.messages, asked.tools, asked.add_generation_prompt)
    strings = list(map(codec.token, ids)) if asked.return_token_strs else None
    return encode(
        {"count": len(ids), "max_model_len": limits.positions, "tokens": ids, "token_strs": strings}
    )


def detokenize_response(body: bytes, codec: Codec, limits: Limits) -> bytes:
    """Answer a request of `/detokenize`. Raises `ApiError`."""
    asked = _decoded(_detokenize, body)
    check_model(asked.model, limits)
    if asked.tokens and not 0 <= min(asked.tokens) <= max(asked.tokens) < limits.vocabulary:
        raise ApiError(400, f"tokens: must be from 0 to {limits.vocabulary - 1}")
    return encode({"prompt": codec.shown(asked.tokens)})


def _decoded(decoder: "msgspec.json.Decoder[_R]", body: bytes) -> _R:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"invalid request: {error}") from None
