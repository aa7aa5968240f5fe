"""Scripted policy: tests an environment without a server or a model.

    def test_a_right_answer_scores_one():
        group = play(Double(), ScriptedPolicy(lambda prompt: str(2 * int(prompt))))
        assert list(group.scores) == [1.0] * 4

Tokens are the code points of the characters, followed by `END` if the answer is shorter than `max_tokens`. The
contents of messages are joined by newlines.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final, NoReturn

from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.completion import MAX_TOKENS, ChatMessage, Completion, TokenIds
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.trajectory import Trajectory, check_new, group_of

END: Final = 0
"""Token that ends an answer."""
LOGPROB: Final = -1.0
"""Log-probability of every sampled token; not 0, so that it differs from that of a prompt token."""

Script = str | Sequence[str] | Callable[[str], str]
"""One answer for every prompt, answers in turn, or a function of the prompt."""


class ScriptedPolicy:
    """A `Policy` that answers from a script.

    Attributes:
        prompts: Prompts so far, as text, with earlier turns.
        version: Policy version of every token; may be set.
    """

    def __init__(self, answers: Script, version: PolicyVersion = PolicyVersion()) -> None:
        self._answers = answers
        self._given = 0
        self.prompts: list[str] = []
        self.version = version

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """Return `n` scripted answers; see `Policy.complete`."""
        new = await self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        ids = new if after is None else [*map(int, after.token_ids), *new]
        text = await self.detokenize(ids)
        self.prompts.append(text)
        return [self._completion(ids, self._answer(text), max_tokens, stop, temperature) for _ in range(n)]

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """Return `n` scripted answers; see `Policy.chat`."""
        prompt = await self.render(messages, after=after)
        return await self.complete(prompt, n=n, max_tokens=max_tokens, temperature=temperature, stop=stop)

    async def tokenize(self, text: str) -> list[int]:
        """Return the code points of the characters; see `Policy.tokenize`."""
        return list(map(ord, text))

    async def detokenize(self, tokens: TokenIds) -> str:
        """Return the characters, without `END`; see `Policy.detokenize`."""
        return "".join(chr(token) for token in tokens if token != END)

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002 - a script needs no definitions
        after: Trajectory | None = None,
    ) -> list[int]:
        """Return the contents, joined by newlines; see `Policy.render`."""
        contents = [str(message["content"]) for message in messages]
        if after is None:
            return await self.tokenize("\n".join(contents))
        check_new(messages)
        return [*map(int, after.token_ids), *await self.tokenize("".join(f"\n{one}" for one in contents))]

    def endpoint(self) -> NoReturn:
        """Raise UsageError: a script has no address. Test the other methods of the environment instead."""
        raise UsageError("endpoint: a scripted policy has no server; call `complete` or `chat`")

    def _answer(self, prompt: str) -> str:
        if isinstance(self._answers, str):
            return self._answers
        if callable(self._answers):
            return self._answers(prompt)
        self._given += 1
        return self._answers[(self._given - 1) % len(self._answers)]

    def _completion(
        self,
        prompt: Sequence[int],
        answer: str,
        max_tokens: int,
        stop: str | Sequence[str] | None,
        temperature: float,
    ) -> Completion:
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        cut = min((at for text in stops if (at := answer.find(text)) >= 0), default=len(answer))
        text = answer[: min(cut, max_tokens)]
        ended = len(text) < max_tokens
        token_ids = [*map(ord, text), *([END] if ended else [])]
        return Completion(
            text=text,
            prompt_token_ids=list(prompt),
            token_ids=token_ids,
            logprobs=[LOGPROB] * len(token_ids),
            oldest=self.version,
            newest=self.version,
            finish_reason="stop" if ended else "length",
            tokens=[*text, *(["</s>"] if ended else [])],
            temperature=temperature or 1.0,
        )


def play(environment: Environment, policy: ScriptedPolicy, *, size: int = 4, seed: int = 0) -> Group:
    """Run one rollout and return the group that a worker would send. Blocks; not inside an event loop.

    Raises:
        InvalidGroupError: The trajectories cannot be sent.
    """
    return asyncio.run(_played(environment, policy, size, random.Random(seed)))


async def _played(environment: Environment, policy: ScriptedPolicy, size: int, rng: random.Random) -> Group:
    async with AsyncExitStack() as stack:
        if isinstance(environment, AbstractAsyncContextManager):
            await stack.enter_async_context(environment)
        return group_of("played/1", await environment.rollout(policy, size, rng))
