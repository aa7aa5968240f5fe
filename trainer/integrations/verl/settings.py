"""verl's settings that the adapter depends on: its own classes, and the filter of groups. Needs verl.

verl gives `algorithm.filter_groups` and `sync_refill_failed_groups` to its own replay buffers alone. `own_arguments`
gives them to the adapter's, too.
"""

from collections.abc import Mapping
from typing import Any, Final

from rolloutmq.schemas.errors import ConfigError
from rolloutmq.trainer.integrations.extras import from_extra

with from_extra("verl"):
    from verl.utils.import_utils import load_class_from_fqn, load_extern_object

SAMPLING: Final = "rolloutmq.trainer.integrations.verl.sampling"
METRIC: Final = "filter_groups_metric"


def require_class(key: str, named: Any, found: Any, wanted: type) -> None:
    """Check that a setting names a class of the adapter, or one derived from it.

    Args:
        key: The setting.
        named: Its value.
        found: What it names; None for nothing.
        wanted: The class.

    Raises:
        ConfigError: It names another one.
    """
    if not (isinstance(found, type) and issubclass(found, wanted)):
        raise ConfigError(key, f"must be {wanted.__name__} of {SAMPLING}, or derived from it (got {named})")


def require_classes(config: Any, replay_buffer: type, checkpoint: type) -> None:
    """Check that verl's trainer has the other classes of the adapter.

    Args:
        config: verl's configuration.
        replay_buffer: Class of the replay buffer for its `trainer_mode`.
        checkpoint: Class of the checkpoint callback.

    Raises:
        ConfigError: A class is missing; names the setting.
    """
    trainer = config.trainer
    custom = trainer.v1.sampler.get("custom_sampler") or {}
    path, name = custom.get("path"), custom.get("name")
    found = load_extern_object(path, name) if path and name else None
    require_class(
        "trainer.v1.sampler.custom_sampler.name",
        f"{name} with trainer.v1.trainer_mode={trainer.v1.trainer_mode}",
        found,
        replay_buffer,
    )
    if trainer.save_freq > 0:  # else nothing would be committed
        named = trainer.get("checkpoint_callback_class")
        found = load_class_from_fqn(named) if named else None
        require_class("trainer.checkpoint_callback_class", named, found, checkpoint)


def require_known_advantage(config: Any) -> None:
    """Check that verl's trainers can compute the advantage. Raises ConfigError.

    That of GDPO reads the parts of a reward, which verl's v1 trainers give to no estimator.
    """
    estimator = config.algorithm.adv_estimator
    if str(getattr(estimator, "value", estimator)) == "gdpo":
        raise ConfigError(
            "algorithm.adv_estimator",
            "must not be gdpo, because verl's v1 trainers do not pass algorithm.gdpo_reward_keys on (got gdpo); "
            "use grpo, and let the environment weigh the parts of its score",
        )


def own_arguments(config: Any, metric: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a replay buffer that verl gives to its own classes alone.

    Args:
        config: verl's configuration.
        metric: Metric of `algorithm.filter_groups`; None if it is off.
        given: `trainer.v1.sampler.sampler_kwargs`, which go ahead.

    Raises:
        ConfigError: `given` filters groups where verl's data loader does not replace them.
    """
    trainer, data = config.trainer, config.data
    refills = bool(trainer.v1.sampler.get("sync_refill_failed_groups", False))
    if trainer.v1.trainer_mode != "sync":
        return {METRIC: metric, **given}
    if metric is None and given.get(METRIC) is not None:
        raise ConfigError(
            f"trainer.v1.sampler.sampler_kwargs.{METRIC}",
            f"must not be set for a synchronous trainer (got {given[METRIC]}); set algorithm.filter_groups.enable=true "
            "and algorithm.filter_groups.metric",
        )
    exact = metric is not None or refills
    filters = config.algorithm.get("filter_groups") or {}
    return {
        METRIC: metric,
        "sync_refill_failed_groups": refills,
        "train_batch_size": data.train_batch_size,
        "gen_batch_size": 1 if exact else data.get("gen_batch_size") or data.train_batch_size,
        "max_inflight_gen_batches": 1 if metric is None else filters.get("max_inflight_gen_batches", 1),
        **given,
    }
