"""Whole runs with a curriculum: it is killed and resumed, and goes on where it was."""

import json
import signal
from pathlib import Path

import pytest

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from benchmarks.rewards import curriculum
from benchmarks.rewards.learning import EXAMPLE
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.telemetry import CurriculumProgress
from rolloutmq.services.monitor.text.jsonl import read_lines


def progress(layout: RunLayout) -> CurriculumProgress:
    found = read_json(layout.curriculum, list[CurriculumProgress])
    assert found is not None
    return found[0]


@pytest.mark.extended
def test_a_killed_curriculum_costs_a_pause_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")

    def kill(live: LiveRun) -> None:
        for step in (5, 10):
            live.wait_for_step(step)
            live.kill("curriculum", signal.SIGKILL)

    code, summary = scenario.run(layout.root, ("trainer.steps=20",), config=EXAMPLE, fault=kill)
    assert code == 0
    assert summary["groups_lost"] == summary["groups_dead"] == 0
    first = progress(layout)
    trained = sum(
        len(batch.trained) + len(batch.filtered) for batch in read_lines(layout.trained, SettledBatch)
    )
    assert first.outcomes >= trained == 20 * 16, "every group is the answer of a task, and each was heard"
    assert first.drawn == first.outcomes + first.open + first.dropped
    assert summary["curriculum"]["sort"]["sampler"] == "learnability"
    kinds = {json.loads(line)["kind"] for line in layout.metrics.read_text().splitlines()}
    assert "curriculum" in kinds
    code, summary = scenario.run(layout.root, ("trainer.steps=30",), config=EXAMPLE, flags=("--resume",))
    assert (code, summary["steps"]) == (0, 30)
    assert progress(layout).outcomes > first.outcomes, "it goes on, and does not begin anew"


@pytest.mark.extended
def test_a_pair_of_short_runs_is_compared_on_the_evaluation_set(tmp_path: Path) -> None:
    one = curriculum.pair(tmp_path, seed=0, steps=60)
    for course in (one.ours, one.control):
        assert [point.step for point in course.points] == [10, 20, 30, 40, 50, 60]
        assert course.points[-1].groups == course.groups == 60 * 16
        assert course.points[-1].score > course.points[0].score
        assert 0 < course.filtered_share < 1
