"""Whole runs of an environment of verifiers: killed, evaluated, with a curriculum; and what is refused before a run."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.services.worker.verifiers.support import PACKAGES, SUMS, missing
from tests.services.worker.verifiers.whole_runs import check_evaluated_run, check_killed_run

from rolloutmq.launch.preflight.examination import Examination
from rolloutmq.launch.preflight.trial import try_environments
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]


def test_more_than_500_episodes_with_kills_of_everything_have_an_exact_ledger(tmp_path: Path) -> None:
    check_killed_run(tmp_path, SUMS)


def test_an_evaluation_has_the_held_out_rows_and_a_curriculum_chooses_rows_by_number(tmp_path: Path) -> None:
    check_evaluated_run(tmp_path, SUMS)


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
            r"raised ValueError: refused: x \(mishaps\.py:",
        ),
        (
            {"verifiers": "mishaps", "sampling": {"extra": {"top_k": 5}}},
            {},
            "environment.mine.sampling.extra",
            "top_k must not change the distribution",
        ),
        (
            {"verifiers": "mishaps", "task_count": 12},
            {},
            "environment.mine.task_count",
            r"must not exceed the number of rows of mishaps, 11 \(got 12\)",
        ),
        (
            {"verifiers": "mishaps"},
            {"evaluation": {"enabled": True, "tasks": 12}},
            "evaluation.tasks",
            "has no task 11",
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
    resolved = config(PACKAGES, section, **sections)
    (name,) = resolved.environment
    found, *_ = Examination(resolved, name).verdict().problems
    assert found.path == key
    assert re.search(problem, found.problem), found.problem


def test_a_package_is_tried_in_a_process_of_its_own() -> None:
    (found,) = try_environments(config(PACKAGES, {"verifiers": "mishaps", "task_count": 7}))
    assert (found.problems, found.failures) == ((), ())
    options = {"fail": True, "key": "x"}
    (found,) = try_environments(config(PACKAGES, {"verifiers": "mishaps", "options": options}))
    assert "refused: x" in found.problems[0].problem
