from typing import Any

import pytest

from rolloutmq.schemas.config.losses import (
    CorrectionConfig,
    DapoConfig,
    GspoConfig,
    ReinforceConfig,
    RlooConfig,
)
from rolloutmq.schemas.config.trainer import TrainerConfig


def test_the_usual_loss_needs_no_name() -> None:
    assert TrainerConfig().loss == DapoConfig(clip_low=0.2, clip_high=0.28)
    found = TrainerConfig.model_validate({"loss": {"clip_high": 0.3}})
    assert found.loss == DapoConfig(clip_high=0.3)


PUBLISHED: dict[str, dict[str, Any]] = {
    "dapo": {"advantage": "grpo", "mean": "tokens", "clip_low": 0.2, "clip_high": 0.28},
    "grpo": {
        "advantage": "grpo",
        "mean": "sequences",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_estimator": "k3",
    },
    "dr_grpo": {"advantage": "dr_grpo", "mean": "constant", "clip_low": 0.2, "clip_high": 0.2},
    "decoupled_ppo": {"mean": "tokens", "clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"advantage": "grpo", "mean": "sequences", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"advantage": "grpo", "mean": "tokens", "ratio_max": 5.0},
    "reinforce": {},
    "rloo": {"advantage": "rloo", "mean": "constant", "length": 1},
}
"""What the papers say; their sources are in the docstrings of the sections."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_defaults_of_a_loss_are_those_of_its_paper(name: str) -> None:
    """None of them has an entropy bonus. A KL needs `ref_logprobs` of every group, so it is never on by itself."""
    loss = TrainerConfig.model_validate({"loss": {"name": name}}).loss
    expected = PUBLISHED[name] | {"entropy": 0.0, "kl": 0.0}
    assert {key: getattr(loss, key) for key in expected} == expected
    assert "Source" in (type(loss).__doc__ or "")


def test_a_name_brings_the_defaults_of_its_loss() -> None:
    found = TrainerConfig.model_validate({"loss": {"name": "gspo"}})
    assert isinstance(found.loss, GspoConfig)
    assert (found.loss.clip_low, found.loss.clip_high, found.loss.mean) == (3e-4, 4e-4, "sequences")


def test_a_correction_keeps_what_its_loss_has_and_nobody_changed() -> None:
    assert ReinforceConfig.model_validate({"correction": {"high": 3.0}}).correction == CorrectionConfig(
        level="token", high=3.0
    )
    assert RlooConfig.model_validate({"correction": {"how": "mask"}}).correction.level == "sequence"
    assert DapoConfig.model_validate({"correction": {"high": 3.0}}).correction.level == "none"


@pytest.mark.parametrize(
    "name", ["dapo", "grpo", "dr_grpo", "decoupled_ppo", "gspo", "cispo", "reinforce", "rloo"]
)
def test_what_is_written_down_is_read_again(name: str) -> None:
    config = TrainerConfig.model_validate({"loss": {"name": name, "kl": 0.1}})
    assert config.loss.name == name
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config
