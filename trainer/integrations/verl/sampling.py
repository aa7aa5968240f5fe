"""verl's replay buffers and checkpoint callback on the bus: which groups a step used, their settlement, and commits.

    trainer.v1.sampler.custom_sampler.path=pkg://rolloutmq.trainer.integrations.verl.sampling
    trainer.v1.sampler.custom_sampler.name=BusReplayBuffer          # BusReplayBufferAsync for an asynchronous trainer
    trainer.checkpoint_callback_class=rolloutmq.trainer.integrations.verl.sampling.BusCheckpoint

A step is over when verl writes its checkpoint, or samples for the next one. Then its groups are settled as trained.
What verl drops (failed, stale or uniform groups, and the surplus of a synchronous step) is filtered. A trainer that
comes back begins a new incarnation from the step of its checkpoint, and the broker delivers again what was settled
later.

The policy version of a group is `PolicyVersion(incarnation, global_steps)`; verl's version of its weights is the same
number.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolloutmq.trainer.integrations.checkpoints import make_durable
from rolloutmq.trainer.integrations.extras import from_extra
from rolloutmq.trainer.integrations.failed_steps import name_groups_in
from rolloutmq.trainer.integrations.verl.bridge import current
from rolloutmq.trainer.integrations.verl.settings import own_arguments

with from_extra("verl"):
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file with the step of the last durable checkpoint."""


class _Settling:
    """Mixin for verl's replay buffers.

    Args:
        refill_fn: verl's method that replaces prompts. Its trainer has the settings that verl gives to its own replay
            buffers alone, such as `algorithm.filter_groups`.
        sampler_kwargs: Further arguments of verl's replay buffer, such as `poll_interval`.
    """

    _step = 0

    def __init__(
        self, *, refill_fn: Any, sampler_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        trainer = refill_fn.__self__
        own = own_arguments(trainer.config, trainer._resolve_filter_groups_metric(), sampler_kwargs or {})
        super().__init__(refill_fn=refill_fn, sampler_kwargs=sampler_kwargs, **kwargs | own)  # type: ignore[call-arg]
        name_groups_in(trainer, "step", lambda: (self._step, current().groups_of(self._step)))

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Settle the groups of earlier steps, then sample as verl does. Waits for groups, and for the broker."""
        if partition_id != "train":
            return super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc,no-any-return]
        self._step = global_steps
        bridge = current()
        bridge.finish(global_steps - 1)
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        return batch, metrics | bridge.metrics()

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, Any]
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)  # type: ignore[misc]
        if partition_id == "train":
            trained = {key.split("_")[0] for key in batch.keys}
            current().use(self._step, trained, {*selected_prompt_uids} - trained)
        return batch

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        super()._clear_groups(partition_id, uids)  # type: ignore[misc]
        if partition_id == "train" and uids:
            current().drop(uids)


class BusReplayBuffer(_Settling, ReplayBuffer):  # type: ignore[misc]
    """verl's replay buffer of synchronous training, which settles the groups of the bus."""


class BusReplayBufferAsync(_Settling, ReplayBufferAsync):  # type: ignore[misc]
    """verl's replay buffer of asynchronous training, which settles the groups of the bus."""


class BusCheckpoint(CheckpointCallback):  # type: ignore[misc]
    """verl's checkpoint callback: settles the groups that a checkpoint covers, and commits it."""

    def on_save(
        self,
        trainer: Any,
        global_step: int,
        checkpoint_dir: str,
        async_save: bool = False,
        **kwargs: Any,
    ) -> None:
        """Settle and commit. Waits for the broker. An asynchronous save commits the last one that is on disk."""
        super().on_save(trainer, global_step, checkpoint_dir, async_save=async_save, **kwargs)
        bridge = current()
        bridge.finish(global_step)
        durable = _durable(Path(checkpoint_dir).parent) if async_save else global_step
        if durable is not None:
            folder = Path(checkpoint_dir).parent
            make_durable(folder / f"global_step_{durable}", [TRACKER])
            bridge.commit(durable)


def _durable(folder: Path) -> int | None:
    try:
        return int((folder / TRACKER).read_text())
    except (FileNotFoundError, ValueError):
        return None
