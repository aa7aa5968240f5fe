"""An agent with a calculator: it talks to the policy through OpenAI's own client, and makes the calls that come back.

    pip install openai
    rolloutmq up examples/tool_agent.toml

Trained is what the policy sampled, calls as well as answers; what it was given, the tool's words among it, is not. A
call that cannot be made is the policy's to learn from: a tool that raises, or that there is not, says so in its message
and the conversation goes on; arguments that are no JSON end it, worth nothing, since many servers do not take such a
call back. A server that fails is nobody's lesson: the client tries again, then the rollout is abandoned.
"""

import asyncio
import json
import operator
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rolloutmq import Completion, Policy, Trajectory

Message = Mapping[str, Any]
Ask = Callable[[Sequence[Message]], Awaitable[tuple[Message, Completion]]]
"""Puts a conversation to the policy; returns what it says, as a message and as it was sampled."""

TOOL_S = 10.0
"""A tool that takes longer has failed."""
ERROR_CHARS = 200
OPERATIONS = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate with two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "operation": {"type": "string", "enum": list(OPERATIONS)},
                "a": {"type": "number"},
                "b": {"type": "number"},
            },
            "required": ["operation", "a", "b"],
        },
    },
}


async def calculate(operation: str, a: float, b: float) -> str:
    return f"{OPERATIONS[operation](float(a), float(b)):.12g}"


TOOLS: Mapping[str, Callable[..., Awaitable[str]]] = {"calculate": calculate}


class MalformedCallError(Exception):
    """The arguments of a call are no JSON object."""


class ToolAgent:
    """Asks for `(a + b) * c`, which takes two calls and an answer.

    Args:
        turns: Most answers of the policy in one conversation; the last one counts if it is no call.
        max_tokens: Longest answer, in tokens.
        retries: How often the client tries again, with growing pauses, before a rollout is abandoned.
    """

    def __init__(self, turns: int = 4, max_tokens: int = 256, retries: int = 5) -> None:
        from openai import AsyncOpenAI  # only who runs this example needs it

        if turns < 1:
            raise ValueError("turns must be at least 1")
        self._turns = turns
        self._max_tokens = max_tokens
        # One client, so that connections are kept; where the policy is, each conversation says anew.
        self._client = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=retries)

    async def __aenter__(self) -> "ToolAgent":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    def task(self, rng: random.Random) -> tuple[int, int, int]:
        return rng.randrange(10, 100), rng.randrange(10, 100), rng.randrange(2, 10)

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        task = self.task(rng)
        async with asyncio.TaskGroup() as group:  # if one fails, the others end, too
            members = [group.create_task(self.member(policy, task, rng)) for _ in range(size)]
        return [member.result() for member in members]

    async def member(self, policy: Policy, task: tuple[int, int, int], _rng: random.Random) -> Trajectory:
        a, b, c = task
        async with policy.endpoint() as endpoint:
            client = self._client.with_options(base_url=endpoint.base_url)

            async def ask(messages: Sequence[Message]) -> tuple[Message, Completion]:
                answer = await client.chat.completions.create(
                    messages=messages,
                    tools=[CALCULATOR],
                    max_tokens=self._max_tokens,
                    temperature=1.0,
                    top_p=1.0,
                    **endpoint.request,
                )
                (completion,) = endpoint.completions(answer)
                return answer.choices[0].message.to_dict(), completion

            question = (
                f"What is ({a} + {b}) * {c}? Use the calculator, and answer with nothing but the number."
            )
            return await converse(ask, question, str((a + b) * c), self._turns)


async def converse(ask: Ask, question: str, wanted: str, turns: int) -> Trajectory:
    """Ask, make the calls, ask again, until there is an answer; its score is whether it is the one wanted."""
    messages: list[Message] = [{"role": "user", "content": question}]
    sequence: Trajectory | None = None
    for _ in range(turns):
        said, completion = await ask(messages)
        # Given is whatever the prompt of this turn has beyond the turns before; sampled is the completion alone.
        sequence = Trajectory.of(completion) if sequence is None else sequence.then(completion)
        messages.append(repeated(said))
        calls = said.get("tool_calls")
        if not calls:
            return sequence.scored(score(said.get("content") or "", wanted), messages)
        try:
            messages += [await made(call) for call in calls]
        except MalformedCallError:
            return sequence.scored(0.0, messages, "malformed call")
    assert sequence is not None
    return sequence.scored(0.0, messages, "turn limit")


def repeated(said: Message) -> Message:
    """Return a message as the server takes it back: what it lacks is left out, and it always has a content."""
    return {"role": "assistant", "content": "", **{key: value for key, value in said.items() if value}}


async def made(call: Message) -> Message:
    """Make one call; the message says what came of it, whatever it was.

    Raises:
        MalformedCallError: Its arguments cannot be read.
    """
    name = call["function"]["name"]
    arguments = arguments_of(call)
    try:
        tool = TOOLS[name]
    except KeyError:
        content = f"error: there is no tool {name!r:.{ERROR_CHARS}}"
    else:
        try:
            async with asyncio.timeout(TOOL_S):
                content = await tool(**arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy is told
            content = f"error: {type(error).__name__}: {error}"[:ERROR_CHARS]
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def arguments_of(call: Message) -> dict[str, Any]:
    """Return the arguments of a call; MalformedCallError if they are no JSON object."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise MalformedCallError from error
    if not isinstance(arguments, dict):
        raise MalformedCallError
    return arguments


def score(answer: str, wanted: str) -> float:
    """Return 1 if the last number of an answer is the one wanted."""
    return float(re.findall(r"-?\d+(?:\.\d+)?", answer)[-1:] == [wanted])
