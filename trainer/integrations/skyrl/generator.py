"""`BusGenerator`: SkyRL's trajectories come from workers of the bus.

    generator = BusGenerator("runs/mine", batch_sequences=256, tokenizer=tokenizer)
    output = await generator.generate(input_batch)

Each instance of the input is one task for an environment of the bus; its group becomes the instance's trajectories, in
the order of the input. `generate` never raises, because SkyRL's fully asynchronous trainer ends its process if it does:
what is missing is masked, with the reason as its stop reason, in the log and in the metrics.

The trainer joins the bus by `start`, and before it has, or once it has left, all is masked. An evaluation needs no
`start`: a process that only evaluates takes nothing from a training, see `task_feed.connection`.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.schemas.errors import RolloutMQError, UsageError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer.integrations.extras import from_extra
from rolloutmq.trainer.integrations.judgement import Judge
from rolloutmq.trainer.integrations.skyrl.rows import (
    PromptGroup,
    Rows,
    bus_metrics,
    prompt_groups,
    task_name,
)
from rolloutmq.trainer.integrations.task_feed.answers import Answer, Missing
from rolloutmq.trainer.integrations.task_feed.connection import FeedConnection, find_problem
from rolloutmq.trainer.integrations.task_feed.feed import Feed

with from_extra("skyrl"):
    from skyrl.train.generators.base import GeneratorInterface
    from skyrl.train.generators.utils import get_rollout_metrics

logger = logging.getLogger(__name__)


class BusGenerator(GeneratorInterface):  # type: ignore[misc]
    """Serves SkyRL's `generate` from the bus. For one trainer; `start` joins the bus, `close` leaves it for good.

    Args:
        where: Run directory, or address of the broker's `serve` socket.
        batch_sequences: Sequences of one optimizer step: SkyRL's `train_batch_size` times `n_samples_per_prompt`.
        tokenizer: SkyRL's tokenizer, for the prompt and the token of masked trajectories.
        name: Name of the training at the broker, and first part of its task ids. Keep it for a resumed training.
        environments: Environment of the bus for each of SkyRL's environment classes. Others have the same name.
        deadline_s: Longest time from a request to its group, in seconds; what is missing then is masked.
        timeout_s: Longest wait for the broker when the bus is joined, in seconds.
        temperature: SkyRL's `trainer.algorithm.temperature`, at which it scores. Groups of another one are masked.
        zero_reward_on_non_stop: SkyRL's setting: a trajectory that did not end by itself has reward 0.
        apply_overlong_filtering: SkyRL's setting: such a trajectory is masked.

    Attributes:
        epoch: Epoch of the data; an instance is a new task in each. The trainer sets it.
    """

    def __init__(
        self,
        where: Where,
        *,
        batch_sequences: int,
        tokenizer: Any = None,
        name: str = "skyrl",
        environments: Mapping[str, str] | None = None,
        deadline_s: float = 1800.0,
        timeout_s: float = 60.0,
        temperature: float = 1.0,
        zero_reward_on_non_stop: bool = False,
        apply_overlong_filtering: bool = False,
    ) -> None:
        problem = find_problem(name, environments, deadline_s, timeout_s)
        if problem is not None:
            raise UsageError(": ".join(problem))
        self.where = where
        self.name = name
        self.epoch = 0
        self._tokenizer = tokenizer
        self._environments = dict(environments or {})
        self._zero_reward_on_non_stop = zero_reward_on_non_stop
        self._apply_overlong_filtering = apply_overlong_filtering
        self._connection = FeedConnection(
            where, name=name, batch_sequences=batch_sequences, deadline_s=deadline_s, timeout_s=timeout_s
        )
        self._judge = Judge("SkyRL", temperature, "trainer.algorithm.temperature")
        self._life = os.urandom(4).hex()

    # Life

    def start(self, resume: PolicyVersion | None = None, info: RunInfo | None = None) -> None:
        """Join the bus. Blocks until the broker has answered. Does nothing if it is joined.

        Args:
            resume: Policy from which the trainer continues; its incarnation is larger in each life.
            info: Description of the run.

        Raises:
            WaitTimeoutError: There is no broker; tells where it was looked for.
            RefusedError: The broker does not accept this trainer.
            ClosedError: The bus is left.
        """
        self._connection.join(resume, info, find_fault=self._judge.find_fault)

    def close(self) -> None:
        """Leave the bus; groups that are not settled return to the queue. Blocks. May be called twice."""
        self._connection.close()

    @property
    def running(self) -> Feed:
        """The connection of the training.

        Raises:
            UsageError: The bus is not joined.
            ClosedError: The bus is left.
        """
        return self._connection.training

    def require_live(self) -> None:
        """Raise the error that has ended the connection, if any: another trainer has this one's place, say."""
        if self._connection.error is not None:
            raise self._connection.error

    # Generation

    async def generate(self, input_batch: Any) -> Any:
        """Return one trajectory for each prompt, in their order. Waits up to `deadline_s`. Raises nothing unless it is
        cancelled.

        Args:
            input_batch: SkyRL's `GeneratorInput`.

        Returns:
            SkyRL's `GeneratorOutput`. Missing trajectories have loss mask 0.
        """
        try:
            return await self._generate(input_batch)
        except Exception:  # SkyRL ends the process without a word of its own
            logger.exception("all trajectories of a call are masked prompts=%d", len(input_batch["prompts"]))
            return self._output(input_batch, [], [])

    async def _generate(self, input_batch: Any) -> Any:
        groups = prompt_groups(input_batch)
        about = input_batch.get("batch_metadata")
        evaluates = about is not None and about.training_phase == "eval"
        step = 0 if about is None or about.global_step is None else about.global_step
        answers = await self._answers(groups, step, evaluates=evaluates)
        return self._output(input_batch, groups, answers)

    def _output(self, input_batch: Any, groups: Sequence[PromptGroup], answers: Sequence[Answer]) -> Any:
        """Return the `GeneratorOutput`; without groups all of it is masked."""
        rows = Rows(len(input_batch["prompts"]), self._pad())
        masked = 0
        if not groups:
            nothing = Answer(missing=Missing.CLOSED)
            masked = rows.fill(range(len(rows.rewards)), nothing)
        for group, answer in zip(groups, answers, strict=True):
            prompt = [] if answer.group is not None else self._prompt(group)
            masked += rows.fill(group.places, answer, prompt)
        if masked:
            logger.warning("trajectories masked trajectories=%d of=%d", masked, len(rows.rewards))
        metrics = bus_metrics(answers, masked)
        if rows.count:  # SkyRL has no metrics of an empty batch
            metrics |= get_rollout_metrics(
                rows.responses,
                rows.rewards,
                loss_masks=rows.masks,
                trajectory_completion_times=rows.times,
            )
        rows.follow_stop_reasons(
            zero_rewards=self._zero_reward_on_non_stop, mask=self._apply_overlong_filtering
        )
        return rows.output(input_batch.get("trajectory_ids"), metrics)

    async def _answers(self, groups: Sequence[PromptGroup], step: int, *, evaluates: bool) -> list[Answer]:
        asking = self._evaluate(groups, step) if evaluates else self._train(groups)
        try:
            return await asyncio.wrap_future(self._connection.future(asking))
        except RolloutMQError as error:
            logger.exception("no trajectories prompts=%d", len(groups))
            return [Answer(missing=Missing.CLOSED, detail=str(error))] * len(groups)

    async def _train(self, groups: Sequence[PromptGroup]) -> list[Answer]:
        return await self._asked(self.running, groups, "train", f"e{self.epoch}")

    async def _evaluate(self, groups: Sequence[PromptGroup], step: int) -> list[Answer]:
        """Ask tasks of the split `eval`, anew in each life; their groups are done with at once."""
        feed = await self._connection.evaluation()
        answers = await self._asked(feed, groups, "eval", f"s{step}-{self._life}")
        await self._connection.evaluated()
        return answers

    async def _asked(self, feed: Feed, groups: Sequence[PromptGroup], phase: str, part: str) -> list[Answer]:
        def asking(one: PromptGroup) -> Awaitable[Answer]:
            env = self._environments.get(one.env, one.env)
            name = task_name(self.name, phase, part, one, env)
            return feed.ask(one.uid, name, env, one.payload, len(one.places))

        return await asyncio.gather(*map(asking, groups))

    def _pad(self) -> int:
        for name in ("eos_token_id", "pad_token_id"):
            token = getattr(self._tokenizer, name, None)
            if isinstance(token, int):
                return token
        return 0

    def _prompt(self, group: PromptGroup) -> list[int]:
        """Return the prompt of a masked trajectory, as SkyRL would tokenize it."""
        if self._tokenizer is None:
            return []
        try:
            found = self._tokenizer.apply_chat_template(
                group.payload["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            return [int(token) for token in found]
        except Exception as error:  # noqa: BLE001 - templates raise anything, and this prompt is only a stand-in
            logger.warning("prompt not tokenized uid=%s error=%s", group.uid, error)
            return []

    # Settlement

    def group_ids(self, uids: Iterable[str]) -> list[str]:
        """Return the ids of the groups of instances that are not settled.

        Raises:
            UsageError: The bus is not joined.
            ClosedError: The bus is left.
        """
        feed, keys = self.running, list(uids)
        return self._connection.call(lambda: feed.group_ids(keys))

    def settlement(
        self, trained: Iterable[str], filtered: Iterable[str], version: PolicyVersion, *, rest: bool = False
    ) -> "Future[None]":
        """Begin to report the outcome of groups, and return a future of its end.

        Args:
            trained: Instances that an optimizer step used.
            filtered: Instances without a learning signal.
            version: Policy after the step.
            rest: All other groups that `generate` returned are filtered, too.

        Raises:
            UsageError: The bus is not joined.
            ClosedError: The bus is left.
        """
        return self._connection.future(
            self._settle(self.running, list(trained), list(filtered), version, rest=rest)
        )

    async def _settle(
        self, feed: Feed, trained: list[str], filtered: list[str], version: PolicyVersion, *, rest: bool
    ) -> None:
        if rest:
            filtered += sorted({*feed.keys()} - {*trained, *filtered})
        await feed.settle(trained, filtered, version)

    def commit(self, version: PolicyVersion) -> None:
        """Report a durable checkpoint: the broker may delete the groups of its steps. Blocks for at most a minute.

        Raises:
            RefusedError: The broker does not accept the commit.
            UsageError: The bus is not joined.
            ClosedError: The bus is left.
        """
        self._connection.commit(version)
