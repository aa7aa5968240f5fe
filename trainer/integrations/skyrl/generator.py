"""`BusGenerator`: SkyRL's trajectories come from workers of the bus.

    generator = BusGenerator("runs/mine", batch_sequences=256, tokenizer=tokenizer)
    output = await generator.generate(input_batch)

Each instance of the input is one task for an environment of the bus; its group becomes the instance's trajectories, in
the order of the input. `generate` never raises, because SkyRL's fully asynchronous trainer ends its process if it does:
what is missing is masked, with the reason as its stop reason, in the log and in the metrics.

The connection lives in a thread of its own, so heartbeats go on while SkyRL's loop is blocked by a training step, and
any number of `generate` calls may wait at once. An evaluation has its own connection: its tasks are of the split
`eval`, so it takes nothing from the training.
"""

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, Final

from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.utils import get_rollout_metrics

from rolloutmq.bus.blocking import LoopThread
from rolloutmq.bus.encoding import topics
from rolloutmq.bus.transport.endpoint import Where, resolve
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.schemas.errors import ClosedError, RolloutMQError, UsageError, WaitTimeoutError
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer.integrations.skyrl.rows import (
    PromptGroup,
    Rows,
    bus_metrics,
    prompt_groups,
    task_name,
)
from rolloutmq.trainer.integrations.task_feed.answers import Answer, Missing
from rolloutmq.trainer.integrations.task_feed.feed import Feed

logger = logging.getLogger(__name__)

EVALUATED: Final = PolicyVersion(0, 1 << 62)
"""Version that covers every evaluated group: nobody resumes an evaluation."""
COMMIT_S: Final = 60.0
"""Longest wait of a commit; the next one covers it."""


class BusGenerator(GeneratorInterface):  # type: ignore[misc]
    """Serves SkyRL's `generate` from the bus. For one trainer; `start` joins the bus, `close` leaves it.

    Args:
        where: Run directory, or address of the broker's `serve` socket.
        batch_sequences: Sequences of one optimizer step: SkyRL's `train_batch_size` times `n_samples_per_prompt`.
        tokenizer: SkyRL's tokenizer, for the prompt and the token of masked trajectories.
        name: Name of the training at the broker, and first part of its task ids. Keep it for a resumed training.
        environments: Environment of the bus for each of SkyRL's environment classes. Others have the same name.
        deadline_s: Longest time from a request to its group, in seconds; what is missing then is masked.
        timeout_s: Longest wait for the broker when the bus is joined, in seconds.

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
    ) -> None:
        if not 0 < len(name) <= 40 or not name.replace("-", "").replace("_", "").isalnum():
            raise UsageError(f"name: must be 1 to 40 letters, digits, - or _ (got {name!r})")
        if deadline_s <= 0:
            raise UsageError(f"deadline_s: must be positive (got {deadline_s})")
        self.where = where
        self.name = name
        self.epoch = 0
        self._batch_sequences = batch_sequences
        self._tokenizer = tokenizer
        self._environments = dict(environments or {})
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._loop: LoopThread | None = None
        self._stack = AsyncExitStack()
        self._feed: Feed | None = None
        self._evaluation: Feed | None = None
        self._opening: asyncio.Lock | None = None
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
        """
        if self._loop is not None:
            return
        self._loop = LoopThread(f"rolloutmq {self.name}")
        try:
            self._loop.run(self._join(resume, info))
        except BaseException:
            self.close()
            raise

    async def _join(self, resume: PolicyVersion | None, info: RunInfo | None) -> None:
        self._opening = asyncio.Lock()
        resumed = resume is not None and resume > PolicyVersion()
        opening = Feed.open(
            self.where,
            training=self.name,
            batch_sequences=self._batch_sequences,
            deadline_s=self._deadline_s,
            resume=resume,
            resumed=resumed,
            info=info,
            timeout_s=self._timeout_s,
        )
        self._feed = await self._stack.enter_async_context(opening)
        events = self._stack.enter_context(Publisher((await resolve(self.where)).publish))
        self._feed.on_step = lambda event: events.publish(topics.STEP, event)

    def close(self) -> None:
        """Leave the bus; groups that are not settled return to the queue. Blocks. May be called twice."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            loop.run(self._stack.aclose())
        finally:
            loop.close()
            self._feed = self._evaluation = None

    @property
    def running(self) -> Feed:
        """The connection.

        Raises:
            UsageError: The bus is not joined.
        """
        if self._feed is None:
            raise UsageError("BusGenerator: has not joined the bus; call `start` first")
        return self._feed

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
        metrics = get_rollout_metrics(
            rows.responses,
            rows.rewards,
            loss_masks=rows.masks,
            trajectory_completion_times=rows.times,
        )
        return rows.output(input_batch.get("trajectory_ids"), metrics | bus_metrics(answers, masked))

    async def _answers(self, groups: Sequence[PromptGroup], step: int, *, evaluates: bool) -> list[Answer]:
        try:
            if self._loop is None:
                await asyncio.to_thread(self.start)
            assert self._loop is not None
            asking = self._evaluate(groups, step) if evaluates else self._train(groups)
            return await asyncio.wrap_future(self._loop.future(asking))
        except RolloutMQError as error:
            logger.exception("no trajectories prompts=%d", len(groups))
            return [Answer(missing=Missing.CLOSED, detail=str(error))] * len(groups)

    async def _train(self, groups: Sequence[PromptGroup]) -> list[Answer]:
        return await self._asked(self.running, groups, "train", f"e{self.epoch}")

    async def _evaluate(self, groups: Sequence[PromptGroup], step: int) -> list[Answer]:
        """Ask tasks of the split `eval`, anew in each life; their groups are done with at once."""
        assert self._opening is not None
        async with self._opening:
            if self._evaluation is None:
                opening = Feed.open(
                    self.where,
                    training=self.name,
                    batch_sequences=1,
                    deadline_s=self._deadline_s,
                    split=Split.EVAL,
                    timeout_s=self._timeout_s,
                )
                self._evaluation = await self._stack.enter_async_context(opening)
            feed = self._evaluation
            answers = await self._asked(feed, groups, "eval", f"s{step}-{self._life}")
            await feed.settle(feed.keys(), ())
            await feed.consumer.commit(EVALUATED)
            return answers

    async def _asked(self, feed: Feed, groups: Sequence[PromptGroup], phase: str, part: str) -> list[Answer]:
        return await asyncio.gather(
            *(
                feed.ask(
                    one.uid,
                    task_name(self.name, phase, part, one.uid),
                    self._environments.get(one.env, one.env),
                    one.payload,
                    len(one.places),
                )
                for one in groups
            )
        )

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
            ClosedError: The bus is not joined.
        """
        if self._loop is None:
            raise ClosedError
        return self._loop.future(self._settle(list(trained), list(filtered), version, rest=rest))

    async def _settle(
        self, trained: list[str], filtered: list[str], version: PolicyVersion, *, rest: bool
    ) -> None:
        feed = self.running
        if rest:
            filtered += sorted({*feed.keys()} - {*trained, *filtered})
        await feed.settle(trained, filtered, version)

    def commit(self, version: PolicyVersion) -> None:
        """Report a durable checkpoint: the broker may delete the groups of its steps. Blocks for at most `COMMIT_S`.

        Raises:
            RefusedError: The broker does not accept the commit.
            ClosedError: The bus is not joined.
        """
        if self._loop is None:
            raise ClosedError
        try:
            self._loop.run(self.running.consumer.commit(version, timeout_s=COMMIT_S))
        except WaitTimeoutError as error:
            logger.warning("checkpoint not reported version=%s error=%s", version, error)
