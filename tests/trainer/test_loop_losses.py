"""The loop with other losses than the default."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.toy import MemoryBroker, run_config, some_group
from tests.trainer.test_loop import same, steady, weights

from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.policy.tokenizer import character_tokenizer
from rolloutmq.trainer.process import Stop
from rolloutmq.trainer.weights.fingerprint import fingerprint


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def referred(step: int, version: PolicyVersion) -> list[Group]:
    """Groups that come with what a reference says of them."""
    chance = np.random.default_rng(step)
    return [with_reference(group, chance) for group in steady(step, version)]


def with_reference(group: Group, chance: np.random.Generator) -> Group:
    sampled = group["inference_logprobs"]
    reference = [row + 0.1 * chance.standard_normal(row.size).astype(np.float32) for row in sampled]
    return replace(
        group, columns={**group.columns, "ref_logprobs": Column.build("ref_logprobs", reference, 1)}
    )


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "grpo", "kl": 0.1},
        {"name": "gspo", "kl": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        {"name": "rloo"},
        {"name": "decoupled_ppo"},
    ],
    ids=lambda loss: loss["name"],
)
def test_micro_batches_do_not_change_what_another_loss_learns(tmp_path: Path, loss: dict[str, Any]) -> None:
    # The weights hide much: Adam divides by the size of the gradient. Its norm and the metrics do not.
    told = []
    for name, most in (("whole", 4096), ("cut", 40)):
        broker = MemoryBroker(referred)
        config = run_config(steps=2, micro_batch_tokens=most, loss=loss)
        train(config, RunLayout(tmp_path / name), Stop(), broker.connect)
        told.append([event.extra | {"loss": event.loss} for event in broker.events])
    for whole, cut in zip(*told, strict=True):
        assert cut == pytest.approx(whole, rel=2e-3, abs=1e-5)


def test_groups_without_what_the_loss_needs_are_rejected(layout: RunLayout) -> None:
    def half(step: int, version: PolicyVersion) -> list[Group]:
        return [*referred(step, version)[:2], *steady(step, version)[2:]]

    broker = MemoryBroker(half)
    train(run_config(steps=1, loss={"name": "grpo", "kl": 0.1}), layout, Stop(), broker.connect)
    (settled,) = broker.settled
    assert len(settled["trained"]) == len(settled["rejected"]) == 2
    assert {one.reason for one in settled["rejected"]} == {"ref_logprobs: required by the loss"}


def test_the_tokens_of_a_teacher_must_be_those_of_the_policy(layout: RunLayout) -> None:
    config = run_config(steps=1, distillation={"kind": "sampled"})
    mine, other = fingerprint(character_tokenizer(config.model.alphabet)), "b" * 64

    def taught(step: int, version: PolicyVersion) -> list[Group]:
        owners = (mine, other, other, mine)
        return [said(group, owner) for group, owner in zip(steady(step, version), owners, strict=True)]

    broker = MemoryBroker(taught)
    train(config, layout, Stop(), broker.connect)
    (settled,) = broker.settled
    assert len(settled["trained"]) == len(settled["rejected"]) == 2
    why = (
        f"teacher: its tokenizer differs from the student's (got fingerprint {other[:16]}, the student has "
        f"{mine[:16]}); use a teacher with the student's tokenizer"
    )
    assert {one.reason for one in settled["rejected"]} == {why}


def said(group: Group, owner: str) -> Group:
    """The group as if its environment had asked a teacher, with a tokenizer of that fingerprint."""
    told = {
        "distill_token_ids": [[[token] for token in row] for row in group["tokens"]],
        "distill_logprobs": [[[-1.0]] * len(row) for row in group["tokens"]],
    }
    columns = {name: Column.build(name, rows, 2) for name, rows in told.items()}
    whose = {"distill_tokenizer": Column.opaque([owner] * group.sequences)}
    return replace(group, columns={**group.columns, **columns, **whose})


def test_what_is_stale_is_weighed(layout: RunLayout) -> None:
    old = PolicyVersion(0, 0)
    broker = MemoryBroker(lambda step, _: steady(step, old))
    correction = {"level": "token", "from_staleness": 1}
    train(
        run_config(steps=2, loss={"entropy": 0.0, "correction": correction}), layout, Stop(), broker.connect
    )
    weight = [event.extra["weight"] for event in broker.events]
    assert weight[0] == 1
    assert weight[1] not in (0, 1)


TOO_OLD = {"entropy": 0.1, "kl": 0.1, "correction": {"max_staleness": 1}}


def test_a_batch_that_is_too_stale_for_the_loss_is_no_step(layout: RunLayout) -> None:
    """Neither momentum, nor entropy, nor the KL moves the weights; the groups are not settled as trained."""

    def make(step: int, version: PolicyVersion) -> list[Group]:
        late = step == 3 and len(broker.pulls) < 5
        made = referred(step, PolicyVersion(0, 0) if late else version)
        return [replace(group, group_id=f"{len(broker.pulls)}-{group.group_id}") for group in made]

    broker = MemoryBroker(make)
    train(run_config(steps=3, loss=TOO_OLD), layout, Stop(), broker.connect)
    assert [one["version"].step for one in broker.settled] == [1, 2, 2, 2, 3]
    assert [len(one["trained"]) for one in broker.settled] == [4, 4, 0, 0, 4]
    assert [len(one["filtered"]) for one in broker.settled] == [0, 0, 4, 4, 0]
    assert [event.step for event in broker.events] == [1, 2, 3]


def test_what_is_too_stale_for_the_loss_changes_nothing_in_a_step(layout: RunLayout, tmp_path: Path) -> None:
    def fresh(step: int, version: PolicyVersion) -> list[Group]:
        return referred(step, version)[:2]

    def mixed(step: int, version: PolicyVersion) -> list[Group]:
        late = some_group(f"late{step}", [0.0, 1.0], version=PolicyVersion(0, 0))
        return [*fresh(step, version), with_reference(late, np.random.default_rng(0))][: 2 + (step > 2)]

    broker = MemoryBroker(mixed)
    train(run_config(steps=4, loss=TOO_OLD), layout, Stop(), broker.connect)
    alone = RunLayout(tmp_path / "alone")
    train(run_config(steps=4, loss=TOO_OLD), alone, Stop(), MemoryBroker(fresh).connect)
    assert same(weights(layout), weights(alone))
    assert [event.extra["too_old"] for event in broker.events] == [0, 0, 1, 1]
    assert [event.filtered for event in broker.events] == [0, 0, 1, 1]
    assert [event.staleness_max for event in broker.events] == [0, 0, 0, 0]
