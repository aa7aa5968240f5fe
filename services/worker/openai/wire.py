"""OpenAI's HTTP interface with vLLM's extensions: request bodies, responses as `Completion`s, and `Endpoint`.
Pure.

Requests ask for `return_token_ids`: training needs the sampled tokens, never text that was tokenized again. Servers of
a run also return `weight_versions`: spans of the sampled tokens, each with its policy version. If a response has no
versions, or no `temperature`, the values known to the client apply. Responses with `top_p` below 1 are refused: the
trainer cannot know which tokens were in the nucleus.

`Endpoint` is for environments with a client of their own, such as OpenAI's. The client handles tools, streams and
retries; pass `Endpoint.request` to each call and read the response with `Endpoint.completions`. Open one endpoint for
each conversation: if the server reports no policy version, the completion may be from any version since the endpoint
was opened.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.completion import ChatMessage, Completion, TokenIds
from rolloutmq.services.worker.openai import wire

if TYPE_CHECKING:  # an environment needs no socket
    import ssl

BASE: Final = "/v1"

COMPLETIONS: Final = f"{BASE}/completions"

CHAT: Final = f"{BASE}/chat/completions"

MODELS: Final = f"{BASE}/models"

TOKENIZE: Final = "/tokenize"

DETOKENIZE: Final = "/detokenize"


BEYOND: Final = {"return_token_ids": True}
"""Request fields that are not OpenAI's own."""


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


class _Tokens(msgspec.Struct):
    """Answer of `/tokenize`."""

    tokens: list[int]


class _Text(msgspec.Struct):
    """Answer of `/detokenize`."""

    prompt: str


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error


class Model(msgspec.Struct, frozen=True):
    """A model that a server lists.

    Attributes:
        id: Its name in requests.
        root: Directory or hub name that the server loaded it from; empty if it does not say.
    """

    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[Model]


_text: Final = msgspec.json.Decoder(_TextAnswer)

_chat: Final = msgspec.json.Decoder(_ChatAnswer)

_tokens: Final = msgspec.json.Decoder(_Tokens)

_detokenized: Final = msgspec.json.Decoder(_Text)

_error: Final = msgspec.json.Decoder(_ErrorAnswer)

_models: Final = msgspec.json.Decoder(_Models)

_encode: Final = msgspec.json.Encoder().encode


def text_request(model: str, prompt: str | TokenIds, **sampling: Any) -> bytes:
    """Encode the body of `/v1/completions`."""
    given = prompt if isinstance(prompt, str) else list(map(int, prompt))
    return _encode({"model": model, "prompt": given, "logprobs": 0, **BEYOND, **sampling})


def chat_request(model: str, messages: Sequence[ChatMessage], **sampling: Any) -> bytes:
    """Encode the body of `/v1/chat/completions`."""
    return _encode({"model": model, "messages": list(messages), "logprobs": True, **BEYOND, **sampling})


def tokenize_request(model: str, text: str) -> bytes:
    """Encode the body of `/tokenize` for a text, without special tokens."""
    return _encode({"model": model, "prompt": text, "add_special_tokens": False})


def render_request(
    model: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
) -> bytes:
    """Encode the body of `/tokenize` for a conversation and the beginning of its next answer."""
    asked = {"model": model, "messages": list(messages), "add_generation_prompt": True}
    return _encode(asked | {"tools": list(tools)} if tools else asked)


def detokenize_request(model: str, tokens: TokenIds) -> bytes:
    """Encode the body of `/detokenize`."""
    return _encode({"model": model, "tokens": list(map(int, tokens))})


def tokens_of(body: bytes) -> list[int]:
    """Decode a response of `/tokenize`. Raises PolicyRefusedError."""
    try:
        return _tokens.decode(body).tokens
    except msgspec.MsgspecError as error:
        raise PolicyRefusedError(200, f"malformed response of {TOKENIZE}: {error}") from None


def text_of(body: bytes) -> str:
    """Decode a response of `/detokenize`. Raises PolicyRefusedError."""
    try:
        return _detokenized.decode(body).prompt
    except msgspec.MsgspecError as error:
        raise PolicyRefusedError(200, f"malformed response of {DETOKENIZE}: {error}") from None


def text_completions(
    body: bytes, known: tuple[PolicyVersion, PolicyVersion], temperature: float = 1.0
) -> list[Completion]:
    """Decode a response of `/v1/completions`.

    Args:
        body: JSON.
        known: Policy versions before and after the call, for servers that report none.
        temperature: Requested temperature, for servers that report none.

    Raises:
        PolicyRefusedError: The response lacks what training needs.
    """
    try:
        answer = _text.decode(body)
    except msgspec.MsgspecError as error:
        raise PolicyRefusedError(200, f"malformed response from the inference server: {error}") from None
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
    """Decode a response of `/v1/chat/completions`: JSON, or the object of a client. See `text_completions`."""
    try:
        if isinstance(answered, bytes):
            answer = _chat.decode(answered)
        else:
            answer = msgspec.convert(answered, _ChatAnswer, from_attributes=True)
    except msgspec.MsgspecError as error:
        raise PolicyRefusedError(200, f"malformed response from the inference server: {error}") from None
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


def without_tokenizer(path: str) -> str:
    """Return what to say of a server that has no such path."""
    return (
        f"the server has no {path}; use one that has it, such as vLLM, or token ids of a tokenizer of your own: "
        "policy.complete(ids, after=trajectory)"
    )


def lacks_model(body: bytes) -> bool:
    """Return whether an error response is about the model of the request, and not about the path."""
    return error_code(body) == "model_not_found" or "model" in error_text(body).lower()


def error_text(body: bytes) -> str:
    """Return the message of an error response in one line; of a body in another format its first 200 bytes."""
    try:
        return " ".join(_error.decode(body).error.message.split())
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return " ".join(body[:200].decode(errors="replace").split())


def error_code(body: bytes) -> str:
    """Return the code of an error response, or an empty string."""
    try:
        return str(_error.decode(body).error.code or "")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def first_model(body: bytes) -> Model:
    """Return the first model that a server lists."""
    try:
        return _models.decode(body).data[0]
    except (msgspec.MsgspecError, IndexError):
        raise PolicyRefusedError(
            200, f"{MODELS} lists no model; check that the server has loaded one"
        ) from None


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
        raise PolicyRefusedError(
            200, "no token ids in the response; use a server that supports `return_token_ids`"
        )
    if logprobs is None or len(logprobs) != len(choice.token_ids):
        found = len(logprobs or ())
        why = f"{found} log-probabilities for {len(choice.token_ids)} tokens in the response; each token needs one"
        raise PolicyRefusedError(200, why)
    if choice.top_p is not None and choice.top_p < 1:
        why = "its log-probabilities cover the nucleus alone, which no trainer can compute; leave top_p at 1"
        raise PolicyRefusedError(200, f"the server sampled with top_p {choice.top_p:g}: {why}")
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


def _version(label: _Version | int | str) -> PolicyVersion | None:
    """Parse a version. Labels that are not numbers, as other trainers may set, yield None."""
    if isinstance(label, _Version):
        return PolicyVersion(label.incarnation, label.step)
    if isinstance(label, int):
        return PolicyVersion(0, label)
    return PolicyVersion(0, int(label)) if label.isdecimal() else None


def _ignored(_: list[Completion]) -> None:
    """Do nothing with completions."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server, for one conversation. Made by `Policy.endpoint`.

    Attributes:
        base_url: Address for OpenAI's client, ends in `/v1`.
        model: Model name to request.
        oldest: Policy version known when the endpoint was opened.
        newest: Returns the newest policy version known now.
        greedy: The task asks for the most likely tokens: `request` has temperature 0.
        root: Directory or hub name of the model, for a client with a tokenizer of its own; empty if the server does
            not say.
        heard: Called with the completions of each response.
        tls: What a client of yours must trust if the run has an authority of its own, such as
            `httpx.AsyncClient(verify=endpoint.tls)`; None for the authorities of the system.
    """

    base_url: str
    model: str
    oldest: PolicyVersion = PolicyVersion()
    newest: Callable[[], PolicyVersion] = PolicyVersion
    greedy: bool = False
    root: str = ""
    heard: Callable[[list[Completion]], None] = _ignored
    tls: "ssl.SSLContext | None" = None

    @property
    def request(self) -> Mapping[str, Any]:
        """Keyword arguments for every `chat.completions.create` of OpenAI's client."""
        asked = {"model": self.model, "logprobs": True, "extra_body": wire.BEYOND}
        return asked | {"temperature": 0.0} if self.greedy else asked

    def completions(self, answer: Any, temperature: float = 1.0) -> list[Completion]:
        """Return a `Completion` for each choice of a response.

        Args:
            answer: A `ChatCompletion` of the client, its dictionary, or its JSON in bytes.
            temperature: Requested temperature. Servers of a run report it themselves, and their value wins.

        Raises:
            PolicyRefusedError: The response lacks what training needs.
        """
        known = self.oldest, max(self.oldest, self.newest())
        completions = wire.chat_completions(answer, known, temperature)
        self.heard(completions)
        return completions
