"""Whole runs with an environment of verifiers 0.4: killed, evaluated, with a curriculum; and refused before a run."""

from pathlib import Path
from typing import Any

import pytest
from tests.services.worker.verifiers.support import ADDITIONS, missing_tasksets
from tests.services.worker.verifiers.whole_runs import check_evaluated_run, check_killed_run

from rolloutmq.launch.preflight.examination import Examination
from rolloutmq.launch.preflight.trial import try_environments
from rolloutmq.launch.settings import load as load_config
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing_tasksets()), reason=missing_tasksets())]


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home of its own: without a login, and with the directories that rollouts of a killed worker leave behind."""
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_more_than_500_episodes_with_kills_of_everything_have_an_exact_ledger(tmp_path: Path) -> None:
    check_killed_run(tmp_path, ADDITIONS)


def test_an_evaluation_has_the_held_out_rows_and_a_curriculum_chooses_rows_by_number(tmp_path: Path) -> None:
    check_evaluated_run(tmp_path, ADDITIONS)


def config(section: dict[str, Any], **sections: Any) -> RunConfig:
    given = {"environment": {"mine": section}, "model": {"alphabet": "0123456789+=", "vocab_size": 16}}
    return validate({**given, **sections, "base_dir": str(ADDITIONS.parent)})


OPTIONS = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.mark.filterwarnings("ignore")  # those of other software
@pytest.mark.parametrize(
    ("section", "sections", "key", "problem"),
    [
        (
            {"verifiers": "additions", "options": {}},
            {},
            "environment.mine.options.agent.runtime",
            "Prime Intellect",
        ),
        (
            {"verifiers": "additions", "options": OPTIONS, "task_count": 101},
            {"curriculum": {"mine": {"sampler": "uniform"}}},
            "environment.mine.task_count",
            "has no task 100",
        ),
        (
            {"verifiers": "additions", "options": OPTIONS},
            {"evaluation": {"enabled": True, "tasks": 101}},
            "evaluation.tasks",
            "has no task 100",
        ),
        (
            {"verifiers": "additions", "options": OPTIONS},
            {"model": {"alphabet": "0123456789=", "vocab_size": 16}},
            "model.alphabet",
            "lacks '+'",
        ),
    ],
)
def test_a_mistake_is_refused_by_its_key_before_the_run(
    section: dict[str, Any], sections: dict[str, Any], key: str, problem: str
) -> None:
    resolved = config(section, **sections)
    (name,) = resolved.environment
    found, *_ = Examination(resolved, name).verdict().problems
    assert found.path == key
    assert problem in found.problem


def test_a_package_is_tried_in_a_process_of_its_own() -> None:
    (found,) = try_environments(load_config(ADDITIONS, environ={}))
    assert (found.problems, found.failures) == ((), ())
