"""What a `GRPOConfig` must agree with, checked before training. Pure.

TRL generates once for `steps_per_generation * num_iterations` forward passes, and takes an optimizer step every
`gradient_accumulation_steps` passes. A batch of the bus is one generation. It is settled with the optimizer step that
uses it up, so a generation has to last for whole optimizer steps, and a checkpoint has to fall between two generations.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, UsageError

NEEDED: Final = (
    *("num_generations", "steps_per_generation", "num_iterations", "gradient_accumulation_steps"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "off_policy_mask_threshold"),
)
"""Fields of `GRPOConfig` that the adapter reads."""
SAMPLING: Final = {
    "max_completion_length": 512,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
}
"""Fields of `GRPOConfig` for TRL's own generation, with their defaults."""
CORRECTED_BY_TOKEN: Final = ("token_truncate", "token_mask")


class Generation(NamedTuple):
    """One generation of TRL.

    Attributes:
        group_size: Rows of a group.
        rows: Rows of each rank.
        steps: Optimizer steps that it lasts for.
    """

    group_size: int
    rows: int
    steps: int


def generation_of(args: Any) -> Generation:
    """Check a `GRPOConfig` and return its generation.

    Raises:
        UsageError: It is no `GRPOConfig`, or one of a release without the fields that the adapter needs.
        ConfigError: A setting does not go with rollouts from the bus; names the setting.
    """
    missing = [name for name in NEEDED if not hasattr(args, name)]
    if missing:
        raise UsageError(
            f"args: must be a trl.GRPOConfig of TRL 1.16 (got {type(args).__name__} without {', '.join(missing)}); "
            "install rolloutmq[trl]"
        )
    for key, problem in _problems(args):
        raise ConfigError(key, problem)
    passes = args.steps_per_generation * args.num_iterations
    return Generation(
        group_size=args.num_generations,
        rows=args.per_device_train_batch_size * args.steps_per_generation,
        steps=passes // args.gradient_accumulation_steps,
    )


def _problems(args: Any) -> Iterator[tuple[str, str]]:
    if args.eval_on_start or name_of(args.eval_strategy) != "no":
        yield (
            "eval_strategy",
            f"must be `no` (got `{name_of(args.eval_strategy)}`, eval_on_start={args.eval_on_start}), because TRL "
            "would evaluate on groups meant for training; call `rolloutmq.evaluate(run_dir)`",
        )
    passes, every = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if passes % every:
        yield (
            "steps_per_generation",
            f"times num_iterations must be a multiple of gradient_accumulation_steps (got {args.steps_per_generation} "
            f"* {args.num_iterations}, {every}), because a batch is settled after an optimizer step; leave it out",
        )
    if args.restore_callback_states_from_checkpoint:
        yield (
            "restore_callback_states_from_checkpoint",
            "must be False (got True), because it replaces the callback that holds the connection; the version "
            "is restored without it",
        )
    if (
        args.loss_type == "vespo"
        and args.vllm_importance_sampling_correction
        and args.vllm_importance_sampling_mode not in CORRECTED_BY_TOKEN
    ):
        yield (
            "vllm_importance_sampling_mode",
            f"must be {' or '.join(CORRECTED_BY_TOKEN)} with loss_type `vespo` "
            f"(got {args.vllm_importance_sampling_mode})",
        )


def require_whole_generations(args: Any, state: Any, generation: Generation) -> None:
    """Check that the last step and every checkpoint fall between two generations.

    Args:
        args: The `GRPOConfig`.
        state: The trainer's state when training begins, with absolute numbers of steps.
        generation: That of `generation_of`.

    Raises:
        ConfigError: One falls inside; names the setting.
    """
    lasts = f"the {generation.steps} optimizer steps that a generation lasts for"
    if state.max_steps % generation.steps:
        raise ConfigError("max_steps", f"must be a multiple of {lasts} (got {state.max_steps})")
    if name_of(args.save_strategy) == "steps" and state.save_steps % generation.steps:
        raise ConfigError("save_steps", f"must be a multiple of {lasts} (got {state.save_steps})")


def require_same_groups(args: Any, run: RunConfig, *, launched: bool) -> None:
    """Check a `GRPOConfig` against the configuration of a run.

    Args:
        args: The `GRPOConfig`.
        run: The configuration.
        launched: `rolloutmq up` has started the run; beside a broker alone, the configuration starts no trainer.

    Raises:
        ConfigError: The run trains by itself, or an environment makes groups of another size; names the key.
    """
    if launched and run.trainer.enabled:
        raise ConfigError(
            "trainer.enabled", "must be false beside TRL (got true); set it in the run's configuration"
        )
    for name, environment in run.environment.items():
        if environment.split == "train" and environment.group_size != args.num_generations:
            raise ConfigError(
                f"environment.{name}.group_size",
                f"must be num_generations of the GRPOConfig, {args.num_generations} (got {environment.group_size})",
            )


def unused_sampling(args: Any) -> list[str]:
    """Return the settings of TRL's own sampling that differ from their defaults, as text: no worker reads them."""
    found = []
    for name, default in SAMPLING.items():
        given = getattr(args, name, default)
        if given != default:
            found.append(f"{name}={given!r}")
    return found


def ignores_logprobs(args: Any) -> bool:
    """Return whether nothing in the loss depends on the log-probabilities of the policy that sampled."""
    return not args.vllm_importance_sampling_correction and args.off_policy_mask_threshold is None


def name_of(strategy: Any) -> str:
    """Return the name of a strategy of transformers, which may be an enumeration."""
    return str(getattr(strategy, "value", strategy))
