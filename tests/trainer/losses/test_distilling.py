"""Distillation by the whole trainer: the divergence from the teacher falls, and in neither control it does.

The teacher is a policy trained to sort from rewards alone; the students begin with random weights and see no reward.
The measure is the full reverse KL under the student's samples, on prompts that training never drew.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.support.toy import FIRST_DIGIT, SortBroker

from benchmarks.training.distillation import gap, held_out, loaded, newest
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.wire.distillation import IDS_COLUMN, LOGPROBS_COLUMN, TeacherLogprobs
from rolloutmq.schemas.wire.envelope import Dtype, PolicyVersion
from rolloutmq.services.inference.teacher.scoring import ScoreRequest, TeacherScorer
from rolloutmq.trainer.loop import train
from rolloutmq.trainer.policy.model import build_policy
from rolloutmq.trainer.process import Stop

STEPS = 300
HELD_OUT = frozenset(held_out())


class TaughtBroker(SortBroker):
    """A broker whose groups a teacher has judged, and none of whose prompts is held out."""

    def __init__(self, config: RunConfig, layout: RunLayout, teacher: Path) -> None:
        super().__init__(config, layout)
        self._scorer = TeacherScorer(loaded(teacher), 100_000)
        self._asked = config.trainer.distillation

    def _roll_out(self, step: int, version: PolicyVersion) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < self._prompts:
            fresh = [group for group in super()._roll_out(step, version) if digits_of(group) not in HELD_OUT]
            groups += [replace(one, group_id=f"{one.group_id}.{len(groups)}") for one in fresh]
        return [self._taught(group) for group in groups[: self._prompts]]

    def _taught(self, group: Group) -> Group:
        trained = trained_tokens(group)
        (lengths,) = group.columns["tokens"].lengths
        cuts = np.cumsum(lengths)[:-1]
        k = {TeacherLogprobs.TOP_K: self._asked.top_k, TeacherLogprobs.FULL: 32}.get(
            self._asked.teacher_logprobs, 1
        )
        tokens = np.split(group.columns["tokens"].values.astype(np.int64), cuts)
        question = ScoreRequest(
            self._asked.teacher_logprobs, k, tokens, [np.flatnonzero(p) for p in np.split(trained, cuts)]
        )
        self._scorer.answer([question], lambda _done: None)
        cells = np.where(trained, k, 0).astype(np.uint32)
        told = {
            IDS_COLUMN: Column(Dtype.I32, question.token_ids.reshape(-1), (lengths, cells)),
            LOGPROBS_COLUMN: Column(Dtype.F32, question.logprobs.reshape(-1), (lengths, cells)),
        }
        return replace(group, columns={**group.columns, **told})


def digits_of(group: Group) -> str:
    return "".join(str(token - FIRST_DIGIT) for token in group["tokens"][0][1:4])


def run_config(root: Path, steps: int, batch: int, **trainer: Any) -> RunConfig:
    config = RunConfig.model_validate(
        {"trainer": {"steps": steps, "batch_sequences": batch, "checkpoint_interval": 10_000} | trainer}
    )
    layout = RunLayout(root)
    layout.root.mkdir(exist_ok=True)
    return config


def trained_by(broker: SortBroker, config: RunConfig, root: Path) -> Path:
    """Train to the end and return the directory of the policy."""
    torch.set_flush_denormal(True)  # as the trainer's process does; `conftest` takes it back
    try:
        train(config, RunLayout(root), Stop(), broker.connect)
    finally:
        broker.close()
    return newest(root)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that learned to sort three digits, from rewards."""
    root = tmp_path_factory.mktemp("teacher")
    config = run_config(root, 150, 128)
    return trained_by(SortBroker(config, RunLayout(root)), config, root)


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return tmp_path / "student"


def left(root: Path, teacher: Path, **distillation: Any) -> float:
    """Return which part of the divergence is left at the end."""
    told = {"kind": "top_k", "top_k": 8, "rl_weight": 0.0} | distillation
    config = run_config(root, STEPS, 64, distillation=told, loss={"entropy": 0.0})
    after = trained_by(TaughtBroker(config, RunLayout(root), teacher), config, root)
    before = gap(build_policy(config.model, config.run.seed), after, teacher)
    return gap(loaded(after), after, teacher) / before


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["top_k", "full", "sampled"])
def test_a_student_comes_more_than_half_of_the_way(kind: str, student: Path, teacher: Path) -> None:
    assert left(student, teacher, kind=kind) < 0.5


@pytest.mark.extended
@pytest.mark.parametrize("control", [{"weight": 0.0}, {"shuffle_teacher": True}])
def test_neither_control_does(control: dict[str, Any], student: Path, teacher: Path) -> None:
    assert left(student, teacher, **control) > 0.5
