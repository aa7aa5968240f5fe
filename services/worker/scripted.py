"""Scripted policy: tests an environment without a server or a model.

    def test_a_right_answer_scores_one():
        group = play(Double(), ScriptedPolicy(lambda prompt: str(2 * int(prompt))))
        assert list(group.scores) == [1.0] * 4

Tokens are the code points of the characters, followed by `END` if the answer is shorter than `max_tokens`. The
contents of messages are joined by newlines.
"""

import asyncio
import math
import operator
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.process.blocking_call import run_blocking
from rolloutmq.services.worker.completion import (
    MAX_TOKENS,
    ChatMessage,
    Completion,
    TokenIds,
    contents_of,
    is_stop,
)
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.trajectory import (
    Trajectory,
    check_messages,
    continued,
    group_of,
    tokens_so_far,
)
from rolloutmq.services.worker.user_code.methods import STOP, awaited

END: Final = 0
"""Token that ends an answer."""
LOGPROB: Final = -1.0
"""Log-probability of every sampled token; not 0, so that it differs from that of a prompt token."""
SHOWN_CHARS: Final = 80
"""Longest part of a prompt that an error shows."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer, where a text is not enough.

    Attributes:
        text: The answer, without special tokens.
        token_ids: The sampled tokens, whatever the text, `max_tokens` and `stop` say. None: those of the text.
        logprobs: Log-probability of each sampled token, in nats. None: `LOGPROB` for all.
        truncated: The answer ends by `max_tokens`, without an end token, however short it is.
        delay_s: Seconds until it arrives; `math.inf`: never.

    Raises:
        UsageError: The text is none, a token is no code point, or the delay is no number of at least 0.
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    truncated: bool = False
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise UsageError(
                f"Answer.text: must be a text (got {_shown(self.text)}); write str(...) around it"
            )
        if self.token_ids is not None:
            _check_tokens("Answer.token_ids", self.token_ids)
        if not isinstance(self.delay_s, int | float) or not self.delay_s >= 0:  # also NaN
            raise UsageError(
                f"Answer.delay_s: must be 0 or more seconds (got {_shown(self.delay_s)}); math.inf is never"
            )


Scripted: TypeAlias = str | Answer | Exception
"""A text, an answer, or an error that the call raises."""
Script: TypeAlias = (
    Scripted
    | Sequence[Scripted]
    | Mapping[str, Scripted | Callable[[re.Match[str]], Scripted]]
    | Callable[[str], Scripted]
)
"""One answer for every prompt, answers in turn, answers by the first regular expression that is found in the prompt, or
a function of the prompt. An answer by a regular expression may be a function of its match."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a scripted policy, as the environment made it.

    Attributes:
        prompt: The prompt as text, with earlier turns; messages are joined by newlines.
        token_ids: The tokens of the prompt: of earlier turns as sampled, then as given or those of the text.
        messages: The messages; None for `complete`.
        n: Number of completions.
        max_tokens: Longest completion, in tokens.
        temperature: Sampling temperature.
        stop: Texts that end a completion.
    """

    prompt: str
    token_ids: Sequence[int]
    messages: Sequence[ChatMessage] | None
    n: int
    max_tokens: int
    temperature: float
    stop: Sequence[str]


class NoServerError(UsageError):
    """A scripted policy has no address. Test the other methods of the environment instead."""

    def __init__(self) -> None:
        super().__init__("endpoint: a scripted policy has no server; call `complete` or `chat`")


class ScriptedPolicy:
    """A `Policy` that answers from a script and records its calls.

    Attributes:
        prompts: Prompts so far, as text, with earlier turns.
        calls: Calls so far, with all their arguments.
        version: Policy version of every token; may be set.
    """

    def __init__(self, answers: Script, version: PolicyVersion = PolicyVersion()) -> None:
        """Take a script.

        Raises:
            UsageError: It is empty, has an entry of another type, or a key that is no regular expression. The error
                names the entry.
        """
        for entry, scripted in _entries(answers):
            _check_answer(entry, scripted)
        self._answers = answers
        self._given = 0
        self.prompts: list[str] = []
        self.calls: list[RecordedCall] = []
        self.version = version

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
        """Return `n` scripted answers; see `Policy.complete`. Raises the scripted error, if the script has one.

        Raises:
            UsageError: A function of the script returned no answer, `n` or `max_tokens` is no positive integer, or a
                token is no code point.
        """
        new = await self.tokenize(prompt) if isinstance(prompt, str) else _plain(prompt)
        ids = new if after is None else continued(after, new, is_text=isinstance(prompt, str))
        return await self._sampled(ids, None, n, max_tokens, temperature, stop)

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
        """Return `n` scripted answers; see `Policy.chat`. Raises the scripted error, if the script has one."""
        ids = await self.render(messages, after=after)
        return await self._sampled(ids, tuple(messages), n, max_tokens, temperature, stop)

    async def tokenize(self, text: str) -> list[int]:
        """Return the code points of the characters; see `Policy.tokenize`."""
        return list(map(ord, text))

    async def detokenize(self, tokens: TokenIds) -> str:
        """Return the characters, without `END`; see `Policy.detokenize`. UsageError if a token is no code point."""
        _check_tokens("token_ids", tokens)
        return "".join(chr(token) for token in tokens if token != END)

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002 - a script needs no definitions
        after: Trajectory | None = None,
    ) -> list[int]:
        """Return the contents, joined by newlines; see `Policy.render`."""
        check_messages(messages, after)
        contents = contents_of(messages)
        if after is None:
            return await self.tokenize("\n".join(contents))
        return [*tokens_so_far(after), *await self.tokenize("".join(f"\n{one}" for one in contents))]

    def endpoint(self) -> NoReturn:
        """Raise NoServerError, a UsageError."""
        raise NoServerError

    async def _sampled(
        self,
        ids: Sequence[int],
        messages: Sequence[ChatMessage] | None,
        n: int,
        max_tokens: int,
        temperature: float,
        stop: str | Sequence[str] | None,
    ) -> list[Completion]:
        _check_count("n", n)
        _check_count("max_tokens", max_tokens)
        if not is_stop(stop):
            raise UsageError(f"stop: must be {STOP} (got {_shown(stop)}); pass None for no text")
        text = await self.detokenize(ids)
        call = RecordedCall(text, ids, messages, n, max_tokens, temperature, _listed(stop))
        self.prompts.append(call.prompt)
        self.calls.append(call)
        answers = [self._answer(call.prompt) for _ in range(call.n)]
        await _delay(max((one.delay_s for one in answers), default=0.0))
        return [self._completion(call, one) for one in answers]

    def _answer(self, prompt: str) -> Answer:
        scripted = self._scripted(prompt)
        if isinstance(scripted, Exception):
            raise scripted
        return Answer(scripted) if isinstance(scripted, str) else scripted

    def _scripted(self, prompt: str) -> Scripted:
        script = self._answers
        if isinstance(script, str | Answer | Exception):
            return script
        if isinstance(script, Mapping):
            return _matched(script, prompt)
        if callable(script):
            return _check_answer("script: the function", script(prompt))
        self._given += 1
        return script[(self._given - 1) % len(script)]

    def _completion(self, call: RecordedCall, answer: Answer) -> Completion:
        text, tokens, ended = answer.text, [], not answer.truncated
        if answer.token_ids is None:
            cut = min((at for one in call.stop if (at := text.find(one)) >= 0), default=len(text))
            text = text[: min(cut, call.max_tokens)]
            ended = ended and len(text) < call.max_tokens
            tokens = [*text, *(["</s>"] if ended else [])]
            token_ids = [*map(ord, text), *([END] if ended else [])]
        else:
            token_ids = list(answer.token_ids)
        logprobs = [LOGPROB] * len(token_ids) if answer.logprobs is None else list(answer.logprobs)
        return Completion(
            text=text,
            prompt_token_ids=list(call.token_ids),
            token_ids=token_ids,
            logprobs=logprobs,
            oldest=self.version,
            newest=self.version,
            finish_reason="stop" if ended else "length",
            tokens=tokens,
            temperature=call.temperature or 1.0,
        )


def _listed(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _matched(script: Mapping[str, Scripted | Callable[[re.Match[str]], Scripted]], prompt: str) -> Scripted:
    """Return the answer of the first regular expression in the prompt; UsageError if there is none."""
    for pattern, scripted in script.items():
        if (match := re.search(pattern, prompt)) is not None:
            return (
                _check_answer(f"script: the function of {pattern!r}", scripted(match))
                if callable(scripted)
                else scripted
            )
    raise UsageError(
        f"script: no regular expression is found in the prompt (got {prompt!r:.{SHOWN_CHARS}}); "
        'add one, or "" last for every other prompt'
    )


def _entries(script: Script) -> Iterator[tuple[str, Any]]:
    """Yield the answers that a script has without a call, each with the entry that errors name."""
    if isinstance(script, Mapping):
        if not script:
            raise UsageError("script: must have at least one answer (got an empty mapping); add one")
        for pattern, scripted in script.items():
            _check_pattern(pattern)
            if not callable(scripted):
                yield f"script[{pattern!r}]", scripted
    elif isinstance(script, Sequence) and not isinstance(script, str):
        if not script:
            raise UsageError("script: must have at least one answer (got an empty list); add one")
        for at, scripted in enumerate(script):
            yield f"script[{at}]", scripted
    elif not callable(script):
        yield "script", script


def _check_pattern(pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UsageError(
            f"script: key {pattern!r:.{SHOWN_CHARS}} must be a regular expression ({error}); "
            "write re.escape(...) around a literal text"
        ) from None


def _check_answer(entry: str, scripted: Any) -> Scripted:
    """Return an answer; UsageError that names its entry if it is of another type."""
    if isinstance(scripted, str | Answer | Exception):
        return scripted
    raise UsageError(
        f"{entry}: must give a text, an Answer or an exception (got {_shown(scripted)}); "
        "write str(...) around a number"
    )


def _plain(ids: TokenIds) -> list[int]:
    """Return token ids as a list, those of an array as plain integers."""
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _check_count(key: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{key}: must be an integer of at least 1 (got {_shown(value)}); ask for one or more"
        )


def _check_tokens(key: str, ids: TokenIds) -> None:
    """Raise UsageError, naming the token, if one is no code point."""
    for at, token in enumerate(ids):
        try:
            fits = 0 <= operator.index(token) <= sys.maxunicode
        except TypeError:
            fits = False
        if not fits:
            raise UsageError(
                f"{key}: token {at} must be a code point, 0 to {sys.maxunicode} (got {_shown(token)}); use one of them"
            )


def _shown(value: Any) -> str:
    return f"{value!r:.{SHOWN_CHARS}}"


async def _delay(seconds: float) -> None:
    if seconds == math.inf:
        await asyncio.Event().wait()
    elif seconds > 0:
        await asyncio.sleep(seconds)


def play(environment: Environment, policy: ScriptedPolicy, *, size: int = 4, seed: int = 0) -> Group:
    """Run one rollout and return the group that a worker would send. Blocks, also in the cell of a notebook.

    Raises:
        InvalidGroupError: The trajectories cannot be sent.
        TypeError: `rollout` is no `async def`.
    """
    return run_blocking(_played(environment, policy, size, random.Random(seed)))


async def _played(environment: Environment, policy: ScriptedPolicy, size: int, rng: random.Random) -> Group:
    async with AsyncExitStack() as stack:
        if isinstance(environment, AbstractAsyncContextManager):
            await stack.enter_async_context(environment)
        returned = await awaited("rollout", environment.rollout(policy, size, rng))
        return group_of("played/1", returned)
