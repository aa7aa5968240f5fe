"""verl's settings: its own classes are required, and the filter of groups reaches the adapter's replay buffers."""

import json
import subprocess
from typing import Any

import pytest
from tests.trainer.integrations.verl.support import ENDED_WITHIN_S, PLAYER, PYTHON, environment, missing

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

SAMPLING = "rolloutmq.trainer.integrations.verl.sampling"
CUSTOM = "trainer.v1.sampler.custom_sampler"
COMMON = [f"{CUSTOM}.path=pkg://{SAMPLING}", "data.train_batch_size=8", "trainer.save_freq=-1"]
SYNC = [*COMMON, f"{CUSTOM}.name=BusReplayBuffer", "trainer.v1.trainer_mode=sync"]
ASYNC = [*COMMON, f"{CUSTOM}.name=BusReplayBufferAsync", "trainer.v1.trainer_mode=colocate_async"]
FILTER = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward"]


def chosen(*overrides: list[str]) -> list[Any]:
    """Return the arguments of the replay buffer for each of these settings, or the error."""
    ended = subprocess.run(
        [str(PYTHON), str(PLAYER.with_name("chosen.py")), json.dumps(overrides)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    found: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_the_filter_of_groups_reaches_the_replay_buffers() -> None:
    plain, filtering, refilling, ahead = chosen(
        SYNC,
        [*SYNC, *FILTER, "algorithm.filter_groups.max_inflight_gen_batches=3"],
        [*SYNC, "trainer.v1.sampler.sync_refill_failed_groups=true"],
        [*ASYNC, *FILTER],
    )
    none = {
        "filter_groups_metric": None,
        "sync_refill_failed_groups": False,
        "train_batch_size": 8,
        "gen_batch_size": 8,
        "max_inflight_gen_batches": 1,
    }
    assert plain == none
    assert filtering == none | {
        "filter_groups_metric": "reward", "gen_batch_size": 1, "max_inflight_gen_batches": 3,
    }  # fmt: skip
    assert refilling == none | {"sync_refill_failed_groups": True, "gen_batch_size": 1}
    assert ahead["filter_groups_metric"] == "reward"


def test_settings_that_would_not_work_are_named() -> None:
    metric = "+trainer.v1.sampler.sampler_kwargs.filter_groups_metric=reward"
    twice, other, none, uncommitted, parts = chosen(
        [*SYNC, metric],
        [*ASYNC, f"{CUSTOM}.name=BusReplayBuffer"],
        ["trainer.v1.trainer_mode=sync"],
        [*SYNC, "trainer.save_freq=2"],
        [*SYNC, "algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[format,acc]"],
    )
    assert parts.startswith("algorithm.adv_estimator: must not be gdpo")
    assert twice.startswith("trainer.v1.sampler.sampler_kwargs.filter_groups_metric: must not be set")
    for error, mode, name in (
        (other, "colocate_async", "BusReplayBufferAsync"),
        (none, "sync", "BusReplayBuffer"),
    ):
        assert error.startswith(f"{CUSTOM}.name: must be {name} of {SAMPLING}")
        assert f"trainer_mode={mode}" in error
    assert uncommitted.startswith(f"trainer.checkpoint_callback_class: must be BusCheckpoint of {SAMPLING}")
