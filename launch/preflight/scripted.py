"""Answers for the rollouts of a trial, which has no model.

A built model samples from the characters of its alphabet, so random ones of these are as good as its own, with its own
token ids. What another model would answer is not known: it gets a few texts of different forms.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.services.worker.completion import MAX_TOKENS, ChatMessage, Completion, TokenIds
from rolloutmq.services.worker.scripted import END, Answer, RecordedCall, ScriptedPolicy
from rolloutmq.services.worker.trajectory import Trajectory, check_messages, tokens_so_far

TEXTS: Final = (
    "42",
    "",
    "The answer is 42.",
    "<think>\nTwo and two.\n</think>\n<answer>4</answer>",
    '{"answer": 4}',
    "\\boxed{4}",
)
"""Answers of a model whose vocabulary is not known here."""
SPECIAL: Final = ("<pad>", "<bos>", "<eos>")
"""Texts that a built model reads as one token each; their ids are 0, 1 and 2."""
ANSWERS: Final = 64
PROMPT_SHOWN: Final = 60
"""Longest part of a prompt that an error shows, in characters."""


def is_built(config: RunConfig) -> bool:
    """Return whether the policy of a run has the characters of `model.alphabet`."""
    return not config.model.path and config.inference.kind in {"tiny", "vllm"}


def scripted_policy(config: RunConfig) -> ScriptedPolicy:
    """Return a policy that answers as that of a run might."""
    if not is_built(config):
        return ScriptedPolicy(TEXTS)
    return CharacterPolicy(config.model.alphabet, config.model.max_positions)


def texts_of(prompt: Any) -> Iterator[str]:
    """Yield the texts of a prompt: none of token ids."""
    if isinstance(prompt, str):
        yield prompt
        return
    for message in prompt:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
        texts = (part.get("text") for part in parts if isinstance(part, dict))
        yield from (text for text in texts if isinstance(text, str))


class ContextError(PolicyRefusedError):
    """A prompt and its answer do not fit into the context of a built model.

    Attributes:
        needed: Tokens of both.
        problem: What does not fit.
    """

    def __init__(self, positions: int, prompt: int, max_tokens: int) -> None:
        self.needed = prompt + max_tokens
        self.problem = f"the prompt has {prompt} tokens and max_tokens is {max_tokens}"
        super().__init__(400, f"the context has {positions} tokens; {self.problem}")


class CharacterPolicy(ScriptedPolicy):
    """Random answers of the characters of an alphabet, with the token ids of a built model.

    Args:
        alphabet: `model.alphabet`.
        positions: `model.max_positions`, the context in tokens.
    """

    def __init__(self, alphabet: str, positions: int = ModelConfig.default().max_positions) -> None:
        self._positions = positions
        rng = random.Random("answers")
        # Some end by themselves, others by the limit; each third one ends early, also within a small limit.
        most = [3 if number % 3 == 0 else 3 * MAX_TOKENS // 2 for number in range(ANSWERS)]
        super().__init__(["".join(rng.choices(alphabet, k=rng.randrange(each))) for each in most])
        self._texts = tuple(dict.fromkeys((*SPECIAL, *alphabet)))
        self._ids = {text: number for number, text in enumerate(self._texts)}

    async def complete(
        self,
        prompt: str | TokenIds,
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `ScriptedPolicy.complete`.

        Raises:
            PolicyRefusedError: The model lacks a character of the prompt.
            ContextError: The prompt and `max_tokens` are longer than the context.
        """
        if isinstance(prompt, str) and after is None:
            prompt = [self._ids["<bos>"], *await self.tokenize(prompt)]
        return await super().complete(
            prompt, after=after, n=n, max_tokens=max_tokens, temperature=temperature, stop=stop
        )

    async def tokenize(self, text: str) -> list[int]:
        """See `Policy.tokenize`. Raises PolicyRefusedError for a character that the model lacks."""
        left, ids = text, []
        while left:
            token = next((one for one in SPECIAL if left.startswith(one)), left[0])
            if token not in self._ids:
                why = "add the characters of the prompt to model.alphabet, all that a built-in model knows"
                shown = text if len(text) <= PROMPT_SHOWN else f"{text[:PROMPT_SHOWN]}…"
                raise PolicyRefusedError(400, f"prompt {shown!r}: not in the vocabulary ({token!r}); {why}")
            ids.append(self._ids[token])
            left = left[len(token) :]
        return ids

    async def detokenize(self, tokens: TokenIds) -> str:
        """See `Policy.detokenize`. Raises PolicyRefusedError for tokens that the model lacks."""
        if not len(tokens) or min(tokens) < 0 or max(tokens) >= len(self._texts):
            raise PolicyRefusedError(400, f"prompt: token ids must be from 0 to {len(self._texts) - 1}")
        return "".join(self._texts[one] for one in tokens)

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002 - its template knows none
        after: Trajectory | None = None,
    ) -> list[int]:
        """See `Policy.render`. The template of a built model joins the contents.

        Raises:
            PolicyRefusedError: A content is none that the server of a built model takes, or the model lacks a
                character.
        """
        check_messages(messages, after)
        before = [self._ids["<bos>"]] if after is None else tokens_so_far(after)
        return before + await self.tokenize("".join(map(_content, messages)))

    async def _sampled(
        self,
        ids: Sequence[int],
        messages: Sequence[ChatMessage] | None,
        n: int,
        max_tokens: int,
        temperature: float,
        stop: str | Sequence[str] | None,
    ) -> list[Completion]:
        if len(ids) + max_tokens > self._positions:
            raise ContextError(self._positions, len(ids), max_tokens)
        return await super()._sampled(ids, messages, n, max_tokens, temperature, stop)

    def _completion(self, call: RecordedCall, answer: Answer) -> Completion:
        completion = super()._completion(call, answer)
        sampled = [self._ids["<eos>" if one == END else chr(one)] for one in completion.token_ids]
        return replace(completion, token_ids=sampled, tokens=[self._texts[one] for one in sampled])


def _content(message: ChatMessage) -> str:
    """Return the content of a message; PolicyRefusedError, with the words of the tiny server, if it refuses it."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(parts, list) and all(_is_text(part) for part in parts):
        return "".join(part["text"] for part in parts)
    raise PolicyRefusedError(400, "messages: content must be a string, or a list of parts of type text")


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
