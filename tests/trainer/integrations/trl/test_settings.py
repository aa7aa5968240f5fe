"""Settings that go with rollouts from the bus, and what is said of the others."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.trainer.integrations.trl.support import config

from rolloutmq.schemas.errors import ConfigError, UsageError
from rolloutmq.trainer.integrations.trl.settings import (
    Generation,
    generation_of,
    ignores_logprobs,
    require_same_groups,
    require_whole_generations,
    unused_sampling,
)


def args(**changes: Any) -> SimpleNamespace:
    """What the adapter reads of a `GRPOConfig`, with its defaults."""
    given = {
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "no",
        "eval_on_start": False,
        "restore_callback_states_from_checkpoint": False,
        "loss_type": "dapo",
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "off_policy_mask_threshold": None,
        "save_strategy": SimpleNamespace(value="steps"),
    }
    return SimpleNamespace(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "generation"),
    [
        ({}, Generation(8, 16, 1)),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 4}, Generation(8, 64, 1)),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, Generation(8, 64, 2)),
        ({"num_iterations": 3}, Generation(8, 16, 3)),
        ({"num_iterations": 2, "gradient_accumulation_steps": 2}, Generation(8, 16, 1)),
    ],
)
def test_a_generation_lasts_for_whole_optimizer_steps(
    changes: dict[str, int], generation: Generation
) -> None:
    assert generation_of(args(**changes)) == generation


PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"eval_strategy": SimpleNamespace(value="steps")}, "eval_strategy"),
    ({"eval_on_start": True}, "eval_strategy"),
    ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "steps_per_generation"),
    ({"gradient_accumulation_steps": 4}, "steps_per_generation"),
    ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states_from_checkpoint"),
    ({"loss_type": "vespo"}, "vllm_importance_sampling_mode"),
]


@pytest.mark.parametrize(("changes", "key"), PROBLEMS)
def test_settings_that_do_not_go_with_the_bus_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .*\(got .*;|^{key}: .*\(got ") as caught:
        generation_of(args(**changes))
    assert caught.value.path == key


def test_arguments_of_another_trainer_are_refused() -> None:
    with pytest.raises(UsageError, match=r"args: must be a trl\.GRPOConfig .*without num_generations"):
        generation_of(SimpleNamespace())


def test_the_last_step_and_checkpoints_fall_between_generations() -> None:
    lasts_two = Generation(8, 16, 2)
    require_whole_generations(args(), SimpleNamespace(max_steps=8, save_steps=4), lasts_two)
    never = args(save_strategy=SimpleNamespace(value="no"))
    require_whole_generations(never, SimpleNamespace(max_steps=8, save_steps=3), lasts_two)
    for key, state in (
        ("max_steps", SimpleNamespace(max_steps=7, save_steps=4)),
        ("save_steps", SimpleNamespace(max_steps=8, save_steps=3)),
    ):
        with pytest.raises(ConfigError, match=f"{key}: must be a multiple of the 2 optimizer steps"):
            require_whole_generations(args(), state, lasts_two)


def test_groups_of_the_run_have_the_size_that_trl_expects() -> None:
    require_same_groups(args(num_generations=4), config(), launched=True)
    with pytest.raises(
        ConfigError, match=r"environment\.mine\.group_size: must be num_generations .*, 8 \(got 4\)"
    ):
        require_same_groups(args(), config(), launched=False)
    with pytest.raises(ConfigError, match=r"trainer\.enabled: must be false beside TRL"):
        require_same_groups(args(num_generations=4), config(trainer={}, inference={}), launched=True)
    require_same_groups(args(num_generations=4), config(trainer={}, inference={}), launched=False)


def test_it_is_known_when_nothing_depends_on_the_logprobs() -> None:
    assert not ignores_logprobs(args())
    off = {"vllm_importance_sampling_correction": False}
    assert ignores_logprobs(args(**off))
    assert not ignores_logprobs(args(**off, off_policy_mask_threshold=0.5))


def test_settings_of_trls_own_sampling_are_told() -> None:
    assert unused_sampling(args()) == []
    assert unused_sampling(args(top_p=1.0, top_k=0, max_completion_length=512)) == []
    changed = args(top_p=0.9, top_k=5, max_completion_length=64)
    assert unused_sampling(changed) == ["max_completion_length=64", "top_p=0.9", "top_k=5"]
