"""Training loop: pull a batch, train on it, settle it, and write checkpoints.

    pull -> judge the groups -> collate -> micro-batches: score, loss, backward -> step under the write lock
         -> line in trained.jsonl -> settle -> `step` event -> checkpoint -> commit

Before the first step and after the last the trainer waits for an evaluation, if one is configured; see `evaluation`.

The trainer may be killed at any point, because a settlement is provisional until a checkpoint covers it. A restarted
trainer restores the newest checkpoint, begins a new incarnation, voids the later lines of its log, and registers
with its version. The broker then delivers the batches after that version again, unchanged and in order.

If a lease is lost after the step (the trainer hung, or the broker was replaced), the step stands, because others have
sampled from it, and so does its line. Its groups are redelivered. The trainer remembers their ids, also in the
checkpoint, and settles them without training on them again. So a step is never undone, and no group is trained on
twice.

A batch without any signal is settled and is no step: the version stays, an event of its own tells of its scores, and
the next batch is pulled. After `BARREN_LIMIT` such batches in a row the trainer fails with NothingToLearnError.

Left out on purpose: a reference model (groups carry `ref_logprobs`); several optimizer steps per batch (off-policy
drift for little gain); overlap of pull and step (pulling a waiting batch takes a millisecond); autocast (no gain at
this size, and the weights already have their type). Several ranks take each step in lockstep (`ranks`); a single rank
runs the same code.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Final

import torch
from msgspec.structs import astuple

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.lifecycle import log_failure, set_up_logging
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ConfigError,
    EndOfReplayError,
    LeaseLostError,
    NothingToLearnError,
)
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.process import MISSED_FELLOW
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer import checkpoint
from rolloutmq.trainer.broker_client import LAST_WORD_S, BrokerClient, StepBatch, connect
from rolloutmq.trainer.evaluation import Evaluation, PointWait
from rolloutmq.trainer.files.checkpoints import TrainerState
from rolloutmq.trainer.losses.registry import columns_needed
from rolloutmq.trainer.policy.adapters import Adapters
from rolloutmq.trainer.policy.device import find_device, moved
from rolloutmq.trainer.policy.model import (
    Policy,
    build_policy,
    policy_positions,
    policy_vocabulary,
    twin,
    write_identity,
)
from rolloutmq.trainer.policy.tokenizer import configured_fingerprint
from rolloutmq.trainer.process import INTERRUPTED, Stop, StoppedError, stop_on_signals
from rolloutmq.trainer.ranks import Lockstep, NoSharedWeights, Ranks, RankSilentError, met
from rolloutmq.trainer.sharding import Sharded
from rolloutmq.trainer.step.advantages import HIDDEN, BatchAdvantages, study
from rolloutmq.trainer.step.collate import Bounds, collate
from rolloutmq.trainer.step.gradient import leave_gradient
from rolloutmq.trainer.step.logprobs import LogprobScorer
from rolloutmq.trainer.step.optimizer import PolicyOptimizer, learning_rate
from rolloutmq.trainer.step.report import StepPart, StepReport
from rolloutmq.trainer.step.teacher_columns import columns_needed as columns_of_teacher
from rolloutmq.trainer.trained_log import PolicyAncestry, TrainedLog
from rolloutmq.trainer.weights.backends import owned
from rolloutmq.trainer.weights.share import Writable
from rolloutmq.trainer.weights.vllm_http import VllmSender

logger = logging.getLogger(__name__)

EVALUATION_SUPPLY_S: Final = 0.2
"""Longest wait for a server that has no weights, while the trainer waits for an evaluation."""
BARREN_LIMIT: Final = 100
"""Batches in a row without a signal after which the trainer fails; a policy that still varies gives one earlier."""


Connect = Callable[[Path, RunInfo, PolicyVersion, TrainerConfig, int], AbstractContextManager[BrokerClient]]
"""Joins the broker of a run directory as a rank with this version; see `trainer.broker_client.connect`."""


def main(run_dir: Path, rank: int = 0) -> int:
    """Train the run in `run_dir` to its last step, from its newest checkpoint if any; return the exit code.

    0 after the last step or the end of a replay; INTERRUPTED if a signal came first. Blocks; for the main thread of a
    process.
    """
    set_up_logging()
    return run_to_exit_code(partial(_run, run_dir, rank))


def run_to_exit_code(life: Callable[[], int]) -> int:
    """Run the trainer, log its error if any, and return the exit code; leave none of its threads behind.

    A gloo thread frees the tensors of a collective some time after the collective is done, and takes the GIL for it. If
    the interpreter ends meanwhile, Python ends that thread inside a destructor, and the process aborts
    (pytorch/pytorch#190489). Torch joins these threads when the last reference to the process group goes, not in
    `destroy_process_group`. Sharded modules hold references, in cycles, and so do the frames of an error. The join
    waits for a running collective, no longer than any wait for another rank.
    """
    try:
        code = life()
    except Exception as error:  # noqa: BLE001 - the task boundary of the process
        code = log_failure("trainer", error)
        if isinstance(error, RankSilentError):
            code = MISSED_FELLOW
    gc.collect()  # only now the frames of the error are gone
    return code


def _run(run_dir: Path, rank: int) -> int:
    with stop_on_signals() as stop:
        config, layout = load_run(run_dir)
        torch.set_num_threads(config.trainer.threads)
        # Vanishing activations become subnormal numbers, which a CPU computes thirty times slower.
        torch.set_flush_denormal(True)
        reached = PolicyVersion()
        with suppress(StoppedError), ExitStack() as stack:
            with stop.interrupting():
                own = config.trainer
                meeting = met(layout.ranks, rank, own.ranks, own.rank_patience_s)
                ranks = stack.enter_context(meeting)
            reached = train(config, layout, stop, ranks=ranks)
    return INTERRUPTED if stop.asked and reached.step < config.trainer.steps else 0


def train(
    config: RunConfig,
    layout: RunLayout,
    stop: Stop,
    join: Connect = connect,
    ranks: Ranks = Ranks(),
) -> PolicyVersion:
    """Take the steps of a run until the last one, or until asked to stop; return the version reached.

    A signal may end a wait in an orderly way. `join` connects to the broker; `ranks` are the ranks that take part.

    Raises:
        NothingToLearnError: Too many batches in a row had no signal.
        MissingError: The device does not exist.
    """
    saved = checkpoint.latest(layout.checkpoints)
    if saved:
        checkpoint.require_tokenizer(saved, configured_fingerprint(config.model))
    incarnation = ranks.most(checkpoint.next_incarnation(layout.checkpoints) if ranks.leads else 0)
    version = PolicyVersion(incarnation, saved.state.version.step if saved else 0)
    if ranks.most(version.step) != version.step:
        raise ConfigError(
            "trainer.ranks",
            f"another rank has a newer checkpoint than step {version.step}; give all ranks one run directory",
        )
    policy = moved(build_policy(config.model, config.run.seed), find_device(config.trainer.device))
    lora = config.trainer.lora
    adapters = Adapters(policy, lora, config.model.path) if lora else None
    if saved and adapters:
        adapters.restore(saved.adapters, saved.state.base, saved.state.alpha)
    elif saved:
        checkpoint.restore_policy(saved, policy)
    if ranks.leads:
        write_identity(policy, config.model, layout.model)

    shared = owned(policy, config, layout, version) if ranks.leads else nullcontext(NoSharedWeights())
    # The line of the leading rank covers all ranks.
    journal_file = layout.trained if ranks.leads else Path(os.devnull)
    with shared as share, closing(TrainedLog(journal_file)) as journal:
        if adapters:
            policy = adapters.inject()
        elif ranks.size > 1:
            policy = twin(policy)  # the shared one stays unsharded
        trainer = Trainer(config, layout, policy, share, journal, version, adapters, ranks)
        if saved:
            trainer.resume(saved)
            del saved  # its mapped files would keep disk space after their removal
        if incarnation:
            journal.write(SettledBatch(at=time.time(), version=version, resumed=True))
        logger.info("ready incarnation=%d step=%d of=%d", *astuple(version), config.trainer.steps)
        with suppress(StoppedError), ExitStack() as stack:
            with stop.interrupting():
                joining = join(layout.root, trainer.info(), version, config.trainer, ranks.rank)
                broker = stack.enter_context(joining)
            trainer.run(broker, stop)
        logger.info("ended incarnation=%d step=%d", *astuple(trainer.version))
    return trainer.version


class Trainer:
    """One incarnation of the trainer: its components and progress."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        policy: Policy,
        share: Writable,
        journal: TrainedLog,
        version: PolicyVersion,
        adapters: Adapters | None,
        ranks: Ranks,
    ) -> None:
        self._config = config.trainer
        self._run = config.run
        self._layout = layout
        self._policy = policy
        self._scorer = LogprobScorer(
            policy,
            config.trainer.logits_bytes,
            recompute_blocks=config.trainer.recompute_blocks,
            fp32_head=config.trainer.fp32_head,
        )
        self._share = share
        self._journal = journal
        self._adapters = adapters
        self._ranks = ranks
        self._lockstep: Lockstep[StepBatch] = Lockstep(ranks)
        self._sharded = Sharded(self._scorer, ranks) if ranks.size > 1 else None
        computed = self._sharded or adapters
        self._optimizer = PolicyOptimizer(
            policy,
            config.trainer,
            computed.publish if computed else None,
            masters=bool(self._sharded and self._sharded.masters),
        )
        self._bounds = Bounds(
            policy_vocabulary(policy),
            policy_positions(policy),
            (*columns_needed(config.trainer.loss), *columns_of_teacher(config.trainer.distillation)),
            configured_fingerprint(config.model),
        )
        self.version = version
        """Policy version of the shared weights."""
        self._covered = version.step
        """Step of the newest checkpoint; step 0 needs none, its weights come from the seed."""
        self._began = version.step
        self._proven: set[Path] = set()
        """Checkpoints that this incarnation knows to be valid."""
        self._ancestry = PolicyAncestry.read(layout.trained, version)
        self._unsettled: set[str] = set()
        self._barren = 0
        self._negligible: dict[str, LogThrottle] = {}
        self._evaluation = Evaluation(config, layout, version, ranks)

    def info(self) -> RunInfo:
        """Describe the run for the producers."""
        return RunInfo(
            run=self._run.name,
            tracking_project=self._run.tracking_project,
            tracking_group=self._run.tracking_group,
            batch_sequences=self._batch_sequences(),
            max_tokens=self._bounds.positions,
            checkpoint_dir=str(self._layout.checkpoints),
            checkpoint_interval=self._config.checkpoint_interval,
            starting_step=self.version.step,
            total_steps=self._config.steps,
            started=True,
        )

    def _batch_sequences(self) -> int:
        """Return the sequences of a step; with a token budget, the fewest that fill it."""
        return self._config.batch_sequences or max(1, self._config.batch_tokens // self._bounds.positions)

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Restore optimizer, random state and unsettled groups; the policy has its weights already."""
        self._optimizer.restore(saved.optimizer)
        torch.set_rng_state(checkpoint.random_state(saved))
        self._unsettled = set(saved.state.unsettled)
        self._proven.add(saved.path)

    def run(self, broker: BrokerClient, stop: Stop) -> None:
        """Train on batch after batch until the last step, the end of a replay, or a stop; then write a checkpoint.

        Evaluate before and after.
        """
        if self._covered:
            self._commit(broker)
        meanwhile = PointWait(partial(self._supply, EVALUATION_SUPPLY_S), broker.waited)
        with closing(self._evaluation):
            with suppress(StoppedError):
                with meanwhile:
                    self._evaluation.before_first(self.version, stop, meanwhile)
                self._train(broker, stop)
            self._save(broker)
            # Also if this rank was asked to stop: all go the same way.
            if self.version.step >= self._config.steps:
                with suppress(StoppedError), meanwhile:
                    self._evaluation.after_last(self.version, stop, meanwhile)

    def _train(self, broker: BrokerClient, stop: Stop) -> None:
        """Train until the last step, the end of a replay, or a stop."""
        with suppress(StoppedError), self._to_the_end_of_a_replay():
            began = time.perf_counter()
            while self.version.step < self._config.steps:
                batch = self._lockstep.pull(lambda: self._pull(broker, stop))
                if batch is None:
                    broker.progress()
                    continue
                pulled, age = time.perf_counter(), partial(self._ancestry.staleness, self.version)
                known, seed = self._unsettled, self._run.seed
                advantages = study(batch.groups, self._config, self._bounds, known, seed, age, batch.moments)
                metrics = self._learn(advantages, broker)
                parts = self._ranks.every(StepPart.of(batch, advantages, self._config.rewards))
                report = StepReport(parts, self.version, metrics)
                self._note_negligible(report)
                if metrics:
                    self._barren = 0
                elif reason := report.barren_because:
                    self._note_barren(report, reason, broker)
                self._ancestry.took(self.version, report.trained)
                wanted = self._settle(report, batch, advantages, broker, stop)
                if metrics and self._ranks.leads:
                    times = (pulled - began, time.perf_counter() - pulled)
                    broker.publish(topics.STEP, report.event(self._run.name, time.time(), *times))
                if wanted or self.version.step >= self._covered + self._config.checkpoint_interval:
                    self._save(broker)
                if self.version.step < self._config.steps:
                    self._evaluation.after_step(self.version)
                began = time.perf_counter()

    @contextmanager
    def _to_the_end_of_a_replay(self) -> Iterator[None]:
        try:
            yield
        except EndOfReplayError:
            logger.info("replay ended step=%d of=%d", self.version.step, self._config.steps)

    def _pull(self, broker: BrokerClient, stop: Stop) -> StepBatch | None:
        try:
            with stop.interrupting():
                if not self._supply(self._config.pull_wait_s):
                    return None  # no server can sample yet; returning keeps this rank responsive
                return broker.pull(self.version.step + 1, self.version)
        except BrokerUnavailableError as error:
            logger.warning("broker unavailable error=%s", error)
            return None

    def _supply(self, wait_s: float) -> bool:
        """Give the weights to a server that has none, where the trainer sends them; False if none can sample yet."""
        return not isinstance(self._share, VllmSender) or self._share.supply(wait_s)

    def _learn(self, advantages: BatchAdvantages, broker: BrokerClient) -> dict[str, float]:
        """Take one optimizer step if there is a signal; return its metrics, or an empty dictionary."""
        if not any(self._ranks.sums(len(advantages.examples))):
            return {}
        step = self.version.step + 1
        tokens, pack = self._config.micro_batch_tokens, self._config.pack and self._scorer.packs
        passes = (
            collate(advantages.examples, tokens, self._bounds.columns, pack=pack)
            if advantages.examples
            else []
        )

        def after_each() -> None:
            self._optimizer.take_gradients()
            broker.progress()

        metrics = leave_gradient(passes, step, self._config, self._scorer, self._ranks, after_each)
        rate = learning_rate(self._config, step)
        after = PolicyVersion(self.version.incarnation, step)
        norm = self._optimizer.step(rate, self._share.writing(after))
        if not isfinite(norm):
            # Weights that are not finite cannot be repaired; the batch can be spared.
            advantages.void("the gradient of its step is not finite")
            return {}
        self.version = after
        return metrics | {"learning_rate": rate, "grad_norm": norm}

    def _note_negligible(self, report: StepReport) -> None:
        if not self._ranks.leads:
            return
        for env, groups in report.negligible.items():
            throttle = self._negligible.setdefault(env, LogThrottle())
            if throttle.is_due(env, time.monotonic()):
                remedy = "bound the scores, then resume with trainer.rewards.half_life_groups"
                logger.warning("groups left out env=%s groups=%d reason=%s; %s", env, groups, HIDDEN, remedy)

    def _note_barren(self, report: StepReport, reason: str, broker: BrokerClient) -> None:
        self._barren += 1
        if self._ranks.leads:
            skipped = report.skipped(self._run.name, time.time())
            broker.publish(topics.telemetry("skipped", self._run.name), skipped)
        logger.info("batch without signal number=%d reason=%s", self._barren, reason)
        if self._barren >= BARREN_LIMIT:
            raise NothingToLearnError(self._barren, reason)

    def _settle(
        self,
        report: StepReport,
        batch: StepBatch,
        advantages: BatchAdvantages,
        broker: BrokerClient,
        stop: Stop,
    ) -> bool:
        """Log what was trained on, then settle; return whether the broker wants a checkpoint soon."""
        if line := report.line(time.time()):
            self._journal.write(line)
        # Until the broker has answered all ranks, these may be redelivered to any of them.
        self._unsettled.update(report.trained)
        self._ranks.most(0)  # no rank settles before the line is in the log
        settle = partial(
            broker.settle,
            batch,
            version=report.after,
            trained=[*(group.group_id for group in advantages.trained), *advantages.repeated],
            filtered=[group.group_id for group in advantages.filtered],
            rejected=advantages.rejected,
        )
        lost = wanted = False
        try:
            wanted = _until_answered(settle, stop)
        except LeaseLostError as error:
            lost = True
            groups = len(advantages.trained)
            logger.warning("lease lost step=%d groups=%d error=%s", report.after.step, groups, error)
        except BrokerUnavailableError:
            lost = True  # unknown whether it was settled; the next pull ends the run in an orderly way
        if not self._ranks.most(lost):
            self._unsettled.difference_update(report.trained, report.repeated)
        return bool(self._ranks.most(wanted))

    def _save(self, broker: BrokerClient) -> None:
        """Write a checkpoint of the current version unless there is one, and commit."""
        if self.version.step > self._covered:
            unsettled = tuple(sorted(self._unsettled))
            state = TrainerState(version=self.version, unsettled=unsettled)
            if self._ranks.leads:
                weights = self._sharded.plain if self._sharded else self._policy
                what = state, weights, self._optimizer, self._adapters
                path = checkpoint.save(self._layout.checkpoints, self._layout.model, *what)
                keep = self._config.keep_checkpoints
                checkpoint.prune(path, keep, began=self._began, proven=self._proven)
                logger.info("checkpoint written path=%s", path)
            else:
                self._optimizer.state()  # takes part in the gather
            self._ranks.most(0)  # all ranks wait until it is on disk
            self._covered = self.version.step
        self._commit(broker)

    def _commit(self, broker: BrokerClient) -> None:
        if not self._ranks.leads:
            return
        try:
            broker.commit(self.version)
        except BrokerUnavailableError as error:
            # Harmless: the next commit covers this one, and a resume reports the version anyway.
            logger.warning("commit unconfirmed step=%d error=%s", self.version.step, error)


def _until_answered(settle: Callable[..., bool], stop: Stop) -> bool:
    """Settle, repeating while the broker is away; after a stop request, once more with a time limit."""
    try:
        with stop.interrupting():
            while True:
                try:
                    return settle()
                except BrokerUnavailableError as error:
                    logger.warning("broker unavailable, settling again error=%s", error)
    except StoppedError:
        # The interrupted call may have settled or not. Unsettled groups would be redelivered.
        return settle(patience_s=LAST_WORD_S)
