"""What the adapter makes of verl's settings, in verl's environment. Its last argument is a list of lists of overrides.

Prints for each the arguments of the replay buffer, or the error.
"""

import json
import sys
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rolloutmq.schemas.errors import ConfigError
from rolloutmq.trainer.integrations.verl.sampling import BusCheckpoint, BusReplayBuffer, BusReplayBufferAsync
from rolloutmq.trainer.integrations.verl.settings import (
    METRIC,
    own_arguments,
    require_classes,
    require_known_advantage,
)

NAMES = (
    METRIC,
    "sync_refill_failed_groups",
    "train_batch_size",
    "gen_batch_size",
    "max_inflight_gen_batches",
)


class Refilling(PPOTrainer):  # type: ignore[misc]
    """As much of verl's trainer as builds a replay buffer."""

    def __init__(self, config: Any) -> None:
        self.config, self.trainer_mode = config, config.trainer.v1.trainer_mode

    def on_step_end(self) -> None:
        """Do nothing."""


Refilling.__abstractmethods__ = frozenset()


def chosen(overrides: list[str]) -> dict[str, Any] | str:
    config = compose("ppo_trainer", overrides=overrides)
    synchronous = config.trainer.v1.trainer_mode == "sync"
    try:
        require_known_advantage(config)
        require_classes(config, BusReplayBuffer if synchronous else BusReplayBufferAsync, BusCheckpoint)
        buffer = Refilling(config)._build_replay_buffer()
    except ConfigError as error:
        return str(error)
    assert type(buffer) is (BusReplayBuffer if synchronous else BusReplayBufferAsync)
    found = own_arguments(
        config, None, OmegaConf.to_container(config.trainer.v1.sampler.sampler_kwargs) or {}
    )
    assert {*found} <= {*vars(buffer)}
    return {name: getattr(buffer, name) for name in NAMES}


if __name__ == "__main__":
    with initialize_config_module("verl.trainer.config", version_base=None):
        print(json.dumps([chosen(one) for one in json.loads(sys.argv[-1])]))  # noqa: T201 - the test reads it
