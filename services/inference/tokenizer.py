"""Tokenizer of a served model: text to token ids and back, from the files that the trainer left in `model/`."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rolloutmq.schemas.errors import MissingError
from rolloutmq.services.inference.openai.requests import ApiError

UNKNOWN_SHOWN: Final = 10
"""Most unknown characters that an error names."""
PROMPT_SHOWN: Final = 60
"""Longest part of a prompt that an error shows, in characters."""


class TextTokenizer:
    """One tokenizer. Loading reads files; every other method is fast enough for an event loop.

    Raises:
        MissingError: The directory has no `tokenizer.json`.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise MissingError(
                str(path),
                "the trainer writes it for a built-in model; put one into the directory of your own",
            )
        self._tokenizer: Any = Tokenizer.from_file(str(path))
        self.directory = directory
        self._tokens: dict[int, str] = {}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a prompt, by default with the special tokens in front. Raises `ApiError`."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            unknown = [each for each in self._characters(text) if self._tokenizer.token_to_id(each) is None]
            named = ", ".join(map(repr, unknown[:UNKNOWN_SHOWN])) or str(error)
            shown = text if len(text) <= PROMPT_SHOWN else f"{text[:PROMPT_SHOWN]}…"
            why = "add the characters of the prompt to model.alphabet, all that a built-in model knows"
            raise ApiError(400, f"prompt {shown!r}: not in the vocabulary ({named}); {why}") from None
        return ids

    def _characters(self, text: str) -> list[str]:
        """Return the characters of a text, each once, without those of special tokens, which a template writes."""
        for special in self._tokenizer.get_added_tokens_decoder().values():
            text = text.replace(special.content, "")
        return list(dict.fromkeys(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, by the chat template or joined if there is none. Raises
        `ApiError`.
        """
        if not self._chat.chat_template:
            return self.encode("".join(map(_content, messages)))
        return self.render(messages)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation by the chat template. Raises `ApiError`."""
        if not self._chat.chat_template:
            raise ApiError(
                400,
                "messages: the tokenizer has no chat template to render them by; add `chat_template` to its "
                "tokenizer_config.json, or continue with text",
            )
        flat = [{**message, "content": _content(message)} for message in messages]
        try:
            text = self._chat.apply_chat_template(
                flat, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything
            raise ApiError(400, f"messages: the chat template failed: {error}") from None
        return self.encode(text, special=False)

    @cached_property
    def _chat(self) -> Any:
        return PreTrainedTokenizerFast.from_pretrained(self.directory, local_files_only=True)

    def warm_up(self) -> None:
        """Load the chat template before the first conversation."""
        self._chat.chat_template  # noqa: B018

    def decode(self, ids: list[int]) -> str:
        """Return the text of sampled tokens, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token(self, token: int) -> str:
        """Return the text of one token in the vocabulary; empty for an embedding row without a token."""
        found = self._tokens.get(token)
        if found is None:
            found = self._tokens[token] = self._tokenizer.id_to_token(token) or ""
        return found


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    raise ApiError(400, "messages: content must be a string, or a list of parts of type text")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
