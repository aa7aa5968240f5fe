"""The loop with teacher columns, with and without adapters; `test_ranks` has several ranks."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.support.rank_player import config_of, groups_of, taught_by
from tests.trainer.support.toy import MemoryBroker
from torch import Tensor

from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.distillation import IDS_COLUMN, LOGPROBS_COLUMN, TeacherLogprobs
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.policy.model import Policy, build_policy
from rolloutmq.trainer.process import Stop
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare

ADAPTED = [None, {"rank": 4}]


def played(root: Path, teacher_logprobs: TeacherLogprobs, **trainer: Any) -> list[StepDone]:
    broker = MemoryBroker(groups_of(0, 1, teacher_logprobs))
    told = taught_by(teacher_logprobs) | trainer.pop("distillation", {})
    train(config_of("float32", distillation=told, **trainer), RunLayout(root), Stop(), broker.connect)
    return broker.events


@pytest.mark.parametrize("lora", ADAPTED)
@pytest.mark.parametrize(
    "teacher_logprobs", [TeacherLogprobs.TOP_K, TeacherLogprobs.FULL, TeacherLogprobs.SAMPLED]
)
def test_micro_batches_do_not_change_what_is_learned_from_a_teacher(
    tmp_path: Path, teacher_logprobs: TeacherLogprobs, lora: dict[str, Any] | None
) -> None:
    whole = played(tmp_path / "whole", teacher_logprobs, lora=lora, micro_batch_tokens=4096)
    cut = played(tmp_path / "cut", teacher_logprobs, lora=lora, micro_batch_tokens=24)
    assert "distill_kl" in whole[0].extra
    for one, other in zip(whole, cut, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=2e-3, abs=1e-5)
        assert other.extra == pytest.approx(one.extra, rel=2e-3, abs=1e-5)


@torch.no_grad()
def divergence(policy: Policy, groups: list[Group]) -> float:
    """Return the mean over the trained tokens of what the policy's divergence is from what was said, token by token."""
    found: list[Tensor] = []
    for group in groups:
        rows = zip(group["tokens"], group["mask"], group[IDS_COLUMN], group[LOGPROBS_COLUMN], strict=True)
        for tokens, mask, ids, said in rows:
            spread = (
                policy(input_ids=torch.tensor(tokens[None].astype(int))).logits[0].double().log_softmax(-1)
            )
            for place in range(1, len(tokens)):
                if mask[place]:
                    ours = spread[place - 1, torch.tensor(ids[place].astype(int))]
                    theirs = torch.tensor(said[place].astype(float))
                    rest, other = 1 - ours.exp().sum(), 1 - theirs.exp().sum()
                    parts = ours.exp() * (ours - theirs)
                    found.append(parts.sum() + rest * (rest.log() - other.log()))
    return float(torch.stack(found).mean())


def test_adapters_begin_where_the_plain_policy_does_and_come_closer_to_the_teacher(tmp_path: Path) -> None:
    """From the teacher alone, of the same batch again and again; who samples sees the policy that is measured."""
    groups = groups_of(0, 1, TeacherLogprobs.TOP_K)(1, PolicyVersion())
    alone = {"steps": 12, "learning_rate": 2e-2, "distillation": {"weight": 1.0, "rl_weight": 0.0}}
    (plain, *_) = played(tmp_path / "plain", TeacherLogprobs.TOP_K, **alone)
    layout = RunLayout(tmp_path / "adapted")
    told = taught_by(TeacherLogprobs.TOP_K) | {"weight": 1.0, "rl_weight": 0.0}
    config = config_of("float32", **alone | {"distillation": told, "lora": {"rank": 4}})
    seen: list[float] = []

    def look(_number: int) -> None:
        reader = build_policy(config.model, 9)
        own = directory_fingerprint(layout.model)
        with closing(WeightShare.attach(reader, layout.weights, tokenizer=own)) as share, share.reading():
            seen.append(divergence(reader, groups))

    def again(step: int, version: PolicyVersion) -> list[Group]:
        return [replace(one, group_id=f"{one.group_id}.{step}", oldest=version) for one in groups]

    broker = MemoryBroker(again, on_pull=look)
    train(config, layout, Stop(), broker.connect)
    adapted = broker.events[0]
    assert adapted.loss == pytest.approx(plain.loss, rel=1e-5)
    assert adapted.extra["distill_kl"] == pytest.approx(plain.extra["distill_kl"], rel=1e-5)
    measured = [event.extra["distill_kl"] for event in broker.events]
    assert measured == pytest.approx(seen, rel=1e-3)
    assert measured[-1] < 0.85 * measured[0]
