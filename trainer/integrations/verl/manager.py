"""`BusAgentLoopManager`: verl's agent loop manager whose trajectories come from workers of the bus.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=rolloutmq.trainer.integrations.verl.manager.BusAgentLoopManager
    +bus.where=runs/mine +bus.environment=math

Each prompt is one task for an environment of the bus. verl goes on at once and finds the trajectories in TransferQueue.
"""

import logging
from collections.abc import Iterator
from typing import Any

from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer.integrations.extras import from_extra
from rolloutmq.trainer.integrations.verl.bridge import Bridge, BusOptions, opened
from rolloutmq.trainer.integrations.verl.prompts import Prompt, Sampling, prompts_of
from rolloutmq.trainer.integrations.verl.sampling import BusCheckpoint, BusReplayBuffer, BusReplayBufferAsync
from rolloutmq.trainer.integrations.verl.settings import require_classes, require_known_advantage
from rolloutmq.trainer.integrations.verl.store import TransferQueueStore

with from_extra("verl"):
    from omegaconf import DictConfig, OmegaConf
    from tensordict import NonTensorData, NonTensorStack, TensorDict
    from verl.utils.ray_utils import auto_await

logger = logging.getLogger(__name__)


class BusAgentLoopManager:
    """Submits verl's prompts as tasks. verl makes it by `create`, once TransferQueue is initialized.

    Args:
        config: verl's configuration, with the settings of the bus in `bus`, see `BusOptions`.
        llm_client: verl's client of its engines; unused, because the workers of the bus sample.
        teacher_client: Must be None.
        reward_loop_worker_handles: verl's reward workers; unused, because the environment gives the scores.

    Attributes:
        bridge: Connection to the bus, which the replay buffer and the checkpoint callback find, too.

    Raises:
        ConfigError: A setting of `bus` is wrong, verl distills, its trainer lacks a class of the adapter or cannot
            compute its advantage; names the setting.
    """

    def __init__(
        self,
        config: DictConfig,
        llm_client: Any = None,  # noqa: ARG002 - verl gives it
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,  # noqa: ARG002 - verl gives it
    ) -> None:
        if teacher_client is not None:
            raise ConfigError(
                "distillation", "must be off, because verl's teachers see no group of the bus (got on)"
            )
        synchronous = config.trainer.v1.trainer_mode == "sync"
        require_known_advantage(config)
        require_classes(config, BusReplayBuffer if synchronous else BusReplayBufferAsync, BusCheckpoint)
        rollout = config.actor_rollout_ref.rollout
        self._training, self._validation = _sampling(rollout), _sampling(rollout.val_kwargs)
        trainer, data = config.trainer, config.data
        given = config.get("bus")
        store = TransferQueueStore()
        self.bridge = opened(
            Bridge(
                options=BusOptions.of(_plain(given)),
                store=store,
                info=RunInfo(
                    batch_sequences=data.train_batch_size * rollout.n,
                    checkpoint_dir=str(trainer.default_local_dir),
                    checkpoint_interval=max(0, trainer.save_freq),
                    total_steps=trainer.get("total_training_steps") or 0,
                    started=True,
                ),
                checkpoints=str(trainer.default_local_dir),
                temperature=float(rollout.temperature),
            )
        )
        reopened = store.reopen("train")
        if reopened:
            logger.info("restored prompts are asked again prompts=%d", reopened)

    @classmethod
    @auto_await  # type: ignore[untyped-decorator] # verl calls it with and without await
    async def create(cls, *args: Any, **kwargs: Any) -> "BusAgentLoopManager":
        """Return a manager with these arguments."""
        return cls(*args, **kwargs)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Submit the prompts, which verl has registered in TransferQueue, and return at once.

        The first call joins the bus.

        Args:
            prompts: Rows of verl's data set with `uid` and `global_steps`, and with `validate` in a validation.

        Raises:
            ConfigError: The run has no environment of the name in `bus`.
            WaitTimeoutError: There is no broker; tells where it was looked for.
            RefusedError: The broker does not accept this trainer.
        """
        self.bridge.submit(self._prompts(prompts))

    def _prompts(self, batch: TensorDict) -> list[Prompt]:
        return prompts_of(_rows(batch), self._training, self._validation)

    def close(self) -> None:
        """Leave the bus; groups that are not settled return to the queue. Blocks. May be called twice."""
        self.bridge.close()


def _sampling(given: DictConfig) -> Sampling:
    return Sampling(given.n, {name: given.get(name) for name in ("temperature", "top_p", "top_k")})


def _rows(batch: TensorDict) -> Iterator[dict[str, Any]]:
    """Yield the fields of each prompt, as verl's own workers see them."""
    columns = {name: batch.get(name) for name in batch.keys()}  # noqa: SIM118 - a TensorDict iterates over its rows
    for row in range(len(batch)):
        yield {name: _field(column, row) for name, column in columns.items()}


def _field(column: Any, row: int) -> Any:
    if isinstance(column, NonTensorStack):  # one value for each prompt
        return column[row].data
    return column.data if isinstance(column, NonTensorData) else column[row]


def _plain(given: object) -> object:
    """Return a setting as plain objects, with keys that are strings."""
    if isinstance(given, dict):
        return {str(key): _plain(value) for key, value in given.items()}
    return _plain(OmegaConf.to_container(given, resolve=True)) if OmegaConf.is_config(given) else given
