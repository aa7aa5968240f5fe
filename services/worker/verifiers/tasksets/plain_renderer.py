"""Renderer of a model whose chat template tells no roles, as the built-in one: messages are joined, as its server does.

A later turn extends the tokens of those before it. It is never rendered anew, so sampled tokens stay as they are.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from renderers import DefaultRendererConfig, ParsedResponse, RenderedTokens
from renderers.default import DefaultRenderer

_TEMPLATE: Final = "chat_template.jinja"
_SETTINGS: Final = "tokenizer_config.json"


class PlainRendererConfig(DefaultRendererConfig):  # type: ignore[misc]
    """Configuration of `PlainRenderer`, which has no settings."""


class PlainRenderer(DefaultRenderer):  # type: ignore[misc]
    """A renderer without roles. See the module."""

    config_class: ClassVar[type[PlainRendererConfig]] = PlainRendererConfig

    def _apply(self, messages: Sequence[Any], **_: Any) -> list[int]:
        return list(self._tokenizer.encode(_text(messages)))

    def parse_response(self, token_ids: list[int], **_: Any) -> ParsedResponse:
        """Return the text of sampled tokens, without special ones."""
        return ParsedResponse(content=self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        **_: Any,
    ) -> RenderedTokens:
        """Return the tokens of the turns before, and those of the new messages."""
        before = [*previous_prompt_ids, *previous_completion_ids]
        token_ids, indices = list(before), [-1] * len(before)
        for number, message in enumerate(new_messages):
            ids = self._tokenizer.encode(_text([message]), add_special_tokens=False)
            token_ids += ids
            indices += [number] * len(ids)
        roles = [str(message.get("role") or "") for message in new_messages]
        return RenderedTokens(token_ids=token_ids, message_indices=indices, message_roles=roles)


def _text(messages: Sequence[Any]) -> str:
    return "".join(_content(message.get("content")) for message in messages)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if part.get("type") == "text")


def tells_roles(model: Path) -> bool:
    """Return whether the chat template in a model's directory reads the roles of messages; without one it does not."""
    if (file := model / _TEMPLATE).is_file():
        return "role" in file.read_text()
    with suppress(OSError, ValueError):
        return "role" in json.dumps(json.loads((model / _SETTINGS).read_text()).get("chat_template"))
    return False
