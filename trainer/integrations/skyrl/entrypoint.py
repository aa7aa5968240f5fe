"""SkyRL's entry point with the bus.

    python -m rolloutmq.trainer.integrations.skyrl.entrypoint generator.bus.where=runs/mine ...

It takes SkyRL's arguments, and those of `BusConfig` as `generator.bus.*`. With `trainer.fully_async.enabled=true` the
trainer is SkyRL's fully asynchronous one, with `trainer.fully_async.simulate_training=true` its simulated one, and else
its synchronous one. A subclass of `BusExp` publishes the weights: override `get_publish`, and call `main` with it.

Without `get_publish` the workers need engines of SkyRL's. SkyRL starts or finds them as its settings say, and sends
them the weights.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from rolloutmq.schemas.errors import UsageError
from rolloutmq.trainer.integrations.checkpoints import lives_of
from rolloutmq.trainer.integrations.extras import from_extra
from rolloutmq.trainer.integrations.skyrl.generator import BusGenerator
from rolloutmq.trainer.integrations.skyrl.inference import ExternalInference
from rolloutmq.trainer.integrations.skyrl.training import BusAsyncTraining, BusSyncTraining, Publish
from rolloutmq.trainer.integrations.task_feed.connection import find_problem

with from_extra("skyrl"):
    import ray
    from skyrl.train.config import GeneratorConfig, SkyRLTrainConfig, make_config
    from skyrl.train.config.config import BaseConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
    from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray


class BusAsyncTrainer(BusAsyncTraining, FullyAsyncRayPPOTrainer):  # type: ignore[misc]
    """SkyRL's fully asynchronous trainer on the bus."""


class BusSimulatedTrainer(BusAsyncTraining, FullyAsyncTrainerSim):  # type: ignore[misc]
    """SkyRL's simulated trainer on the bus."""


class BusSyncTrainer(BusSyncTraining, RayPPOTrainer):  # type: ignore[misc]
    """SkyRL's synchronous trainer on the bus."""


@dataclass
class BusConfig(BaseConfig):  # type: ignore[misc]
    """`generator.bus` of SkyRL's settings; see `BusGenerator`.

    Attributes:
        where: Run directory, or address of the broker's `serve` socket. Required.
        name: Name of the training.
        environments: Environment of the bus for each of SkyRL's environment classes.
        deadline_s: Longest time from a request to its group, in seconds.
        timeout_s: Longest wait for the broker when the bus is joined, in seconds.
    """

    where: str = ""
    name: str = "skyrl"
    environments: dict[str, str] = field(default_factory=dict)
    deadline_s: float = 1800.0
    timeout_s: float = 60.0


@dataclass
class BusGeneratorConfig(GeneratorConfig):  # type: ignore[misc]
    """SkyRL's `generator` settings with those of the bus."""

    bus: BusConfig = field(default_factory=BusConfig)


BusTrainConfig: type[SkyRLTrainConfig] = make_config(generator_cls=BusGeneratorConfig)
"""SkyRL's settings with `generator.bus`."""


class BusExp(BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment on the bus."""

    def get_publish(self) -> Publish | None:
        """Return what publishes the weights after each step; None leaves them to SkyRL and its engines."""
        return None

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> BusGenerator:  # noqa: ARG002
        """Return the generator; the trainer joins the bus.

        Raises:
            UsageError: A setting does not go with the bus.
        """
        return bus_generator(cfg, tokenizer)

    def get_inference_client(self) -> Any:
        """Return SkyRL's client of its engines, or one without an engine if `get_publish` returns something."""
        simulated = self.cfg.trainer.fully_async.simulate_training
        if simulated or self.get_publish() is not None:
            return ExternalInference(self.cfg.trainer.policy.model.path)
        return super().get_inference_client()

    def get_trainer(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Return SkyRL's trainer on the bus."""
        trainer = trainer_class(cfg)(cfg, *args, **kwargs)
        publish = self.get_publish()
        if publish is not None:
            trainer.publish = publish
        return trainer


def check(cfg: Any) -> None:
    """Check what SkyRL does not check, or only after it has waited for GPUs.

    Raises:
        UsageError: A setting does not go with the bus.
    """
    bus = cfg.generator.bus
    if not (isinstance(bus.where, str) and bus.where):
        raise UsageError(
            f"generator.bus.where: must be the run directory or the broker's address (got {bus.where!r})"
        )
    problem = find_problem(bus.name, bus.environments, bus.deadline_s, bus.timeout_s)
    if problem is not None:
        raise UsageError(f"generator.bus.{': '.join(problem)}")
    lives_of(bus.where, str(cfg.trainer.ckpt_path), "trainer.ckpt_path")
    for name in ("step_wise_trajectories", "vision_language_generator"):
        if getattr(cfg.generator, name):
            raise UsageError(
                f"generator.{name}: must be false (got true), because the bus has no such trajectories"
            )
    if cfg.trainer.fully_async.enabled and cfg.trainer.placement.colocate_all:
        raise UsageError(
            "trainer.placement.colocate_all: must be false (got true) with trainer.fully_async.enabled"
        )


def bus_generator(cfg: Any, tokenizer: Any) -> BusGenerator:
    """Return the generator of SkyRL's settings.

    Raises:
        UsageError: A setting does not go with the bus.
    """
    check(cfg)
    bus = cfg.generator.bus
    return BusGenerator(
        bus.where,
        batch_sequences=cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt,
        tokenizer=tokenizer,
        name=bus.name,
        environments=bus.environments,
        deadline_s=bus.deadline_s,
        timeout_s=bus.timeout_s,
        temperature=_temperature(cfg),
        zero_reward_on_non_stop=cfg.generator.zero_reward_on_non_stop,
        apply_overlong_filtering=cfg.generator.apply_overlong_filtering,
    )


def _temperature(cfg: Any) -> float:
    """Return the temperature at which SkyRL scores: it may be filled in later, from that of its sampling."""
    scored = cfg.trainer.algorithm.temperature
    return float(cfg.generator.sampling_params.temperature if scored is None else scored)


def trainer_class(cfg: Any) -> Any:
    """Return the class of the trainer that SkyRL's settings name."""
    if cfg.trainer.fully_async.simulate_training:
        return BusSimulatedTrainer
    return BusAsyncTrainer if cfg.trainer.fully_async.enabled else BusSyncTrainer


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator] # as SkyRL does: not on the head node
def _train(experiment: type[BusExp], cfg: Any) -> None:
    experiment(cfg).run()


def main(experiment: type[BusExp] = BusExp) -> None:
    """Train with the settings of the command line, in a Ray cluster as SkyRL does.

    Args:
        experiment: Class of the experiment; it is made in a process of Ray.

    Raises:
        UsageError: A setting does not go with the bus.
    """
    cfg = BusTrainConfig.from_cli_overrides(sys.argv[1:])
    check(cfg)
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(_train.remote(experiment, cfg))


if __name__ == "__main__":
    main()
