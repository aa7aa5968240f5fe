"""The loop with normalized scores: what it records, and that a resumed trainer repeats its steps."""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from tests.trainer import test_loop
from tests.trainer.support.toy import MemoryBroker, run_config, some_group
from tests.trainer.test_loop import Killed, lines, on_call, optimizer_state, raising, same, steady, weights

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import NothingToLearnError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.process import Stop

layout = test_loop.layout


def normalizing(normalize: str = "zscore", steps: int = 4) -> RunConfig:
    rewards = {"normalize": normalize, "warmup_groups": 0}
    return run_config(steps=steps, loss={"advantage": "dr_grpo"}, rewards=rewards)


def paying_more(step: int, version: PolicyVersion) -> list[Group]:
    return [
        some_group(f"s{step}-{n}", (step * (np.arange(8) % (n + 2))).tolist(), seed=step, version=version)
        for n in range(4)
    ]


def test_a_step_says_by_which_moments_it_normalized_and_its_rewards_stay_raw(
    layout: RunLayout, tmp_path: Path
) -> None:
    scaled, raw = MemoryBroker(steady), MemoryBroker(steady)
    train(normalizing(), layout, Stop(), scaled.connect)
    plain = RunLayout(tmp_path / "raw")
    train(normalizing("none"), plain, Stop(), raw.connect)
    assert [line.moments for line in lines(layout)] == [{"": 4 * step} for step in range(1, 5)]
    assert [line.moments for line in lines(plain)] == [{}] * 4
    assert [line.rewards for line in lines(layout)] == [line.rewards for line in lines(plain)]
    assert [event.reward for event in scaled.events] == [event.reward for event in raw.events]
    assert [event.extra["moments_groups/"] for event in scaled.events] == [4, 8, 12, 16]
    assert scaled.events[0].extra["grad_norm"] != raw.events[0].extra["grad_norm"]


def hidden(step: int, version: PolicyVersion) -> list[Group]:
    """Return a group of each of two environments; the first one of `poisoned` has an extreme score."""
    extreme = 1e60 if step == 1 else 1.0
    scores = {"poisoned": [extreme] + [0.0] * 7, "sound": [1.0] + [0.0] * 7}
    return [
        dataclasses.replace(some_group(f"{env}{step}", given, seed=step, version=version), env=env)
        for env, given in scores.items()
    ]


def test_groups_that_an_extreme_score_hides_are_counted_and_named_in_the_log(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    broker = MemoryBroker(hidden)
    with caplog.at_level(logging.WARNING):
        train(normalizing(), layout, Stop(), broker.connect)
    assert [event.extra["negligible"] for event in broker.events] == [0, 1, 1, 1]
    assert [event.filtered for event in broker.events] == [0, 1, 1, 1]
    assert [line.filtered for line in lines(layout)] == [(), ("poisoned2",), ("poisoned3",), ("poisoned4",)]
    told = [text for text in caplog.messages if text.startswith("groups left out env=poisoned groups=1")]
    assert told
    assert "trainer.rewards.half_life_groups" in told[0]
    assert "env=sound" not in caplog.text


def test_a_run_whose_groups_are_all_hidden_ends_with_the_reason(layout: RunLayout) -> None:
    broker = MemoryBroker(lambda step, version: hidden(step, version)[:1])
    with pytest.raises(NothingToLearnError, match=r"by which trainer\.rewards\.normalize divides.*poisoned"):
        train(normalizing(), layout, Stop(), broker.connect)


def test_a_resumed_trainer_normalizes_a_batch_by_what_it_brought_the_first_time(
    layout: RunLayout, tmp_path: Path
) -> None:
    """Each step pays more than the last: other moments would be another step."""
    unbroken, undisturbed = RunLayout(tmp_path / "unbroken"), MemoryBroker(paying_more)
    train(normalizing(steps=6), unbroken, Stop(), undisturbed.connect)
    broker = MemoryBroker(paying_more)
    broker.on_pull = on_call(4, raising(Killed()))
    with pytest.raises(Killed):
        train(normalizing(steps=6), layout, Stop(), broker.connect)
    assert train(normalizing(steps=6), layout, Stop(), broker.connect) == PolicyVersion(1, 6)
    assert same(weights(layout), weights(unbroken))
    assert same(optimizer_state(layout), optimizer_state(unbroken))
    kept = {line.version.step: line.moments for line in lines(layout) if line.trained}
    assert kept == {line.version.step: line.moments for line in lines(unbroken)}
