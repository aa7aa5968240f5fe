"""An agent with a calculator: it samples through the OpenAI client and executes the tool calls.

    pip install openai
    rolloutmq up examples/tools/tool_agent.toml

The loss covers every token that the policy sampled, in calls and answers, but not the prompts and tool results. The
policy learns from failed calls: if a tool raises or does not exist, its message has the error and the conversation
continues. Arguments that are not JSON end the conversation with a score of 0, because many servers refuse such a call
in the history. If the server fails, the client retries; then the rollout is abandoned without a lesson.
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
"""Sends a conversation to the policy; returns its answer as a message and as sampled tokens."""

TOOL_S = 10.0
"""Time limit of a tool call, in seconds."""
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
    """The arguments of a call are not a JSON object."""


class ToolAgent:
    """Asks for `(a + b) * c`, which takes two calls and an answer.

    Args:
        turns: Most answers of the policy in one conversation; the last one counts if it is not a call.
        max_tokens: Longest answer, in tokens.
        retries: Retries of the client, with growing pauses, before a rollout is abandoned.
    """

    def __init__(self, turns: int = 4, max_tokens: int = 256, retries: int = 5) -> None:
        from openai import AsyncOpenAI  # pyright: ignore[reportMissingImports] - only who runs this needs it

        if turns < 1:
            raise ValueError("turns must be at least 1")
        self._turns = turns
        self._max_tokens = max_tokens
        # One client, so connections are reused; each conversation sets the current address of the policy.
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
        async with asyncio.TaskGroup() as group:  # if one fails, the others are cancelled
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
    """Alternate between the policy and its tool calls until it answers; the score is 1 for the wanted answer."""
    messages: list[Message] = [{"role": "user", "content": question}]
    sequence: Trajectory | None = None
    for _ in range(turns):
        said, completion = await ask(messages)
        # The prompt of this turn extends the previous turns; only the completion was sampled.
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
    """Return a message in a form that the server accepts back: without empty fields, but with a content."""
    return {"role": "assistant", "content": "", **{key: value for key, value in said.items() if value}}


async def made(call: Message) -> Message:
    """Execute one call and return the tool's message, with the result or the error.

    Raises:
        MalformedCallError: The arguments are not a JSON object.
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
        except Exception as error:  # noqa: BLE001 - the policy gets every error as the result
            content = f"error: {type(error).__name__}: {error}"[:ERROR_CHARS]
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def arguments_of(call: Message) -> dict[str, Any]:
    """Return the arguments of a call; MalformedCallError if they are not a JSON object."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise MalformedCallError from error
    if not isinstance(arguments, dict):
        raise MalformedCallError
    return arguments


def score(answer: str, wanted: str) -> float:
    """Return 1 if the last number of the answer is the wanted one, otherwise 0."""
    return float(re.findall(r"-?\d+(?:\.\d+)?", answer)[-1:] == [wanted])
