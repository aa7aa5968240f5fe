"""`BusRolloutWorker`: the rollout worker of TRL's experimental `AsyncGRPOTrainer`, fed from the bus.

    worker = BusRolloutWorker("runs/mine", sequences=256, group_size=16)
    trainer = AsyncGRPOTrainer(..., rollout_worker=worker, callbacks=[worker.callback])
    trainer.train(resume_from_checkpoint=worker.last_checkpoint(args.output_dir))

The main process of the trainer pulls batches in a thread and hands their sequences over one by one. TRL mixes them
into micro-batches of its own and does not say when it has trained on one. So a batch is settled once TRL has taken all
of its sequences. A checkpoint commits only the batches that had been taken `LAG` optimizer steps before: TRL's planner
holds back one sequence, and its data loader fetches one micro-batch ahead. After a kill the broker delivers all later
batches again: no group is lost, and groups that TRL took within the last `LAG` steps before the checkpoint are trained
on twice.

A step of the bus's policy is a batch, and TRL may take any number of batches between two weight syncs. So TRL alone
bounds the staleness, in syncs: a sample's `model_version` is the first sync that published the oldest policy of its
group. `sequences` should be at most what TRL trains on between two syncs: a larger batch grows stale in TRL's queue.
Environments have `stale = "pass"`, or the broker would let groups expire that TRL counts as fresh, and TRL would wait
for ever for the rest of its token budget.

TRL drops samples above its own `max_staleness`, and those above its token budget; the ledger counts them as trained.
"""

import logging
import os
import queue
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rolloutmq.bus.consumer.client import BlockingBatch, BlockingConsumer, Consumer
from rolloutmq.bus.rundir import load_run
from rolloutmq.bus.transport.endpoint import is_address
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, UsageError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected, RunInfo
from rolloutmq.trainer.integrations.checkpoints import commit, make_durable, next_life
from rolloutmq.trainer.integrations.trl.callback import STEP, last_checkpoint, step_of
from rolloutmq.trainer.integrations.trl.rows import Demand, PulledGroup, Row, pulled
from rolloutmq.trainer.policy.model import policy_positions, policy_vocabulary
from rolloutmq.trainer.step.collate import Bounds
from rolloutmq.trainer.trained_log import TrainedLog

logger = logging.getLogger(__name__)

LAG: Final = 3
"""Optimizer steps after which TRL has trained on every sequence that it has taken."""
SYNCS: Final = 1024
"""Weight syncs remembered: a group from before them counts as of version 0."""
PULL_S: Final = 1.0
"""Longest wait of one pull, in seconds, so that `stop` is heard."""
ANSWER_S: Final = 5.0
"""Longest wait for a broker that is away, in seconds, before the call is repeated."""
TAKEN_POLL_S: Final = 0.02
STD_FLOOR: Final = 1e-8
"""TRL's worker divides the advantages of a group by its standard deviation and this."""


class SampleType(Protocol):
    """`trl.experimental.async_grpo.async_rollout_worker.RolloutSample`."""

    def __call__(self, **fields: Any) -> Any: ...


class BusRolloutWorker:
    """Implements TRL's `RolloutWorkerProtocol`. For the main process of one trainer.

    Args:
        where: Run directory, or address of the broker's `serve` socket.
        sequences: Sequences of a batch.
        group_size: Sequences of a group; others are dead letters.
        output_dir: The trainer's; its lives are counted there if `where` is an address.
        scale: Divide advantages by the standard deviation of their group.
        name: Name of the trainer at the broker.
        timeout_s: Longest wait for the broker when training begins, in seconds.

    Attributes:
        rollout_buffer: Samples for the trainer.
        metrics_queue: Metrics of each batch for the trainer.
        callback: For `AsyncGRPOTrainer(callbacks=[...])`.
        resume_step: Step of the policy in the checkpoint that the next `start` continues from; None without one.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        sequences: int,
        group_size: int,
        output_dir: str | Path = ".",
        scale: bool = True,
        name: str = "trainer",
        timeout_s: float = 30.0,
    ) -> None:
        for key, number in (("sequences", sequences), ("group_size", group_size)):
            if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
                raise UsageError(f"{key}: must be a whole number above 0 (got {number!r})")
        if sequences % group_size:
            raise UsageError(
                f"sequences: must be a positive multiple of group_size {group_size} (got {sequences})"
            )
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.callback = AsyncCallback(self)
        self.resume_step: int | None = None
        self._where = where
        self._layout = None if is_address(where) else RunLayout(Path(str(where)))
        self._life: int | None = None
        self._output_dir = Path(output_dir)
        self._sequences = sequences
        self._group_size = group_size
        self._demand: Demand | None = None
        self._scale = scale
        self._name = name
        self._timeout_s = timeout_s
        self._sample: SampleType | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._alive_at = 0.0
        self._consumer: BlockingConsumer | None = None
        self._synced: list[tuple[int, int]] = []
        """Steps of the bus's policy, ascending, and TRL's version at the first weight sync of each."""
        self._groups = 0
        self._usable = False
        """Whether this life has seen a group that TRL can train on."""
        self._taken: deque[int] = deque(maxlen=LAG + 1)
        """Step of the newest batch that was taken as a whole, at the end of the last optimizer steps."""
        self._newest = 0

    @staticmethod
    def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
        """Return the newest complete checkpoint of a training on the bus, for `resume_from_checkpoint`; None if there
        is none, so that training begins anew."""
        return last_checkpoint(output_dir, AsyncCallback.__name__)

    @property
    def version(self) -> PolicyVersion:
        """Policy of the weights: after the newest batch that TRL took as a whole; before `start`, that of `begin`.

        Raises:
            UsageError: Training has not begun.
        """
        if self._consumer is not None:
            return self._consumer.version
        if self._life is None:
            raise UsageError(
                "rollout_worker: training has not begun; pass callbacks=[worker.callback] to the trainer"
            )
        return PolicyVersion(self._life, self.resume_step or 0)

    @property
    def _step(self) -> int:
        return (self.resume_step or 0) if self._consumer is None else self._consumer.version.step

    def begin(self, resume_step: int | None, temperature: float, bounds: Bounds) -> None:
        """Begin a life of the trainer, before it publishes any weights; called by the callback. Blocks for the disk.

        Args:
            resume_step: Step of the policy in the checkpoint that it continues from; None without one.
            temperature: That at which the trainer scores. Groups of another one are dead letters.
            bounds: Vocabulary and longest sequence of the policy. Groups beyond them are dead letters.

        Raises:
            UsageError: The lives cannot be counted in a cloud storage.
        """
        self.resume_step = resume_step
        self._demand = Demand(self._group_size, temperature, bounds)
        self._life = next_life(self._where, str(self._output_dir), "output_dir")

    def start(self) -> None:
        """Join the bus and begin to pull; called by the trainer.

        Raises:
            WaitTimeoutError: No broker answers.
            ConfigError: The broker would drop groups that TRL counts as fresh.
            UsageError: Training has not begun.
        """
        if self._layout is not None:
            require_passed(load_run(self._layout.root)[0])
        self._sample = import_module("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
        version, layout = self.version, self._layout
        consumer = Consumer.blocking(
            self._where,
            sequences=self._sequences,
            consumer=f"{self._name}-0",
            group=self._name,
            info=RunInfo(batch_sequences=self._sequences, starting_step=version.step, started=True),
            resume=version,
            timeout_s=self._timeout_s,
        )
        self._consumer = consumer.__enter__()
        self._life = None  # the next start is another one
        self._newest = version.step
        self._usable = False
        self._taken = deque([version.step] * (LAG + 1), maxlen=LAG + 1)
        self._stopping.clear()
        self._alive_at = time.monotonic()
        log = layout.trained if layout else Path(os.devnull)
        self._thread = threading.Thread(target=self._run, args=(version, log), name="rolloutmq rollouts")
        self._thread.start()

    def stop(self) -> None:
        """Leave the bus; a batch that was not taken as a whole is delivered again. May be called twice."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def update_model_version(self, model_version: int) -> None:
        """Note TRL's version of the weights, which are those of the present policy of the bus."""
        step = self._step
        if not self._synced or step > self._synced[-1][0]:
            # A new list, because the thread of the rollouts reads it.
            self._synced = [*self._synced[1 - SYNCS :], (step, model_version)]
        elif step < self._synced[-1][0]:  # another life
            self._synced = [(step, model_version)]

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the thread, or UsageError if it has hung for `stale_after_s` seconds.

        A wait for the broker or for groups is no hang: the log and `rolloutmq status` show its reason.
        """
        if self._error is not None:
            raise self._error
        silent_s = time.monotonic() - self._alive_at
        if self._thread is not None and silent_s > stale_after_s:
            raise UsageError(
                f"rollout_worker: its thread has not moved for {silent_s:.0f} s (got stale_after_s={stale_after_s:g}); "
                "see its log"
            )

    @property
    def step_covered(self) -> int:
        """Step of the newest batch that TRL has certainly trained on as a whole."""
        return self._taken[0] if self._taken else self.resume_step or 0

    def stepped(self) -> None:
        """Note an optimizer step of the trainer."""
        self._taken.append(self._newest)
        if self._consumer is not None:
            self._consumer.progress()

    def commit(self) -> None:
        """Report that a checkpoint on disk covers `step_covered`."""
        if self._consumer is not None:
            version = PolicyVersion(self._consumer.version.incarnation, self.step_covered)
            commit(self._consumer.commit, version)

    def _run(self, version: PolicyVersion, log: Path) -> None:
        try:
            journal = TrainedLog(log)
            try:
                if version.incarnation:
                    journal.write(SettledBatch(at=time.time(), version=version, resumed=True))
                while not self._stopping.is_set():
                    version = self._round(version, journal)
            finally:
                journal.close()
        except BaseException as error:  # raised in the trainer's thread, by `check_health`
            self._error = error
            logger.exception("rollouts ended")

    def _round(self, version: PolicyVersion, journal: TrainedLog) -> PolicyVersion:
        """Pull a batch, hand it over, and settle it once it is taken; return the policy after it."""
        assert self._consumer is not None
        assert self._demand is not None
        self._alive_at = time.monotonic()
        try:
            batch = self._consumer.pull(version.step + 1, version, PULL_S, timeout_s=ANSWER_S)
        except WaitTimeoutError as error:
            logger.warning("broker unavailable error=%s", error)
            return version
        if batch is None:
            return version
        groups = [
            pulled(group, age, 0, self._demand)
            for group, age in zip(batch.groups, batch.staleness(), strict=True)
        ]
        usable = [group for group in groups if not group.fault]
        if groups and not usable and not self._usable:
            raise UsageError(f"no group of the first batch can be trained on: {groups[0].fault}")
        self._usable = self._usable or bool(usable)
        for group in usable:
            for sample in self._samples(group, self.model_version(version.step - group.staleness)):
                self.rollout_buffer.put(sample)
        self._tell(usable)
        while self.rollout_buffer.qsize():
            if self._stopping.wait(TAKEN_POLL_S):
                return version
            self._alive_at = time.monotonic()
            self._consumer.progress()
        after = PolicyVersion(version.incarnation, version.step + bool(usable))
        self._settle(batch, after, groups, journal)
        self._newest = after.step
        return after

    def _settle(
        self, batch: BlockingBatch, after: PolicyVersion, groups: list[PulledGroup], journal: TrainedLog
    ) -> None:
        assert self._consumer is not None
        usable = [group for group in groups if not group.fault]
        faulty = [group for group in groups if group.fault]
        for group in faulty:
            logger.warning("group rejected group=%s reason=%s", group.group_id, group.fault)
        journal.write(
            SettledBatch(
                at=time.time(),
                version=after,
                trained=tuple(group.group_id for group in usable),
                rejected=tuple(group.group_id for group in faulty),
                staleness=tuple(group.staleness for group in usable),
                rewards=tuple(group.reward for group in usable),
                rewound=batch.rewound,
            )
        )
        while True:
            self._alive_at = time.monotonic()
            try:
                self._consumer.settle(
                    batch,
                    version=after,
                    trained=[group.group_id for group in usable],
                    rejected=[Rejected(group_id=group.group_id, reason=group.fault) for group in faulty],
                    timeout_s=ANSWER_S,
                )
            except WaitTimeoutError as error:
                if self._stopping.is_set():
                    raise
                logger.warning("broker unavailable, settling again error=%s", error)
            else:
                return

    def model_version(self, step: int) -> int:
        """Return TRL's version of the weights that engines had at a step of the bus's policy; 0 before the first."""
        synced = self._synced
        place = bisect_right(synced, step, key=itemgetter(0))
        return synced[place - 1][1] if place else 0

    def _samples(self, group: PulledGroup, model_version: int) -> Iterator[Any]:
        """Yield the sequences of a group as TRL's samples, with their advantages."""
        assert self._sample is not None
        number, self._groups = self._groups, self._groups + 1
        scores = np.array([row.score for row in group.rows], np.float64)
        spread = float(scores.std())
        # Equal scores have a mean that differs in its last bit, which the division would make large.
        advantages = np.zeros_like(scores) if (scores == scores[0]).all() else scores - scores.mean()
        if self._scale:
            advantages /= spread + STD_FLOOR
        for row, advantage in zip(group.rows, advantages, strict=True):
            yield self._sample(
                prompt=[],
                completion=[],
                input_ids=np.concatenate([row.prompt, row.completion]).astype(np.int64),
                completion_mask=_with_prompt(row, row.mask, np.int64),
                old_log_probs=_with_prompt(row, row.logprobs, np.float32),
                advantage=float(advantage),
                model_version=model_version,
                group_id=number,
                metrics={"reward": float(row.score or 0.0), "reward_std": spread},
                enqueued_at=time.time(),
            )

    def _tell(self, usable: list[PulledGroup]) -> None:
        if usable:
            ages = [group.staleness for group in usable]
            rewards = [group.reward for group in usable]
            self.metrics_queue.put(
                {
                    "rolloutmq/staleness": sum(ages) / len(ages),
                    "rolloutmq/reward": sum(rewards) / len(rewards),
                }
            )


def require_passed(run: RunConfig) -> None:
    """Check that the broker drops no group as too stale.

    Raises:
        ConfigError: It would.
    """
    for name, env in run.environment.items():
        if env.split == "train" and env.stale != "pass":
            raise ConfigError(
                f"environment.{name}.stale",
                f'must be "pass" with AsyncGRPOTrainer (got "{env.stale}"): TRL bounds the staleness itself, by its '
                "max_staleness in weight syncs",
            )


def _with_prompt(row: Row, values: Any, dtype: Any) -> Any:
    """Return values of the completion behind zeros for the prompt."""
    return np.concatenate([np.zeros(len(row.prompt)), values]).astype(dtype)


class AsyncCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Joins the steps and checkpoints of an `AsyncGRPOTrainer` to its worker; acts in the main process."""

    def __init__(self, worker: BusRolloutWorker) -> None:
        self._worker = worker

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes into each checkpoint."""
        return {"args": {}, "attributes": {STEP: self._worker.step_covered}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Continue from the step of the checkpoint; the trainer publishes and starts the worker afterwards."""
        if state.is_world_process_zero:
            model = more["model"]
            bounds = Bounds(policy_vocabulary(model), policy_positions(model))
            self._worker.begin(step_of(state, type(self).__name__), args.temperature, bounds)

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:  # noqa: ARG002
        """Note the step."""
        self._worker.stepped()

    def on_save(self, args: Any, state: Any, control: Any, **_more: Any) -> None:  # noqa: ARG002
        """Commit, once the checkpoint is on disk."""
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and path.is_dir():
            make_durable(path)
            self._worker.commit()
