"""The example, started as a user starts it: a student learns from a teacher that the run serves, over the bus."""

import signal
from pathlib import Path

import pytest
from tests.trainer.support.saved import save_model

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from benchmarks.training.distillation import EXAMPLE, gap, loaded, newest
from rolloutmq.launch.settings import load
from rolloutmq.schemas.files import RunLayout
from rolloutmq.trainer.policy.model import build_policy

pytestmark = pytest.mark.extended

STEPS = 60


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_student_learns_over_the_bus_and_a_killed_teacher_costs_nothing(tmp_path: Path, ranks: int) -> None:
    def kill(live: LiveRun) -> None:
        live.wait_for_step(20)
        live.kill("teacher", signal.SIGKILL)

    teacher = save_model(tmp_path / "teacher", 11, initializer_range=0.15)
    told = [f"teacher.path={teacher}", f"trainer.steps={STEPS}", "trainer.batch_sequences=128"]
    told.append(f"trainer.ranks={ranks}")
    code, summary = scenario.run(tmp_path / "run", told, config=EXAMPLE, fault=kill)
    assert code == 0
    assert summary["steps"] == STEPS
    assert summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_filtered"] == 0
    config = load(EXAMPLE, environ={}, assignments=told)
    student = newest(tmp_path / "run")
    before = gap(build_policy(config.model, config.run.seed), student, teacher)
    assert gap(loaded(student), student, teacher) < 0.7 * before
    assert RunLayout(tmp_path / "run").log("teacher").read_text().count("serving name=sorter") == 2


def test_a_teacher_of_another_tokenizer_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    teacher = save_model(tmp_path / "teacher", 11, alphabet="9876543210= ")
    code, summary = scenario.run(tmp_path / "run", [f"teacher.path={teacher}"], config=EXAMPLE)
    assert code == 1
    assert "teacher: its tokenizer differs from the student's" in summary["ended"]
