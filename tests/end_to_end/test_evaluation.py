"""The evaluation of whole runs: its points, a checkpoint alone, and what kills cost."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from rolloutmq.bus.evaluation.log import recorded
from rolloutmq.launch.commands.records.ledger import check
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.evaluation import EvaluationDone

WITHIN_S = 400.0
EVALUATING = ("evaluation.enabled=true", "evaluation.samples=4", "evaluation.deadline_s=200")


def points(layout: RunLayout) -> list[EvaluationDone]:
    return list(recorded(layout.evaluations))


def answers(layout: RunLayout) -> int:
    """Return how many groups for evaluation were acked so far."""
    return sum(log.read_bytes().count(b"\n") for log in layout.acks.glob("*.eval.jsonl"))


@pytest.mark.extended
def test_a_run_evaluates_itself_and_its_checkpoint_gives_the_same(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    asked = (*EVALUATING, "evaluation.tasks=32", "evaluation.every=20", "evaluation.max_share=1")
    code, summary = scenario.run(layout.root, (*asked, "trainer.steps=60"), deadline_s=WITHIN_S)
    assert code == 0
    first, *between, last = points(layout)
    assert [point.version.step for point in (first, last)] == [0, 60]
    assert between
    for end in (first, last):
        assert end.one_policy
        assert end.waited
        assert (end.all.tasks, end.all.answered, end.rollouts, end.sequences) == (32, 32, 64, 160)
    assert not any(point.waited for point in between)
    assert all(point.version <= point.oldest <= point.newest for point in between)
    assert last.all.greedy is not None
    assert first.all.greedy is not None
    assert last.all.greedy > first.all.greedy
    assert summary["groups_evaluated"] == 64 * len(points(layout))
    assert summary["evaluation"]["last"]["greedy"] == last.all.greedy
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    assert summary["staleness_max"] <= summary["staleness_bound"]
    assert check(layout).problems == []
    assert "evaluation_done" in layout.metrics.read_text()
    assert "evaluation step 0: greedy" in (tmp_path / "run.out").read_text()

    alone = RunLayout(tmp_path / "alone")
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "evaluate", str(scenario.QUICKSTART), "--plain"]
    command += ["--checkpoint", str(layout.root), "--run-dir", str(alone.root), "--set", "run.seed=7"]
    for assignment in asked:
        command += ["--set", assignment]
    ended = subprocess.run(command, timeout=WITHIN_S, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (point,) = points(alone)
    assert (point.version.step, point.one_policy, point.all.answered) == (60, True, 32)
    assert point.all.greedy == last.all.greedy, (
        "the same weights answer the same tasks, whatever the run's seed"
    )
    assert "continue with" not in ended.stdout
    assert check(alone).problems == []


@pytest.mark.extended
def test_kills_in_the_middle_of_a_point_cost_no_task(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    groups = 2 * 240

    def kill_each(live: LiveRun) -> None:
        for count, victim in ((40, "sort3-0"), (120, "broker"), (200, "inference")):
            live.wait_for(f"{count} answers", lambda count=count: answers(layout) >= count)  # type: ignore[misc]
            live.kill(victim, signal.SIGKILL)
        live.wait_for("the first point", lambda: len(points(layout)) == 1)
        before = answers(layout)
        live.wait_for("the last point under way", lambda: answers(layout) >= before + 40)
        live.kill("trainer", signal.SIGKILL)

    asked = (*EVALUATING, "evaluation.tasks=240", "trainer.steps=20", "trainer.checkpoint_interval=10")
    code, summary = scenario.run(layout.root, asked, fault=kill_each, deadline_s=WITHIN_S)
    assert code == 0
    first, last = points(layout)
    for point, step in ((first, 0), (last, 20)):
        assert (point.version.step, point.all.answered, point.all.missing) == (step, 240, 0)
        assert (point.one_policy, point.rollouts, point.why) == (True, groups, "")
    assert last.version.incarnation == 1, "the killed trainer's point is evaluated anew"
    assert (summary["steps"], summary["trainer_resumes"]) == (20, 1)
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    assert summary["groups_evaluated"] >= 2 * groups
    assert check(layout).problems == []


@pytest.mark.extended
def test_a_task_that_always_fails_is_told_and_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text(
        "from rolloutmq import SingleTurn\n\n\n"
        "class Mute(SingleTurn):\n"
        "    max_tokens = 3\n\n"
        "    def task(self, rng):\n        return str(rng.randrange(100, 1000))\n\n"
        "    def eval_task_at(self, index, rng):\n"
        "        if index == 1:\n            raise ValueError('no such row')\n"
        "        return self.task(rng)\n\n"
        "    def prompt(self, task):\n        return task + '='\n\n"
        "    def score(self, task, completion):\n        return float(len(completion.text) % 2)\n"
    )
    config = tmp_path / "mute.toml"
    config.write_text(
        '[run]\ndir = "unused"\n\n[environment.mute]\nentry = "mute.py:Mute"\ngroup_size = 4\n'
        "max_workers = 1\n\n[evaluation]\nenabled = true\ntasks = 3\nsamples = 2\n\n"
        "[trainer]\nsteps = 2\nbatch_sequences = 16\n"
    )
    layout = RunLayout(tmp_path / "run")
    began = time.monotonic()
    code, summary = scenario.run(layout.root, (), config=config, deadline_s=WITHIN_S)
    assert code == 0
    assert time.monotonic() - began < WITHIN_S
    assert [(point.all.answered, point.all.failed, point.all.missing) for point in points(layout)] == [
        (2, 1, 0),
        (2, 1, 0),
    ]
    assert "1 of 3 tasks failed" in (tmp_path / "run.out").read_text()
    assert summary["groups_lost"] == 0
    assert "evaluation task failed" in layout.log("trainer").read_text()


@pytest.mark.extended
def test_two_ranks_of_a_trainer_wait_for_the_points_together(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    asked = (
        *EVALUATING,
        "evaluation.tasks=16",
        "evaluation.every=5",
        "evaluation.max_share=1",
        "trainer.ranks=2",
    )
    code, summary = scenario.run(layout.root, (*asked, "trainer.steps=8"), deadline_s=WITHIN_S)
    assert code == 0
    first, *_, last = points(layout)
    assert [(point.version.step, point.one_policy, point.all.answered) for point in (first, last)] == [
        (0, True, 16),
        (8, True, 16),
    ]
    assert (summary["steps"], summary["groups_lost"], summary["trainer_resumes"]) == (8, 0, 0)
    assert check(layout).problems == []
