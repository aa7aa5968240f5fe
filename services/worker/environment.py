"""The environment: the class a user writes to turn a policy into scored trajectories.

    class Add(SingleTurn[tuple[int, int]]):
        max_tokens = 8

        def task(self, rng):                    # draw a question
            return rng.randrange(100), rng.randrange(100)

        def prompt(self, task):                 # text, token ids, or chat messages
            return f"{task[0]}+{task[1]}="

        def score(self, task, completion):      # reward an answer
            return float(completion.text == str(sum(task)))

In place of `score`, `rewards` may hold an ensemble of raters (`rolloutmq.Ensemble`), which scores all answers of a
group at once. For several turns, tools or judges, implement `rollout` of the `Environment` protocol. An environment
that has its own client, such as OpenAI's, uses the address from `policy.endpoint()`. The configuration passes
`environment.NAME.options` to the class as keyword arguments. If the environment is an async context manager, the worker
enters it before the first rollout and leaves it after the last.

Two methods are optional; `SingleTurn` has both. `rollout_task` answers a task that a trainer submitted
(`environment.NAME.tasks`). `member` samples one sequence of a group that may close at a deadline
(`environment.NAME.group_deadline_s`).

Rollouts of one worker run concurrently in one event loop: await slow calls, and compute long scores in a thread
(`asyncio.to_thread`). Take all randomness from `rng`. Its seed includes the run and the worker, so two workers never
draw the same tasks.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from rolloutmq.schemas.errors import UsageError
from rolloutmq.services.worker.completion import MAX_TOKENS, ChatMessage, Completion, TokenIds
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import Trajectory
from rolloutmq.services.worker.user_code.methods import check_score, prompt_of, sampling_of, task_of

Task = TypeVar("Task")
Prompt = str | TokenIds | Sequence[ChatMessage]
"""Text, token ids, or the messages of a conversation."""


class Environment(Protocol):
    """Samples a task, calls the policy, scores the answers."""

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        """Sample one group: `size` sequences for one task.

        The worker may cancel the call (drain, `rollout_timeout_s`). If it raises or returns nothing, the worker
        abandons and counts the group and continues.

        Args:
            policy: The model under training.
            size: Sequences to return, `environment.NAME.group_size`.
            rng: The only source of randomness to use.
        """
        ...


class TaskEnvironment(Environment, Protocol):
    """An environment that also answers submitted tasks."""

    async def rollout_task(
        self, policy: Policy, payload: Any, size: int, rng: random.Random
    ) -> Sequence[Trajectory]:
        """Sample one group for a submitted task. Same rules as `rollout`.

        Args:
            policy: The model under training.
            payload: The submitted task after a round trip through msgpack: tuples are lists.
            size: Sequences to return, from the task or from `environment.NAME.group_size`.
            rng: The only source of randomness to use.
        """
        ...


class IndexedEnvironment(Environment, Protocol):
    """An environment that looks the tasks of its task space up by number, such as the rows of a data set.

    Any other environment has a task space too: its `rollout` gets a generator that is seeded with the number.
    """

    async def rollout_at(
        self, policy: Policy, index: int, size: int, rng: random.Random
    ) -> Sequence[Trajectory]:
        """Sample one group for the task of that number. Same rules as `rollout`.

        Args:
            policy: The model under training.
            index: Number of the task, from 0 and below `environment.NAME.task_count`.
            size: Sequences to return.
            rng: The only source of randomness to use, seeded with the number.
        """
        ...


class HeldOutEnvironment(Environment, Protocol):
    """An environment with tasks of its own for the evaluation, such as the rows of a test set.

    Any other environment answers the evaluation with its task space: drawn tasks differ from those of the training only
    by chance, and looked-up ones are the first of the training's.
    """

    async def rollout_eval(
        self, policy: Policy, index: int, size: int, rng: random.Random
    ) -> Sequence[Trajectory]:
        """Sample one group for the evaluation's task of that number. Same rules as `rollout`.

        Args:
            policy: The model under training.
            index: Number of the task, from 0 and below `evaluation.tasks`.
            size: Sequences to return.
            rng: The only source of randomness to use, seeded with `evaluation.seed` and the number.
        """
        ...


class MemberEnvironment(Environment, Protocol[Task]):
    """An environment that samples its sequences one by one, so that a group may close at a deadline.

    The optional class attribute `stragglers` decides about late sequences: `"cancel"` (the default) cancels them,
    `"await"` lets them run up to `rollout_timeout_s`. Both are counted and neither joins the group. The optional method
    `submitted(payload)` turns a submitted payload into a task.
    """

    def task(self, rng: random.Random) -> Task | Awaitable[Task]:
        """Draw the task of a group."""
        ...

    async def member(self, policy: Policy, task: Task, rng: random.Random) -> Trajectory:
        """Sample one sequence of a group. May be cancelled. If it raises, the whole group is abandoned."""
        ...


class RatedGroup(Protocol):
    """Scores of the answers of one group, and the columns that travel with them."""

    def apply(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories, one for each answer, with their scores and columns."""
        ...


class GroupRewards(Protocol):
    """Scores all answers to one task; `rolloutmq.Ensemble` does."""

    async def rate(self, task: Any, answers: Sequence[Any]) -> RatedGroup:
        """Rate the answers to one task."""
        ...


class GroupPerTask(ABC, Generic[Task]):
    """An environment whose group is `size` sequences of one task. Implement `task`, `prompt` and `_answers`.

    Attributes:
        stragglers: `"cancel"` or `"await"` for late answers of a group; see `MemberEnvironment`.
    """

    stragglers: Literal["cancel", "await"] = "cancel"

    @abstractmethod
    def task(self, rng: random.Random) -> Task:
        """Draw a task."""

    @abstractmethod
    def prompt(self, task: Task) -> Prompt:
        """Return the prompt of a task: text, token ids, or chat messages."""

    @abstractmethod
    async def _answers(self, policy: Policy, task: Task, size: int) -> list[Trajectory]:
        """Sample `size` sequences of a task and score each."""

    def task_at(self, index: int, rng: random.Random) -> Task:  # noqa: ARG002 - for data sets
        """Return the task of that number. Draws it by `task(rng)` unless overridden, for example by a data set's row.

        Args:
            index: Number of the task, from 0 and below `environment.NAME.task_count`.
            rng: A generator seeded with the number: the same task each time.
        """
        return self.task(rng)

    def eval_task_at(self, index: int, rng: random.Random) -> Task:
        """Return the evaluation's task of that number: that of `task_at` unless overridden, by a held-out one.

        Args:
            index: Number of the task, from 0 and below `evaluation.tasks`.
            rng: A generator seeded with `evaluation.seed` and the number: the same task each time, in every run.
        """
        return self.task_at(index, rng)

    def submitted(self, payload: Any) -> Task:
        """Turn a submitted payload into a task. Returns the payload unless overridden."""
        return cast(Task, payload)

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> list[Trajectory]:
        """Sample `size` answers to one task and score each."""
        return await self._answers(policy, task_of(self, "task", rng), size)

    async def rollout_task(
        self,
        policy: Policy,
        payload: Any,
        size: int,
        rng: random.Random,  # noqa: ARG002 - the task is given
    ) -> list[Trajectory]:
        """Sample `size` answers to a submitted task and score each."""
        return await self._answers(policy, task_of(self, "submitted", payload), size)

    async def rollout_at(self, policy: Policy, index: int, size: int, rng: random.Random) -> list[Trajectory]:
        """Sample `size` answers to the task of that number and score each."""
        return await self._answers(policy, task_of(self, "task_at", index, rng), size)

    async def rollout_eval(
        self, policy: Policy, index: int, size: int, rng: random.Random
    ) -> list[Trajectory]:
        """Sample `size` answers to the evaluation's task of that number and score each."""
        return await self._answers(policy, task_of(self, "eval_task_at", index, rng), size)

    async def member(
        self,
        policy: Policy,
        task: Task,
        rng: random.Random,  # noqa: ARG002 - the server samples
    ) -> Trajectory:
        """Sample one answer and score it."""
        return (await self._answers(policy, task, 1))[0]


class SingleTurn(GroupPerTask[Task]):
    """One prompt, one answer, one score. Implement `task`, `prompt`, and `score` or `rewards`.

    Attributes:
        rewards: Scores the answers of a group in place of `score`; the configuration may set it.
        max_tokens: Longest answer, in tokens.
        temperature: Sampling temperature. Log-probabilities are those after temperature.
        stop: Text that ends an answer, in addition to the model's end-of-sequence token.
        stragglers: `"cancel"` or `"await"` for late answers of a group; see `MemberEnvironment`.
    """

    max_tokens: int = MAX_TOKENS
    temperature: float = 1.0
    stop: str | Sequence[str] | None = None
    rewards: GroupRewards | None = None

    def score(self, task: Task, completion: Completion) -> float | Awaitable[float]:  # noqa: ARG002 - overridden
        """Return the reward of an answer, a finite number. May be `async def`."""
        raise UsageError(f"{type(self).__name__}: does not implement `score`, and has no `rewards`; add one")

    async def _answers(self, policy: Policy, task: Task, size: int) -> list[Trajectory]:
        prompt = prompt_of(self, task)
        messages = prompt if isinstance(prompt, list) and isinstance(prompt[0], Mapping) else None
        sample: Any = policy.complete if messages is None else policy.chat
        completions: list[Completion] = await sample(prompt, n=size, **sampling_of(self))
        if self.rewards is not None:
            rated = await self.rewards.rate(task, completions)
            return rated.apply([_trajectory(one, 0.0, messages) for one in completions])
        return [await self._scored(task, completion, messages) for completion in completions]

    async def _scored(self, task: Task, completion: Completion, messages: list[Any] | None) -> Trajectory:
        score = self.score(task, completion)
        if isawaitable(score):
            score = await score
        check_score(self, score)
        return _trajectory(completion, score, messages)


class RowTurn(SingleTurn[Mapping[str, Any]]):
    """A `SingleTurn` whose tasks are the rows of `[environment.NAME.dataset]`: implement `prompt` and `score`.

    Task i is row i of the shuffled data set, in every worker and every life. The evaluation asks for held-out rows.

    Attributes:
        rows: Rows of the training; the loader sets it.
        eval_rows: Rows of the evaluation; those of the training if none are held out.
    """

    rows: Sequence[Mapping[str, Any]] = ()
    eval_rows: Sequence[Mapping[str, Any]] = ()

    def task(self, rng: random.Random) -> Mapping[str, Any]:
        """Draw a row."""
        return rng.choice(self.rows)

    def task_at(self, index: int, rng: random.Random) -> Mapping[str, Any]:  # noqa: ARG002 - not drawn
        """Return the row of that number. Raises IndexError if there is none."""
        return self.rows[index]

    def eval_task_at(self, index: int, rng: random.Random) -> Mapping[str, Any]:  # noqa: ARG002 - not drawn
        """Return the evaluation's row of that number. Raises IndexError if there is none."""
        return self.eval_rows[index]


def _trajectory(completion: Completion, reward: float, messages: list[Any] | None) -> Trajectory:
    if messages is not None:
        messages = [*messages, {"role": "assistant", "content": completion.text}]
    return Trajectory.of(completion, reward, messages)
