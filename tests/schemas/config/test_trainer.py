"""`[trainer.rewards]`: what is accepted, and what is refused by its dotted path."""

from typing import Any

import pytest

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import ConfigError


def test_nothing_is_normalized_unless_asked_for() -> None:
    rewards = TrainerConfig().rewards
    assert (rewards.normalize, rewards.clip, rewards.half_life_groups) == ("none", None, None)


def test_a_half_life_alone_is_for_other_trainers() -> None:
    found = validate({"trainer": {"rewards": {"half_life_groups": 50}}})
    assert found.trainer.rewards.half_life_groups == 50


@pytest.mark.parametrize(
    ("given", "key", "says"),
    [
        ({"normalize": "rank"}, "trainer.rewards.normalize", "rank"),
        ({"clip": 5.0}, "trainer.rewards.clip", "has no effect"),
        ({"normalize": "zscore", "clip": 0.0}, "trainer.rewards.clip", "greater than 0"),
        ({"half_life_groups": 0}, "trainer.rewards.half_life_groups", "greater than 0"),
        ({"warmup_groups": -1}, "trainer.rewards.warmup_groups", "greater than or equal to 0"),
        ({"warmup_batches": 3}, "trainer.rewards.warmup_batches", "unknown key"),
    ],
)
def test_a_wrong_key_is_refused_by_its_path(given: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({"trainer": {"rewards": given}})
    assert str(refused.value).startswith(key)
    assert says in str(refused.value)
