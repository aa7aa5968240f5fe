"""Stitching of turns: the tokens of new messages behind tokens that were sampled, which are never tokenized again.

A chat template renders whole conversations, and would render the sampled answer from its text: with other tokens,
stripped, or without its thoughts. So the new messages are rendered behind a stand-in for the answer, and only what
follows the stand-in is used:

    rendered   <user> x <end> <assistant> x <end> <tool> 4 <end> <assistant>
    rendered   <user> x <end> <assistant> y <end> <tool> 4 <end> <assistant>
    common                                  <end> <tool> 4 <end> <assistant>

Two renderings with different stand-ins have the same tokens from the end of the stand-in on, whatever the template does
to earlier messages. If the tokenizer has merged the end of the stand-in with what follows, the common text is tokenized
by itself. Tokens that the policy has sampled already, such as the end of its turn, are left out.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, Protocol

from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.services.worker.completion import ChatMessage, TokenIds

STAND_INS: Final = "xy01abAB"
"""Characters to try as stand-ins. A small vocabulary may lack some."""


class Tokenizer(Protocol):
    """The tokenizer of a policy."""

    async def tokenize(self, text: str) -> list[int]:
        """See `Policy.tokenize`."""
        ...

    async def detokenize(self, tokens: TokenIds) -> str:
        """See `Policy.detokenize`."""
        ...

    async def rendered(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Return the tokens of a conversation by the chat template."""
        ...


class Stitcher:
    """Finds the tokens of new messages behind sampled ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stand_ins: tuple[str, str] | None = None
        self._header: list[int] | None = None
        self._texts: dict[int, str] = {}

    async def following(
        self,
        tokens: Sequence[int],
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the tokens that follow sampled ones: the end of the answer, the messages, the next generation prompt.

        Args:
            tokens: A conversation so far, which ends with a sampled answer, whole or cut by a limit.
            messages: What was said since.
            tools: Definitions of tools for the chat template.

        Raises:
            PolicyRefusedError: The server does not render the messages, or the template does not keep the answers.
        """
        stand_ins = self._stand_ins = self._stand_ins or await self._chosen(messages)
        if self._header is None:
            questions = [[{"role": "user", "content": each}] for each in stand_ins]
            one, two = await asyncio.gather(*(self._behind_answer(each, None) for each in questions))
            self._header = one[: common_start(one, two)]
        new = await self._behind_answer(messages, tools)
        sampled = await self._sampled_already(tokens, new[: common_start(new, self._header)])
        return new[sampled:]

    async def _behind_answer(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Return the tokens behind a stand-in: the end of its turn, the messages, the generation prompt."""
        assert self._stand_ins
        first, second = self._stand_ins
        question = {"role": "user", "content": first}  # many templates ask for one
        answers = [{"role": "assistant", "content": each} for each in (first, second)]
        one, two = await asyncio.gather(
            *(self._tokenizer.rendered([question, each, *messages], tools) for each in answers)
        )
        common = common_end(one, two)
        if await self._ends_at(one, common, first) and await self._ends_at(two, common, second):
            return one[len(one) - common :]
        return await self._by_text(one, two, first)

    async def _chosen(self, messages: Sequence[ChatMessage]) -> tuple[str, str]:
        """Return two characters of the vocabulary."""
        said = "".join(one["content"] for one in messages if isinstance(one.get("content"), str))
        found: list[str] = []
        for each in dict.fromkeys([*STAND_INS, *filter(str.isalnum, said)]):
            try:
                text = await self._tokenizer.detokenize(await self._tokenizer.tokenize(each))
            except PolicyRefusedError as error:
                if error.status != 400:
                    raise
                continue  # the vocabulary lacks it
            found += [each] if text.strip() == each else []
            if len(found) == 2:
                return found[0], found[1]
        raise PolicyRefusedError(
            200,
            f"the vocabulary has no two characters of {STAND_INS!r} to render new messages behind; continue with "
            "text: policy.complete(text, after=trajectory)",
        )

    async def _ends_at(self, rendered: Sequence[int], common: int, stand_in: str) -> bool:
        """Return whether the last token before the common ones ends with the stand-in, so that none is merged."""
        if common >= len(rendered):
            return False
        last = rendered[len(rendered) - common - 1]
        if last not in self._texts:
            self._texts[last] = await self._tokenizer.detokenize([last])
        return self._texts[last].endswith(stand_in)

    async def _by_text(self, one: Sequence[int], two: Sequence[int], stand_in: str) -> list[int]:
        """Return the tokens of the text behind the stand-in."""
        texts = await asyncio.gather(*(self._tokenizer.detokenize(each) for each in (one, two)))
        before, new = split_end(*texts)
        if not before.endswith(stand_in):
            raise PolicyRefusedError(
                200,
                "the chat template leaves out the last answer of the policy, so no message can follow it; use another "
                "template, or continue with text: policy.complete(text, after=trajectory)",
            )
        return await self._tokenizer.tokenize(new)

    async def _sampled_already(self, tokens: Sequence[int], header: Sequence[int]) -> int:
        """Return how many tokens of the template, which ends the answer by them, the policy has sampled."""
        if overlap := overlap_of(tokens, header):
            return overlap
        last = int(tokens[-1]) if len(tokens) else -1
        if last in header:  # a template may put white space before the end, which the policy need not sample
            place = header.index(last)
            if not (await self._tokenizer.detokenize(header[:place])).strip():
                return place + 1
        return 0


def common_start(one: Sequence[int], two: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def common_end(one: Sequence[int], two: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their ends."""
    pairs = zip(reversed(one), reversed(two), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def split_end(one: str, two: str) -> tuple[str, str]:
    """Split a text before the end that it has in common with another."""
    pairs = zip(reversed(one), reversed(two), strict=False)
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return one[: len(one) - size], one[len(one) - size :]


def overlap_of(tokens: Sequence[int], following: Sequence[int]) -> int:
    """Return the longest number of tokens that the one ends with and the other begins with."""
    most = min(len(tokens), len(following))
    sizes = range(most, 0, -1)
    return next((size for size in sizes if list(tokens[-size:]) == list(following[:size])), 0)
