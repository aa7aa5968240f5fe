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


def test_the_passes_of_a_bfloat16_policy_add_up_in_float32(tmp_path: Path) -> None:
    """The same sequence 320 times has the gradient of one. In bfloat16 the sum stands still after 256 of them: from
    there on a part is less than half of its last digit.
    """

    def norm(count: int) -> float:
        config = run_config(
            steps=1, micro_batch_tokens=1, pack=False, loss={"name": "reinforce", "entropy": 0.0}
        )
        model = config.model.model_copy(update={"dtype": "bfloat16"})
        row = {"tokens": [1, 5, 4, 13, 2], "mask": [0, 1, 1, 1, 1], "inference_logprobs": [-1.0] * 5}
        columns: dict[str, Any] = {
            name: [values] * count for name, values in (row | {"advantages": [1.0] * 5}).items()
        }
        group = some_group("g", [0.0] * count, **columns)
        broker = MemoryBroker(lambda _step, _version: [group])
        layout = RunLayout(tmp_path / str(count))
        train(config.model_copy(update={"model": model}), layout, Stop(), broker.connect)
        return broker.events[0].extra["grad_norm"]

    assert norm(320) == pytest.approx(norm(1), rel=0.01)


def test_a_bfloat16_policy_has_a_float32_head_unless_told_otherwise(tmp_path: Path) -> None:
    def entropy(name: str, **told: Any) -> float:
        config = run_config(steps=1, **told)
        model = config.model.model_copy(update={"dtype": "bfloat16"})
        broker, layout = MemoryBroker(steady), RunLayout(tmp_path / name)
        train(config.model_copy(update={"model": model}), layout, Stop(), broker.connect)
        return broker.events[0].extra["entropy"]

    usual = entropy("usual")
    assert usual == entropy("wide", fp32_head=True)
    assert usual != entropy("coarse", fp32_head=False)
    assert usual == pytest.approx(entropy("again", fp32_head=False), abs=0.01)


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
