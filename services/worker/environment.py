"""What a user writes: an environment, a class that turns a policy into scored trajectories.

    class Add(SingleTurn[tuple[int, int]]):
        max_tokens = 8

        def task(self, rng):                    # one question
            return rng.randrange(100), rng.randrange(100)

        def prompt(self, task):                 # as the policy sees it: text, token ids, or chat messages
            return f"{task[0]}+{task[1]}="

        def score(self, task, completion):      # what an answer is worth
            return float(completion.text == str(sum(task)))

Anything else (several turns, tools, judges) implements `rollout` of the `Environment` protocol. Keyword arguments of
the class are the `options` of its section in the configuration. An environment that is an async context manager is
entered before its first rollout and left after its last.

Rollouts of one worker run concurrently in one event loop: await what takes time, and compute long scores in a thread
(`asyncio.to_thread`). Take randomness from `rng`: it is seeded by run and worker, so that no two workers draw the same
tasks.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Generic, Protocol, TypeVar

from rolloutmq.services.worker.policy import MAX_TOKENS, ChatMessage, Completion, Policy
from rolloutmq.services.worker.trajectory import Trajectory

Task = TypeVar("Task")
Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or the messages of a conversation."""


class Environment(Protocol):
    """Samples a task, asks the policy, scores the answers."""

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        """Sample one group: `size` sequences for one task.

        May raise: the group is abandoned and counted, and the worker goes on. May be cancelled. Returning nothing
        counts as a failure too, since nothing came of it.

        Args:
            policy: The model under training.
            size: Sequences wanted, the configured `group_size`.
            rng: The only source of randomness to use.
        """
        ...


class SingleTurn(ABC, Generic[Task]):
    """One prompt, one answer, one score: three methods to write.

    Attributes:
        max_tokens: Longest answer, in tokens.
        temperature: Of the sampling. Log-probabilities are those after temperature.
        stop: Text at which an answer ends, besides the model's own end of sequence.
    """

    max_tokens: int = MAX_TOKENS
    temperature: float = 1.0
    stop: str | Sequence[str] | None = None

    @abstractmethod
    def task(self, rng: random.Random) -> Task:
        """Draw a task."""

    @abstractmethod
    def prompt(self, task: Task) -> Prompt:
        """Put the task as the policy is to see it."""

    @abstractmethod
    def score(self, task: Task, completion: Completion) -> float | Awaitable[float]:
        """Say what an answer is worth. May be `async def`."""

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> list[Trajectory]:
        """Ask for `size` answers to one task and score each."""
        task = self.task(rng)
        prompt = self.prompt(task)
        given = None if isinstance(prompt, str) else list(prompt)
        messages = given if given and isinstance(given[0], Mapping) else None
        ask: Any = policy.complete if messages is None else policy.chat
        completions: list[Completion] = await ask(
            given if given is not None else prompt,
            n=size,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=self.stop,
        )
        return [await self._scored(task, completion, messages) for completion in completions]

    async def _scored(self, task: Task, completion: Completion, messages: list[Any] | None) -> Trajectory:
        score = self.score(task, completion)
        worth = await score if isawaitable(score) else score
        if messages is not None:
            messages = [*messages, {"role": "assistant", "content": completion.text}]
        return Trajectory.of(completion, worth, messages)
