"""The trainer, top to bottom: pull a batch, learn from it, say so, keep a checkpoint now and then.

    pull -> judge the groups -> collate -> micro-batches: score, loss, backward -> step under the write lock
         -> line in trained.jsonl -> settle -> `step` event -> checkpoint -> commit

What makes it safe to kill at any point: a settlement is provisional until a checkpoint covers it. A trainer that comes
back restores the newest checkpoint, begins a new incarnation, voids in its journal what came after, and registers with
the version it has; the broker then hands out the batches after it again, unchanged and in their order.

A lease that is lost after the step was taken (the trainer hung, or the broker was another one meanwhile): the step
stands, for others have sampled from it, and so does its line. The groups come again; they are remembered, in the
checkpoint too, and are settled then without being learned from a second time. A step is therefore never undone, and
no group is ever trained on twice, at the price of a few ids in memory.

A batch without any signal is settled and is no step: the version stays and the next batch is pulled. After
`BARREN_LIMIT` such batches in a row there is nothing to be learned, and the trainer fails and says so.

Left out on purpose. A reference model of its own: log-probabilities of one come with the groups, as `ref_logprobs`.
Several optimizer steps a batch: off-policy drift for little. Overlap of pull and step: the pull of a waiting
batch takes a millisecond. Autocast: it costs more than it brings at this size, and the weights have their type already.
Several ranks take each step together, in lockstep (`ranks`); a rank that is alone does the same with itself.
"""

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

from rolloutmq.bus import topics
from rolloutmq.bus.lifecycle import log_failure, set_up_logging
from rolloutmq.bus.rundir import load_run
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.delivery import RunInfo
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ConfigError,
    EndOfReplayError,
    LeaseLostError,
    NothingToLearnError,
)
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import MISSED_FELLOW
from rolloutmq.schemas.records import SettledBatch
from rolloutmq.schemas.training import TrainerConfig
from rolloutmq.trainer import checkpoint
from rolloutmq.trainer.account import Account, Part
from rolloutmq.trainer.adapters import Adapters
from rolloutmq.trainer.collate import Bounds, collate
from rolloutmq.trainer.descent import Descent
from rolloutmq.trainer.device import find_device, moved
from rolloutmq.trainer.gradient import leave_gradient
from rolloutmq.trainer.journal import Journal
from rolloutmq.trainer.lesson import Lesson, study
from rolloutmq.trainer.losses.registry import columns_needed
from rolloutmq.trainer.model import (
    Policy,
    build_policy,
    policy_positions,
    policy_vocabulary,
    twin,
    write_identity,
)
from rolloutmq.trainer.optimizer import PolicyOptimizer, learning_rate
from rolloutmq.trainer.process import INTERRUPTED, Stop, StoppedError, stop_on_signals
from rolloutmq.trainer.ranks import Lockstep, Ranks, RankSilentError, Unshared, met
from rolloutmq.trainer.scoring import Scorer
from rolloutmq.trainer.sharding import Sharded
from rolloutmq.trainer.teaching import columns_needed as columns_of_teacher
from rolloutmq.trainer.tokenizer import configured_fingerprint
from rolloutmq.trainer.uplink import LAST_WORD_S, PulledBatch, Uplink, connect
from rolloutmq.trainer.weights.backends import owned
from rolloutmq.trainer.weights.sender import Sender
from rolloutmq.trainer.weights.share import Writable

logger = logging.getLogger(__name__)

BARREN_LIMIT: Final = 100
"""Batches in a row without any signal; a policy that still varies at all gives one long before."""


Connect = Callable[[Path, RunInfo, PolicyVersion, TrainerConfig, int], AbstractContextManager[Uplink]]
"""Joins the broker of a run directory as a rank that has this version; see `trainer.uplink.connect`."""


def main(run_dir: Path, rank: int = 0) -> int:
    """Train the run in `run_dir` to its last step, from its newest checkpoint if it has one; return the exit code.

    0 says that the last step is taken, or the last batch of a replay; INTERRUPTED that a signal came before it. Blocks;
    for the main thread of a process.
    """
    set_up_logging()
    try:
        with stop_on_signals() as stop:
            config, layout = load_run(run_dir)
            torch.set_num_threads(config.trainer.threads)
            # Activations that have died out become subnormal numbers, on which a CPU is thirty times slower.
            torch.set_flush_denormal(True)
            reached = PolicyVersion()
            with suppress(StoppedError), ExitStack() as stack:
                with stop.interrupting():
                    own = config.trainer
                    meeting = met(layout.ranks, rank, own.ranks, own.rank_patience_s)
                    ranks = stack.enter_context(meeting)
                reached = train(config, layout, stop, ranks=ranks)
    except Exception as error:  # noqa: BLE001 - the task boundary of the process
        code = log_failure("trainer", error)
        return MISSED_FELLOW if isinstance(error, RankSilentError) else code
    return INTERRUPTED if stop.asked and reached.step < config.trainer.steps else 0


def train(
    config: RunConfig,
    layout: RunLayout,
    stop: Stop,
    join: Connect = connect,
    ranks: Ranks = Ranks(),
) -> PolicyVersion:
    """Take the steps of a run until the last one, or until asked to stop; return the version reached.

    A signal may end it in order from within a wait. `join` is how the broker is reached, `ranks` who takes part.

    Raises:
        NothingToLearnError: Too many batches in a row had no signal.
        MissingError: There is no such device.
    """
    saved = checkpoint.latest(layout.checkpoints)
    incarnation = ranks.most(checkpoint.next_incarnation(layout.checkpoints) if ranks.leads else 0)
    version = PolicyVersion(incarnation, saved.state.version.step if saved else 0)
    if ranks.most(version.step) != version.step:
        raise ConfigError(
            "trainer.ranks", f"another rank has a newer checkpoint than that of step {version.step}"
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

    shared = owned(policy, config, layout, version) if ranks.leads else nullcontext(Unshared())
    # What the other ranks would write stands in the line of the one that leads.
    journal_file = layout.trained if ranks.leads else Path(os.devnull)
    with shared as share, closing(Journal(journal_file)) as journal:
        if adapters:
            policy = adapters.inject()
        elif ranks.size > 1:
            policy = twin(policy)  # the one that is shared stays whole
        trainer = Trainer(config, layout, policy, share, journal, version, adapters, ranks)
        if saved:
            trainer.resume(saved)
            del saved  # what it has mapped would keep the room of a checkpoint that is removed later
        if incarnation:
            journal.write(SettledBatch(at=time.time(), version=version, resumed=True))
        logger.info("ready incarnation=%d step=%d of=%d", *astuple(version), config.trainer.steps)
        with suppress(StoppedError), ExitStack() as stack:
            with stop.interrupting():
                joining = join(layout.root, trainer.info(), version, config.trainer, ranks.rank)
                uplink = stack.enter_context(joining)
            trainer.run(uplink, stop)
        logger.info("ended incarnation=%d step=%d", *astuple(trainer.version))
    return trainer.version


class Trainer:
    """One life of the trainer: what it learns with, and how far it is."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        policy: Policy,
        share: Writable,
        journal: Journal,
        version: PolicyVersion,
        adapters: Adapters | None,
        ranks: Ranks,
    ) -> None:
        self._config = config.trainer
        self._run = config.run
        self._layout = layout
        self._policy = policy
        self._scorer = Scorer(
            policy, config.trainer.logits_bytes, recompute_blocks=config.trainer.recompute_blocks
        )
        self._share = share
        self._journal = journal
        self._adapters = adapters
        self._ranks = ranks
        self._lockstep: Lockstep[PulledBatch] = Lockstep(ranks)
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
        """The policy that the shared weights are."""
        self._covered = version.step
        """The step that the newest checkpoint covers; the weights of step 0 are those of the seed."""
        self._began = version.step
        self._proven: set[Path] = set()
        """Checkpoints that this life knows to be whole."""
        self._descent = Descent.told(layout.trained, version)
        self._unsettled: set[str] = set()
        self._barren = 0

    def info(self) -> RunInfo:
        """Describe the run as the broker passes it on to producers."""
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
        """Return the sequences of a step; of a budget of tokens the fewest that fill it, until there was one."""
        return self._config.batch_sequences or max(1, self._config.batch_tokens // self._bounds.positions)

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint whose weights the policy has already."""
        self._optimizer.restore(saved.optimizer)
        torch.set_rng_state(checkpoint.random_state(saved))
        self._unsettled = set(saved.state.unsettled)
        self._proven.add(saved.path)

    def run(self, uplink: Uplink, stop: Stop) -> None:
        """Learn from batch after batch until the last step, the end of a replay, or a stop; leave a checkpoint."""
        if self._covered:
            self._commit(uplink)
        with suppress(StoppedError), self._to_the_end_of_a_replay():
            began = time.perf_counter()
            while self.version.step < self._config.steps:
                batch = self._lockstep.pull(lambda: self._pull(uplink, stop))
                if batch is None:
                    uplink.progress()
                    continue
                pulled, age = time.perf_counter(), partial(self._descent.distance, self.version)
                lesson = study(batch.groups, self._config, self._bounds, self._unsettled, self._run.seed, age)
                metrics = self._learn(lesson, uplink)
                parts = self._ranks.every(Part.of(batch, lesson))
                account = Account(parts, self.version, metrics)
                if metrics:
                    self._barren = 0
                elif reason := account.barren_because:
                    self._note_barren(reason)
                self._descent.took(self.version, account.trained)
                wanted = self._settle(account, batch, lesson, uplink, stop)
                if metrics and self._ranks.leads:
                    times = (pulled - began, time.perf_counter() - pulled)
                    uplink.publish(topics.STEP, account.event(self._run.name, time.time(), *times))
                if wanted or self.version.step >= self._covered + self._config.checkpoint_interval:
                    self._save(uplink)
                began = time.perf_counter()
        self._save(uplink)

    @contextmanager
    def _to_the_end_of_a_replay(self) -> Iterator[None]:
        try:
            yield
        except EndOfReplayError:
            logger.info("the replay is over step=%d of=%d", self.version.step, self._config.steps)

    def _pull(self, uplink: Uplink, stop: Stop) -> PulledBatch | None:
        try:
            with stop.interrupting():
                if isinstance(self._share, Sender) and not self._share.supply(self._config.pull_wait_s):
                    return None  # nobody could sample yet; for a server that starts no rank is missed
                return uplink.pull(self.version.step + 1, self.version)
        except BrokerUnavailableError as error:
            logger.warning("no broker error=%s", error)
            return None

    def _learn(self, lesson: Lesson, uplink: Uplink) -> dict[str, float]:
        """Take one optimizer step if there is anything to learn; return its metrics, or nothing if there was none."""
        if not any(self._ranks.sums(len(lesson.examples))):
            return {}
        step = self.version.step + 1
        tokens, pack = self._config.micro_batch_tokens, self._config.pack and self._scorer.packs
        passes = collate(lesson.examples, tokens, self._bounds.columns, pack=pack) if lesson.examples else []

        def after_each() -> None:
            self._optimizer.take_gradients()
            uplink.progress()

        metrics = leave_gradient(passes, step, self._config, self._scorer, self._ranks, after_each)
        rate = learning_rate(self._config, step)
        after = PolicyVersion(self.version.incarnation, step)
        norm = self._optimizer.step(rate, self._share.writing(after))
        if not isfinite(norm):
            # Weights that are not numbers could never be repaired; this batch can be done without.
            lesson.void("its gradient is not finite")
            return {}
        self.version = after
        return metrics | {"learning_rate": rate, "grad_norm": norm}

    def _note_barren(self, reason: str) -> None:
        self._barren += 1
        logger.info("no signal in batch number=%d reason=%s", self._barren, reason)
        if self._barren >= BARREN_LIMIT:
            raise NothingToLearnError(self._barren, reason)

    def _settle(
        self, account: Account, batch: PulledBatch, lesson: Lesson, uplink: Uplink, stop: Stop
    ) -> bool:
        """Log what was learned from, then tell the broker; return whether it wants a checkpoint soon."""
        if line := account.line(time.time()):
            self._journal.write(line)
        # Until the broker has answered all ranks, these may come again, to any of them.
        self._unsettled.update(account.trained)
        self._ranks.most(0)  # nobody tells the broker what is not in the journal yet
        settle = partial(
            uplink.settle,
            batch,
            version=account.after,
            trained=[*(group.group_id for group in lesson.trained), *lesson.repeated],
            filtered=[group.group_id for group in lesson.filtered],
            rejected=lesson.rejected,
        )
        lost = wanted = False
        try:
            wanted = _until_answered(settle, stop)
        except LeaseLostError as error:
            lost = True
            groups = len(lesson.trained)
            logger.warning("lease lost step=%d groups=%d error=%s", account.after.step, groups, error)
        except BrokerUnavailableError:
            lost = True  # whether it was settled is not known; the next pull ends the run in order
        if not self._ranks.most(lost):
            self._unsettled.difference_update(account.trained, account.repeated)
        return bool(self._ranks.most(wanted))

    def _save(self, uplink: Uplink) -> None:
        """Write a checkpoint of the present version unless there is one, and tell the broker."""
        if self.version.step > self._covered:
            unsettled = tuple(sorted(self._unsettled))
            state = checkpoint.TrainerState(version=self.version, unsettled=unsettled)
            if self._ranks.leads:
                weights = self._sharded.plain if self._sharded else self._policy
                what = state, weights, self._optimizer, self._adapters
                path = checkpoint.save(self._layout.checkpoints, self._layout.model, *what)
                keep = self._config.keep_checkpoints
                checkpoint.prune(path, keep, began=self._began, proven=self._proven)
                logger.info("checkpoint path=%s", path)
            else:
                self._optimizer.state()  # gathered together
            self._ranks.most(0)  # nobody is done before it is on disk
            self._covered = self.version.step
        self._commit(uplink)

    def _commit(self, uplink: Uplink) -> None:
        if not self._ranks.leads:
            return
        try:
            uplink.commit(self.version)
        except BrokerUnavailableError as error:
            # Nothing is lost by it: the next commit covers this one, and a resume tells the version anyway.
            logger.warning("commit not confirmed step=%d error=%s", self.version.step, error)


def _until_answered(settle: Callable[..., bool], stop: Stop) -> bool:
    """Settle, for as long as the broker is away; where a stop was asked for, a last time and briefly."""
    try:
        with stop.interrupting():
            while True:
                try:
                    return settle()
                except BrokerUnavailableError as error:
                    logger.warning("no broker, settling again error=%s", error)
    except StoppedError:
        # What was interrupted may be settled or not. Unsettled, what was learned would come again.
        return settle(patience_s=LAST_WORD_S)
