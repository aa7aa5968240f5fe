"""A policy that has to ask: the value of a key is in a table that only a tool can read.

    rolloutmq up examples/tools/lookup.toml

A conversation, as the policy reads it (what it samples is in brackets):

    7?  [7<eos>]  4=  [4<eos>]

The first answer is the call of the tool, the second one the value. The second turn is asked with `after`, so its prompt
begins with the very tokens that were sampled.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rolloutmq import Policy, Trajectory

DIGITS = "0123456789"


class Task(NamedTuple):
    """A key, and the table that has its value."""

    key: str
    table: Mapping[str, str]


def lookup(table: Mapping[str, str], key: str) -> str:
    """The tool: return the value of a key, or nothing for what is no key."""
    return table.get(key, "")


class Lookup:
    """Asks for the value of a key; half of the score is for the call, half for the answer."""

    def task(self, rng: random.Random) -> Task:
        return Task(rng.choice(DIGITS), {key: rng.choice(DIGITS) for key in DIGITS})

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        task = self.task(rng)
        async with asyncio.TaskGroup() as group:  # if one fails, the others are cancelled
            members = [group.create_task(self.member(policy, task, rng)) for _ in range(size)]
        return [member.result() for member in members]

    async def member(self, policy: Policy, task: Task, _rng: random.Random) -> Trajectory:
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": f"{task.key}?"}]
        (call,) = await policy.chat(messages, max_tokens=2)
        sequence = Trajectory.of(call)
        result = {"role": "tool", "content": f"{lookup(task.table, call.text)}="}
        (answer,) = await policy.chat([result], after=sequence, max_tokens=2)
        score = 0.5 * (call.text == task.key) + 0.5 * (answer.text == task.table[task.key])
        said = [{"role": "assistant", "content": one.text} for one in (call, answer)]
        return sequence.then(answer).scored(score, [*messages, said[0], result, said[1]])
