"""One life of a TRL trainer on the bus: the batch under way, and the policy it leads to.

**Ranks.** Each rank is a consumer. The broker deals whole groups by tokens, so ranks may have different numbers of
them; TRL wants the same number of rows everywhere, in the order of the groups. So the ranks exchange their shards and
each takes its part of all rows. A group may then lie on two ranks: TRL gathers all rewards in the order of the ranks
before it compares the rows of a group. Each rank settles its own shard.

**Log-probabilities.** TRL uses those of a rollout function in its importance sampling correction only where it samples
with vLLM by itself. `_correct` turns the correction on, and `_require_corrected` checks that it is at work.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch.distributed as dist

from rolloutmq.bus.consumer.client import BlockingBatch, BlockingConsumer
from rolloutmq.schemas.errors import LeaseLostError, UsageError
from rolloutmq.schemas.files import SettledBatch
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected
from rolloutmq.trainer.integrations.checkpoints import commit, make_durable
from rolloutmq.trainer.integrations.failed_steps import name_groups_in
from rolloutmq.trainer.integrations.trl.publishing import Publication
from rolloutmq.trainer.integrations.trl.rows import (
    Demand,
    PulledGroup,
    Row,
    filled,
    pulled,
    without_signal,
)
from rolloutmq.trainer.integrations.trl.settings import Generation
from rolloutmq.trainer.step.lane_scores import merged
from rolloutmq.trainer.trained_log import TrainedLog

logger = logging.getLogger(__name__)

SCORE: Final = "bus_score"
"""Extra field of a row for reward functions: the score of the environment, None for filler. Beside it `bus_env`."""
STALENESS: Final = "bus_staleness"
CORRECTED: Final = "importance_sampling_ratio"
"""Input of TRL's loss that the log-probabilities of the sampling policy end in."""


class Training:
    """One life of a trainer on the bus. All ranks call each method, at the same places.

    Args:
        tell: Publishes the report of a step; does nothing on ranks that do not lead.

    Attributes:
        consumer: Connection of this rank.
        version: Policy of the weights, after the last settled batch.
        leads: Whether this rank publishes, logs and commits.
    """

    def __init__(
        self,
        *,
        consumer: BlockingConsumer,
        journal: TrainedLog,
        publication: Publication,
        tell: Callable[[StepDone], object],
        demand: Demand,
        generation: Generation,
        version: PolicyVersion,
        rank: int,
        ranks: int,
    ) -> None:
        self.consumer = consumer
        self.version = version
        self.leads = rank == 0
        self._journal = journal
        self._publication = publication
        self._tell = tell
        self._demand = demand
        self._generation = generation
        self._rank = rank
        self._ranks = ranks
        self._trainer: Any = None
        self._batch: BlockingBatch | None = None
        self._groups: list[PulledGroup] = []
        """The groups of the batch, of all ranks, in the order of the rows; those with a fault last."""
        self._left = 0
        """Optimizer steps until the batch is used up."""
        self._loss = 0.0
        self._asked_at = self._pulled_at = time.monotonic()
        self._usable = False
        """Whether this life has seen a group that it can train on."""

    @property
    def step_covered(self) -> int | None:
        """Step of the policy that a checkpoint written now has; None inside a generation."""
        return self.version.step if self._batch is None else None

    def generate(self, rows: int, trainer: Any) -> dict[str, Any]:
        """Pull a batch and return this rank's rows; see `BusRollouts.rollout`."""
        if rows != self._generation.rows:
            raise UsageError(
                f"prompts: must be {self._generation.rows}, per_device_train_batch_size * steps_per_generation "
                f"(got {rows}); leave TRL's sampler as it is"
            )
        if self._batch is not None:
            raise UsageError(
                f"rollout_func: was called with {self._left} optimizer steps of the generation before to go; "
                "leave TRL's schedule as it is"
            )
        if self._trainer is None:
            _correct(trainer)
            for owner, method in ((trainer, "compute_loss"), (trainer.accelerator, "backward")):
                name_groups_in(owner, method, self._step_groups)
        self._trainer = trainer
        groups = self._pull()
        blank = getattr(trainer.processing_class, "eos_token_id", None)
        everything = filled(
            [group for group in groups if not group.fault],
            self._generation.group_size,
            rows * self._ranks,
            blank if isinstance(blank, int) else 0,
        )
        self._left = self._generation.steps
        return fields(everything[self._rank * rows : (self._rank + 1) * rows])

    def _step_groups(self) -> tuple[int, list[str]]:
        """Return the number of the step under way, and its groups."""
        return self.version.step + 1, [group.group_id for group in self._groups if not group.fault]

    def _pull(self) -> list[PulledGroup]:
        """Pull until a batch has a group to train on; return the groups of all ranks."""
        self._asked_at = time.monotonic()
        while True:
            self._publication.supply()
            batch = self.consumer.pull(self.version.step + 1, self.version)
            mine = [
                pulled(group, age, self._rank, self._demand)
                for group, age in zip(batch.groups, batch.staleness(), strict=True)
            ]
            if len(set(from_all([(batch.lease, batch.generation)]))) > 1:
                continue  # one of the leases is lost; the live one delivers its shards again
            groups = sorted(from_all(mine), key=lambda group: bool(group.fault))
            self._batch, self._groups = batch, groups
            usable = [group for group in groups if not group.fault]
            self._require_room(len(usable))
            if usable:
                self._usable, self._pulled_at = True, time.monotonic()
                return groups
            if groups and not self._usable:
                raise UsageError(f"no group of the first batch can be trained on: {groups[0].fault}")
            self._settle(self.version, [])

    def _require_room(self, groups: int) -> None:
        room = self._generation.rows * self._ranks // self._generation.group_size
        if groups > room:
            raise UsageError(
                f"per_device_train_batch_size: an earlier life of this trainer pulled a batch of {groups} groups, "
                f"which does not fit into a generation of {room}; resume with the batch size before"
            )

    def stepped(self) -> bool:
        """Note an optimizer step, and settle the batch if it is used up; return whether to write a checkpoint soon."""
        self.consumer.progress()
        if self._batch is None:
            return False
        _require_corrected(self._trainer)
        self._left -= 1
        return self._finish() if not self._left else False

    def logged(self, logs: Mapping[str, Any]) -> None:
        """Note what TRL logs."""
        if isinstance(loss := logs.get("loss"), float):
            self._loss = loss

    def _finish(self) -> bool:
        after = PolicyVersion(self.version.incarnation, self.version.step + 1)
        self._publication.publish(after)
        groups, flat = self._groups, self._flat()
        wanted = self._settle(after, flat)
        self._tell(self._event(groups, flat))
        return wanted

    def _event(self, groups: Sequence[PulledGroup], flat: Sequence[str]) -> StepDone:
        """Return the report of a settled batch; its loss is the one that TRL has logged last."""
        usable = [group for group in groups if not group.fault]
        ages = [group.staleness for group in usable]
        return StepDone(
            run=self.consumer.info.run,
            incarnation=self.version.incarnation,
            step=self.version.step,
            at=time.time(),
            reward=sum(group.reward for group in usable) / len(usable),
            loss=self._loss,
            tokens=sum(group.tokens for group in usable),
            groups=len(groups),
            filtered=len(flat),
            staleness_max=max(ages),
            staleness_mean=sum(ages) / len(ages),
            pull_s=self._pulled_at - self._asked_at,
            step_s=time.monotonic() - self._pulled_at,
            extra={"rejected": len(groups) - len(usable)},
            scores=merged([lane for group in usable for lane in group.lanes]),
        )

    def _flat(self) -> list[str]:
        """Return the ids of the groups that gave TRL's loss nothing, on any rank."""
        trainer, size = self._trainer, self._generation.group_size
        usable = [group for group in self._groups if not group.fault]
        rewards = [list(given) for given in trainer._logs["rewards"].values()]
        whole = all(len(given) == self._generation.rows * self._ranks for given in rewards)
        alone = trainer.multi_objective_aggregation == "sum_then_normalize"
        # The penalty of the reference, an entropy bonus and a router's loss act on every row.
        others = trainer.beta or trainer._entropy_bonus_enabled or trainer.aux_loss_enabled
        if not (rewards and whole and alone) or others:
            return []
        flat = without_signal(rewards, len(usable), size)
        return [group.group_id for group, nothing in zip(usable, flat, strict=True) if nothing]

    def _settle(self, after: PolicyVersion, flat: Sequence[str]) -> bool:
        """Log what was trained on, then settle this rank's shard; return whether the broker wants a checkpoint soon."""
        batch, groups = self._batch, self._groups
        assert batch is not None
        gone = set(flat)
        trained = [group for group in groups if not group.fault and group.group_id not in gone]
        filtered = [group for group in groups if group.group_id in gone]
        faulty = [group for group in groups if group.fault]
        self._journal.write(
            SettledBatch(
                at=time.time(),
                version=after,
                trained=tuple(group.group_id for group in trained),
                filtered=tuple(group.group_id for group in filtered),
                rejected=tuple(group.group_id for group in faulty),
                staleness=tuple(group.staleness for group in trained),
                rewards=tuple(group.reward for group in (*trained, *filtered)),
                rewound=batch.rewound,
            )
        )
        from_all([0])  # no rank settles before the line is in the log
        try:
            reply = self.consumer.settle(
                batch,
                version=after,
                trained=[group.group_id for group in trained if group.rank == self._rank],
                filtered=[group.group_id for group in filtered if group.rank == self._rank],
                rejected=[
                    Rejected(group_id=group.group_id, reason=group.fault)
                    for group in faulty
                    if group.rank == self._rank
                ],
            )
        except LeaseLostError as error:
            error.add_note(
                "The optimizer step is done and cannot be taken back; resume from the last checkpoint."
            )
            raise
        for group in faulty:
            logger.warning("group rejected group=%s reason=%s", group.group_id, group.fault)
        self.version, self._batch, self._groups = after, None, []
        return any(from_all([reply.commit_wanted]))

    def commit(self, path: Path) -> None:
        """Report that a checkpoint covers the policy, once all ranks have written theirs and it is on disk.

        Args:
            path: Its folder.
        """
        from_all([0])  # the others may still write their random states
        if not self.leads:
            return
        if not path.is_dir():
            logger.warning("checkpoint is not there, and not committed path=%s", path)
            return
        make_durable(path)
        commit(self.consumer.commit, self.version)

    def end(self) -> None:
        """Settle a batch that was used in part: its groups were trained on, and must not come again."""
        if self._batch is not None and self._left < self._generation.steps:
            logger.warning("generation used in part steps_left=%d", self._left)
            self._finish()
        self.consumer.close()


def fields(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as the fields that TRL expects of a rollout function."""
    return {
        "prompt_ids": [row.prompt.tolist() for row in rows],
        "completion_ids": [row.completion.tolist() for row in rows],
        "logprobs": [row.logprobs.tolist() for row in rows],
        "env_mask": [row.mask.tolist() for row in rows],
        SCORE: [row.score for row in rows],
        STALENESS: [row.staleness for row in rows],
        "bus_env": [row.env for row in rows],
    }


def _correct(trainer: Any) -> None:
    """Make TRL's importance sampling correction use the log-probabilities of the rollout function.

    TRL applies it if `use_vllm` is set, which also makes its constructor start vLLM. Behind the constructor the
    attribute decides about the correction, and about keeping TRL's own vLLM in sync, which there is none of.
    """
    if trainer.vllm_importance_sampling_correction and not trainer.use_vllm:
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1
        trainer.use_vllm = True


def _require_corrected(trainer: Any) -> None:
    """Check that the log-probabilities of the sampling policy are an input of the loss.

    Raises:
        UsageError: They are not, although the correction is on.
    """
    if not trainer.vllm_importance_sampling_correction:
        return
    inputs = trainer._buffered_inputs[0]
    if not trainer.use_vllm or CORRECTED not in inputs:
        raise UsageError(
            f"trl: this release ignores the log-probabilities of a rollout function (got {version('trl')}); "
            "install rolloutmq[trl]"
        )


def from_all(own: list[Any]) -> list[Any]:
    """Return the lists of all ranks, one behind the other. All ranks call it; it waits for them."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return own
    found: list[list[Any]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return [one for part in found for one in part]
