"""Whole runs of an environment of verifiers: killed, evaluated, with a curriculum; and what is refused before a run."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.services.worker.verifiers.support import PACKAGES, SUMS, missing

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from rolloutmq.bus.evaluation.log import recorded
from rolloutmq.launch.commands.ledger import check
from rolloutmq.launch.preflight.trial import try_environments, verdict_on
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

WITHIN_S = 500.0
EPISODES = 500


def test_more_than_500_episodes_with_kills_of_everything_have_an_exact_ledger(tmp_path: Path) -> None:
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
    code, summary = scenario.run(layout.root, asked, config=SUMS, fault=kill_each, deadline_s=WITHIN_S)
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


def test_an_evaluation_has_the_held_out_rows_and_a_curriculum_chooses_rows_by_number(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    asked = (
        "trainer.steps=4",
        "trainer.batch_sequences=64",
        "environment.sums.task_count=1000",
        "curriculum.sums.sampler=uniform",
        "evaluation.enabled=true",
        "evaluation.tasks=16",
        "evaluation.samples=1",
    )
    code, summary = scenario.run(layout.root, asked, config=SUMS, deadline_s=WITHIN_S)
    assert code == 0
    assert summary["groups_lost"] == 0
    points = list(recorded(layout.evaluations))
    assert [point.all.answered for point in points] == [16, 16]
    assert [point.all.failed for point in points] == [0, 0]
    assert summary["curriculum"]["sums"]["outcomes"] >= 4 * 4


def config(base_dir: Path, section: dict[str, Any], **sections: Any) -> RunConfig:
    given = {"environment": {"mine": section}, "model": {"alphabet": "0123456789=", "vocab_size": 16}}
    return validate({**given, **sections, "base_dir": str(base_dir)})


@pytest.mark.filterwarnings("ignore")  # those of other software
@pytest.mark.parametrize(
    ("section", "sections", "key", "problem"),
    [
        ({"verifiers": "mishap"}, {}, "environment.mine.verifiers", "there is no module mishap"),
        ({"verifiers": "json"}, {}, "environment.mine.verifiers", "no function `load_environment`"),
        (
            {"verifiers": "mishaps", "options": {"keys": 1}},
            {},
            "environment.mine.options",
            "unexpected keyword argument 'keys'",
        ),
        (
            {"verifiers": "mishaps", "options": {"fail": True, "key": "x"}},
            {},
            "environment.mine.verifiers",
            r"raised ValueError: refused: x \(mishaps.py, line",
        ),
        (
            {"verifiers": "mishaps", "sampling": {"extra": {"top_k": 5}}},
            {},
            "environment.mine.sampling.extra",
            "top_k must not change the distribution",
        ),
        (
            {"verifiers": "mishaps", "task_count": 10},
            {},
            "environment.mine.task_count",
            r"must not exceed the number of rows of mishaps, 9 \(got 10\)",
        ),
        (
            {"verifiers": "mishaps"},
            {"evaluation": {"enabled": True, "tasks": 10}},
            "evaluation.tasks",
            "has no task 9",
        ),
        (
            {"verifiers": "mishaps", "options": {"train": False}},
            {},
            "environment.mine.split",
            r'mishaps has evaluation data alone \(got "train"\); set split = "eval"',
        ),
        (
            {"verifiers": "mishaps", "group_deadline_s": 5.0},
            {},
            "environment.mine.group_deadline_s",
            "rewards compare the sequences",
        ),
        ({"verifiers": "calculator"}, {}, "model.alphabet", "lacks 'W', 'h', 'a', 't'"),
    ],
)
def test_a_mistake_is_refused_by_its_key_before_the_run(
    section: dict[str, Any], sections: dict[str, Any], key: str, problem: str
) -> None:
    verdict = verdict_on(config(PACKAGES, section, **sections))
    assert verdict.path == key
    assert re.search(problem, verdict.problem), verdict.problem


def test_a_package_is_tried_in_a_process_of_its_own() -> None:
    assert try_environments(config(PACKAGES, {"verifiers": "mishaps", "task_count": 7})) == ()
    with pytest.raises(ConfigError, match="refused: x"):
        try_environments(config(PACKAGES, {"verifiers": "mishaps", "options": {"fail": True, "key": "x"}}))
