"""Whole runs with an environment of verifiers, of either interface: what they must have done in the end."""

import signal
from pathlib import Path
from typing import Final

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from rolloutmq.bus.evaluation.log import recorded
from rolloutmq.launch.commands.records.ledger import check
from rolloutmq.schemas.files import RunLayout

WITHIN_S: Final = 500.0
EPISODES: Final = 500


def check_killed_run(tmp_path: Path, config: Path) -> None:
    """Run the environment `sums`, kill each process in between, and check the ledger."""
    layout = RunLayout(tmp_path / "run")

    def kill_each(live: LiveRun) -> None:
        victims = ("sums-0", "broker", "trainer", "inference", "sums-0", "broker", "trainer")
        for step, victim in zip(range(6, 60, 8), victims, strict=True):
            live.wait_for_step(step)
            live.kill(victim, signal.SIGKILL)

    asked = (
        "trainer.steps=64",
        "trainer.batch_sequences=32",
        "trainer.checkpoint_interval=4",
        "environment.sums.group_size=4",
    )
    code, summary = scenario.run(layout.root, asked, config=config, fault=kill_each, deadline_s=WITHIN_S)
    assert code == 0
    assert summary["steps"] == 64
    assert summary["trainer_resumes"] == 2
    assert summary["groups_accepted"] >= EPISODES
    assert summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_dead"] == 0
    assert check(layout).problems == []
    refused = [
        line for line in (layout.root / "logs" / "sums-0.log").read_text().splitlines() if "ERROR" in line
    ]
    assert not [line for line in refused if "rollout abandoned" in line and "ModelError" not in line]


def check_evaluated_run(tmp_path: Path, config: Path) -> None:
    """Run the environment `sums` with an evaluation and a curriculum, and check both."""
    layout = RunLayout(tmp_path / "run")
    asked = (
        "trainer.steps=4",
        "trainer.batch_sequences=64",
        "environment.sums.task_count=100",
        "curriculum.sums.sampler=uniform",
        "evaluation.enabled=true",
        "evaluation.tasks=16",
        "evaluation.samples=1",
    )
    code, summary = scenario.run(layout.root, asked, config=config, deadline_s=WITHIN_S)
    assert code == 0
    assert summary["groups_lost"] == 0
    points = list(recorded(layout.evaluations))
    assert [point.all.answered for point in points] == [16, 16]
    assert [point.all.failed for point in points] == [0, 0]
    assert summary["curriculum"]["sums"]["outcomes"] >= 4 * 4
