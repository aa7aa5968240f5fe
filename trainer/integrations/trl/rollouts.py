"""`BusRollouts`: rollouts and rewards of TRL's `GRPOTrainer` from the bus.

    with BusRollouts("runs/mine") as bus:
        trainer = GRPOTrainer(
            model, args=args, train_dataset=bus.prompts(args),
            rollout_func=bus.rollout, reward_funcs=bus.reward, callbacks=[bus.callback],
        )
        trainer.train(resume_from_checkpoint=bus.last_checkpoint(args.output_dir))

Environment workers sample their own tasks; TRL's prompts only say how many sequences a rank wants. One generation of
TRL is one batch of the bus and one step of its policy:

    pull -> judge -> exchange -> rows of this rank -> forward passes and optimizer steps of TRL
         -> publish the weights -> line in trained.jsonl -> settle -> next pull;  checkpoint -> commit

A settlement is provisional until a checkpoint covers it: a trainer that comes back gets all later batches again. If a
lease is lost after the step, the training ends with `LeaseLostError`, because the weights cannot be taken back:
continue from the last checkpoint.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rolloutmq.bus.consumer.client import BlockingConsumer, Consumer
from rolloutmq.bus.encoding import topics
from rolloutmq.bus.rundir import load_run
from rolloutmq.bus.tasks.client import TaskClient
from rolloutmq.bus.transport.endpoint import is_address, resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MissingError, UsageError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer.integrations.checkpoints import next_life
from rolloutmq.trainer.integrations.trl.callback import BusCallback, last_checkpoint
from rolloutmq.trainer.integrations.trl.publishing import (
    NoPublication,
    Publication,
    Tensors,
    published,
    state_tensors,
)
from rolloutmq.trainer.integrations.trl.rows import Demand
from rolloutmq.trainer.integrations.trl.settings import (
    Generation,
    generation_of,
    require_same_groups,
    require_whole_generations,
    unused_sampling,
)
from rolloutmq.trainer.integrations.trl.training import SCORE, STALENESS, Training, from_all
from rolloutmq.trainer.policy.model import policy_positions, policy_vocabulary
from rolloutmq.trainer.step.collate import Bounds
from rolloutmq.trainer.trained_log import TrainedLog

logger = logging.getLogger(__name__)

ENGINES: Final = ("tiny", "vllm")
"""Kinds of `inference` that sample from the trainer's weights."""


class BusRollouts:
    """Rollouts of a `GRPOTrainer` from the bus. For one trainer at a time, in a `with` block around its life.

    Args:
        where: Run directory, or address of the broker's `serve` socket.
        name: Name of the trainer at the broker; its ranks are `NAME-0`, `NAME-1`, ...
        publish: Publish the weights to the engines of the run. None: if `rolloutmq up` has started engines that sample
            from them. With an address there is no run directory to publish in.
        tensors: Yields the tensors to publish, see `publishing.Tensors`; for wrapped models, such as of DeepSpeed.
        timeout_s: Longest wait for the broker when the block is entered and when training begins, in seconds.

    Attributes:
        callback: For `GRPOTrainer(callbacks=[...])`.
        training: The training under way, if any.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        name: str = "trainer",
        publish: bool | None = None,
        tensors: Tensors = state_tensors,
        timeout_s: float = 30.0,
    ) -> None:
        self.callback = BusCallback(self)
        self.training: Training | None = None
        self._where = where
        self._name = name
        self._publish = publish
        self._tensors = tensors
        self._timeout_s = timeout_s
        self._run: RunConfig | None = None
        self._layout: RunLayout | None = None
        self._stack: ExitStack | None = None
        self._publication = ExitStack()

    def __enter__(self) -> Self:
        """Read the run and look for its broker.

        Raises:
            WaitTimeoutError: No broker answers; tells where it was looked for.
            ConfigError: The configuration of the run is invalid.
        """
        if not is_address(self._where):
            self._layout = RunLayout(Path(str(self._where)))
            try:
                self._run, _ = load_run(Path(str(self._where)))
            except MissingError:
                self._run = None  # the broker says better what is missing, and one without a run needs none
        try:
            with TaskClient.blocking(self._where, timeout_s=self._timeout_s):
                pass
        except WaitTimeoutError as error:
            raise WaitTimeoutError(f"broker of {self._where}", error.waited_s, error.problem) from None
        if self._run is None and self._publish:
            raise UsageError(
                f"publish: must not be True without a configured run (got {self._where}); start one with `rolloutmq up`"
            )
        self._stack = ExitStack()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Leave the bus. A batch that is not settled is delivered again; after an error the weights stay for the next
        life, otherwise they are removed."""
        stack, self._stack, self.training = self._stack, None, None
        if stack is not None:
            stack.__exit__(kind, error, at)

    def prompts(self, args: Any) -> Any:
        """Return a `datasets.Dataset` of empty prompts, as many as one generation has groups: one epoch of TRL is one
        batch of the bus.

        Raises:
            UsageError: `args.max_steps` is not positive, so nothing but this dataset would end the training.
        """
        if args.max_steps <= 0:
            raise UsageError(
                f"max_steps: must be positive with `bus.prompts` (got {args.max_steps}), because workers sample tasks "
                "without end; set it in the GRPOConfig"
            )
        return import_module("datasets").Dataset.from_dict(
            {"prompt": [""] * (args.generation_batch_size // args.num_generations)}
        )

    @staticmethod
    def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
        """Return the newest complete checkpoint of a training on the bus, for `resume_from_checkpoint`; None if there
        is none, so that training begins anew."""
        return last_checkpoint(output_dir)

    @property
    def running(self) -> Training:
        """The training under way.

        Raises:
            UsageError: There is none.
        """
        if self.training is None:
            raise UsageError(
                "callbacks: must contain `bus.callback`, and training must run inside the `with` block of BusRollouts"
            )
        return self.training

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return the next rows of this rank, as TRL's `rollout_func`. Blocks until there is a batch.

        Args:
            prompts: As many as rows are wanted; their contents are not used.
            trainer: The `GRPOTrainer`.

        Raises:
            UsageError: TRL evaluates, or no group can be trained on; tells why.
            LeaseLostError: Another rank was lost before it had settled the step before.
        """
        if not trainer.model.training:
            raise UsageError(
                "rollout_func: TRL must not evaluate on groups that are meant for training; call "
                "`rolloutmq.evaluate(run_dir)` instead of `trainer.evaluate()`"
            )
        return self.running.generate(len(prompts), trainer)

    def reward(self, prompts: list[Any], **columns: Any) -> list[float | None]:
        """Return the score of each row by its environment, as a TRL reward function.

        Raises:
            UsageError: The rows are not from `rollout`.
        """
        scores: list[float | None] | None = columns.get(SCORE)
        if scores is None:
            raise UsageError(
                f"rollout_func: must be `bus.rollout` with `bus.reward` (got rows without {SCORE})"
            )
        log_metric = columns.get("log_metric")
        known = [age for age, score in zip(columns[STALENESS], scores, strict=True) if score is not None]
        if log_metric is not None and known:
            log_metric("rolloutmq/staleness", sum(known) / len(known))
            log_metric("rolloutmq/filler", 1.0 - len(known) / len(prompts))
        return scores

    def check(self, args: Any) -> Generation:
        """Check the settings of a trainer; see `settings`. Called when it is made."""
        generation = generation_of(args)
        if self._run is not None:
            require_same_groups(args, self._run, launched=self._launched)
        return generation

    def begin(self, args: Any, state: Any, step: int | None, model: Any, tokenizer: Any) -> None:
        """Join the bus for one training; called by the callback, on all ranks.

        Args:
            args: The `GRPOConfig`.
            state: State of the trainer.
            step: Step of the policy in the checkpoint; None without one.
            model: Model of the trainer.
            tokenizer: Tokenizer of the trainer.
        """
        if self._stack is None:
            raise UsageError("BusRollouts: is not open; train inside its `with` block")
        generation = self.check(args)
        require_whole_generations(args, state, generation)
        leads = args.process_index == 0
        if leads and (unused := unused_sampling(args)):
            logger.warning(
                "settings of GRPOConfig do not reach the workers; set them in the environment settings=%s",
                ", ".join(unused),
            )
        counted = next_life(self._where, args.output_dir, "output_dir") if leads else 0
        version = PolicyVersion(max(from_all([counted])), step or 0)
        demand = Demand(
            generation.group_size,
            args.temperature,
            Bounds(policy_vocabulary(model), policy_positions(model)),
        )
        publication = self._published(model, tokenizer, version, leads=leads)
        steps = (state.max_steps - state.global_step) // generation.steps
        info = RunInfo(
            batch_sequences=generation.rows * args.world_size,
            max_tokens=demand.bounds.positions,
            checkpoint_dir=str(Path(args.output_dir).absolute()),
            starting_step=version.step,
            total_steps=version.step + steps,
            started=True,
        )
        self.training = Training(
            consumer=self._consumer(args, info, version),
            journal=self._journal(version, leads=leads),
            publication=publication,
            tell=self._teller() if leads else lambda _event: None,
            demand=demand,
            generation=generation,
            version=version,
            rank=args.process_index,
            ranks=args.world_size,
        )
        joined = version.incarnation, version.step, args.world_size
        logger.info("joined incarnation=%d step=%d ranks=%d", *joined)

    def _published(self, model: Any, tokenizer: Any, version: PolicyVersion, *, leads: bool) -> Publication:
        """Return what the weights of a training are published to, in place of that of the training before."""
        assert self._stack is not None
        self._publication.close()
        if self._run is None or self._layout is None or not self._publishes(self._run):
            return NoPublication()
        publishing = published(model, tokenizer, self._tensors, self._run, self._layout, version, leads=leads)
        publication = self._publication.enter_context(publishing)
        self._stack.push(self._publication)
        return publication

    def _consumer(self, args: Any, info: RunInfo, version: PolicyVersion) -> BlockingConsumer:
        """Return the connection of this rank."""
        assert self._stack is not None
        opening = Consumer.blocking(
            self._where,
            sequences=info.batch_sequences,
            consumer=f"{self._name}-{args.process_index}",
            group=self._name,
            rank=args.process_index,
            world_size=args.world_size,
            info=info,
            resume=version,
            timeout_s=self._timeout_s,
        )
        return self._stack.enter_context(opening)

    def _journal(self, version: PolicyVersion, *, leads: bool) -> TrainedLog:
        """Return the log of the settlements. It comes after the consumer, which fences an earlier life."""
        assert self._stack is not None
        log = self._layout.trained if self._layout and leads else Path(os.devnull)
        journal = self._stack.enter_context(closing(TrainedLog(log)))
        if version.incarnation:
            journal.write(SettledBatch(at=time.time(), version=version, resumed=True))
        return journal

    def _teller(self) -> Callable[[StepDone], None]:
        """Return what publishes the report of a step, for `status`, `top` and the checks of the rewards' health."""
        assert self._stack is not None
        found = resolve_blocking(self._where)
        events = self._stack.enter_context(Publisher(found.publish, keys=keys_of(found)))
        return lambda event: events.publish(topics.STEP, event)

    def _publishes(self, run: RunConfig) -> bool:
        if self._publish is None:
            return self._launched and run.inference.kind in ENGINES
        return self._publish

    @property
    def _launched(self) -> bool:
        """Whether `rolloutmq up` has started the run, and not its broker alone."""
        return self._layout is not None and self._layout.owner.exists()

    def progress(self) -> None:
        """Report progress to the broker. Never waits."""
        self.running.consumer.progress()

    def end(self) -> None:
        """End the training; the weights stay published until the block is left."""
        training, self.training = self.running, None
        training.end()
