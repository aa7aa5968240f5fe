"""What a user writes: an environment, a class that turns a policy into scored trajectories.

    class Add(SingleTurn[tuple[int, int]]):
        max_tokens = 8

        def task(self, rng):                    # one question
            return rng.randrange(100), rng.randrange(100)

        def prompt(self, task):                 # as the policy sees it: text, token ids, or chat messages
            return f"{task[0]}+{task[1]}="

        def score(self, task, completion):      # what an answer is worth
            return float(completion.text == str(sum(task)))

Anything else (several turns, tools, judges) implements `rollout` of the `Environment` protocol; with a client of its
own, such as OpenAI's, at the address that `policy.endpoint()` gives. Keyword arguments of the class are the `options`
of its section in the configuration. An environment that is an async context manager is entered before its first rollout
and left after its last.

Two methods are optional, and `SingleTurn` has both: `rollout_task` answers a task that a trainer submitted
(`environment.NAME.tasks`), and `member` one sequence of a group that may be closed before all of them are there
(`environment.NAME.group_deadline_s`).

Rollouts of one worker run concurrently in one event loop: await what takes time, and compute long scores in a thread
(`asyncio.to_thread`). Take randomness from `rng`: it is seeded by run and worker, so that no two workers draw the same
tasks.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

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


class TaskEnvironment(Environment, Protocol):
    """An environment that also answers tasks which a trainer submitted."""

    async def rollout_task(
        self, policy: Policy, payload: Any, size: int, rng: random.Random
    ) -> Sequence[Trajectory]:
        """Sample one group for a submitted task; as `rollout`, but for where the task comes from.

        Args:
            policy: The model under training.
            payload: What the trainer submitted, as msgpack brings it: tuples are lists.
            size: Sequences wanted, by the task or by the configuration.
            rng: The only source of randomness to use.
        """
        ...


class MemberEnvironment(Environment, Protocol[Task]):
    """An environment whose groups may be closed at a deadline: its sequences are rolled out one by one.

    Class attribute `stragglers`, if there is one, says what becomes of those that are late: `"cancel"`, the default,
    or `"await"` for those that must come to their end, up to `rollout_timeout_s`. They are counted either way.
    A method `submitted(payload)`, if there is one, makes a task of what a trainer submitted.
    """

    def task(self, rng: random.Random) -> Task | Awaitable[Task]:
        """Draw the task of a group."""
        ...

    async def member(self, policy: Policy, task: Task, rng: random.Random) -> Trajectory:
        """Sample one sequence of a group. May raise, which costs the group, and may be cancelled."""
        ...


class SingleTurn(ABC, Generic[Task]):
    """One prompt, one answer, one score: three methods to write.

    Attributes:
        max_tokens: Longest answer, in tokens.
        temperature: Of the sampling. Log-probabilities are those after temperature.
        stop: Text at which an answer ends, besides the model's own end of sequence.
        stragglers: What becomes of answers that are late for their group; see `MemberEnvironment`.
    """

    max_tokens: int = MAX_TOKENS
    temperature: float = 1.0
    stop: str | Sequence[str] | None = None
    stragglers: Literal["cancel", "await"] = "cancel"

    @abstractmethod
    def task(self, rng: random.Random) -> Task:
        """Draw a task."""

    @abstractmethod
    def prompt(self, task: Task) -> Prompt:
        """Put the task as the policy is to see it."""

    @abstractmethod
    def score(self, task: Task, completion: Completion) -> float | Awaitable[float]:
        """Say what an answer is worth. May be `async def`."""

    def submitted(self, payload: Any) -> Task:
        """Make a task of what a trainer submitted; by default the payload is the task."""
        return cast(Task, payload)

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> list[Trajectory]:
        """Ask for `size` answers to one task and score each."""
        return await self._answers(policy, self.task(rng), size)

    async def rollout_task(
        self,
        policy: Policy,
        payload: Any,
        size: int,
        rng: random.Random,  # noqa: ARG002 - the task is drawn already
    ) -> list[Trajectory]:
        """Ask for `size` answers to a submitted task and score each."""
        return await self._answers(policy, self.submitted(payload), size)

    async def member(
        self,
        policy: Policy,
        task: Task,
        rng: random.Random,  # noqa: ARG002 - the server samples
    ) -> Trajectory:
        """Ask for one answer and score it."""
        return (await self._answers(policy, task, 1))[0]

    async def _answers(self, policy: Policy, task: Task, size: int) -> list[Trajectory]:
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
