"""`[curriculum.NAME]` and the environment that it needs."""

from typing import Any

import pytest

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

ENVIRONMENT = {"entry": "a:B", "task_count": 10, "group_size": 8}


def tree(
    environment: dict[str, Any] | None = None, curriculum: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "environment": {"e": {**ENVIRONMENT, **(environment or {})}},
        "curriculum": {"e": curriculum or {}},
        "trainer": {"batch_sequences": 64},
    }


def test_workers_of_its_environment_take_submitted_tasks() -> None:
    found = validate(tree())
    assert found.environment["e"].tasks == "submitted"
    assert RunConfig.model_validate_json(found.model_dump_json()) == found
    assert validate({"environment": {"e": ENVIRONMENT}}).environment["e"].tasks == "own"


@pytest.mark.parametrize(
    ("environment", "curriculum", "error"),
    [
        ({"task_count": 0}, {}, "environment.e.task_count: is required by curriculum.e (got 0)"),
        ({"task_count": -1}, {}, "environment.e.task_count: must be greater than or equal to 0 (got -1)"),
        ({"tasks": "both"}, {}, 'environment.e.tasks: must be "submitted", because curriculum.e'),
        ({"tasks": "own"}, {}, 'environment.e.tasks: must be "submitted", because curriculum.e'),
        ({"split": "eval"}, {}, "curriculum.e: must not be given for the split `eval`"),
        ({}, {"levels": 0}, "curriculum.e.levels: must be greater than or equal to 1 (got 0)"),
        ({}, {"levels": 1025}, "curriculum.e.levels: must be less than or equal to 1024 (got 1025)"),
        ({}, {"ahead": -1}, "curriculum.e.ahead: must be greater than or equal to 0 (got -1)"),
        ({}, {"report_every": 0}, "curriculum.e.report_every: must be greater than 0 (got 0)"),
        (
            {},
            {"scores": [1, 1]},
            "curriculum.e.scores: must be a lower and a higher finite number (got 1 and 1)",
        ),
        (
            {},
            {"scores": [0, float("inf")]},
            "curriculum.e.scores: must be a lower and a higher finite number",
        ),
        ({}, {"scores": [0, 5e-324]}, "curriculum.e.scores: must lie further apart (got 0 and 4.94066e-324)"),
        (
            {},
            {"ahead": 10_000},
            "curriculum.e.ahead: the open tasks of all curricula must be fewer than broker.max_tasks 10000 "
            "(got 10000 here, 10000 in all)",
        ),
        ({}, {"samplers": "x"}, "curriculum.e.samplers: unknown key; did you mean `sampler`?"),
    ],
)
def test_a_curriculum_without_what_it_needs_is_refused_by_its_dotted_path(
    environment: dict[str, Any], curriculum: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(tree(environment, curriculum))
    assert str(caught.value).startswith(error)


def test_a_curriculum_of_no_environment_or_of_a_program_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^curriculum\.x: must have the name of an environment \(configured: e\)"
    ):
        validate({"environment": {"e": ENVIRONMENT}, "curriculum": {"x": {}}})
    program = {
        "environment": {"e": {"command": ["true"]}},
        "curriculum": {"e": {}},
        "gateway": {"enabled": True},
    }
    with pytest.raises(ConfigError, match=r"^curriculum\.e: must not be given for a program"):
        validate(program)


def test_two_batches_are_ahead_unless_the_section_says_otherwise() -> None:
    assert validate(tree()).groups_ahead("e") == 16
    assert validate(tree(curriculum={"ahead": 3})).groups_ahead("e") == 3
    several = tree()
    several["environment"]["f"] = {"entry": "a:B", "group_size": 8, "weight": 3.0}
    assert validate(several).groups_ahead("e") == 4, "its part of the batches"


def test_the_open_tasks_of_all_curricula_leave_room_at_the_broker() -> None:
    several = tree(curriculum={"ahead": 30})
    several["environment"]["f"] = {**ENVIRONMENT, "group_size": 8}
    several["curriculum"]["f"] = {"ahead": 20}
    assert validate(several | {"broker": {"max_tasks": 51}}).groups_ahead("f") == 20
    with pytest.raises(
        ConfigError, match=r"^curriculum\.f\.ahead: .* 50 \(got 20 here, 50 in all\); set a smaller"
    ):
        validate(several | {"broker": {"max_tasks": 50}})


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({}, "environment.e.entry: is required: name a class; or set `verifiers`"),
        (
            {"entry": "a:B", "verifiers": "wordle"},
            "environment.e.entry: must not be given beside `verifiers` (got 'a:B'); remove one of them",
        ),
        (
            {"verifiers": "wordle", "command": ["run"]},
            "environment.e.verifiers: must not be given beside `command` (got 'wordle'); remove one of them",
        ),
        ({"verifiers": "wordle@1.0"}, "environment.e.verifiers: must be the name of an installed package"),
        ({"verifiers": "a/b/c"}, "environment.e.verifiers: must be the name of an installed package"),
        (
            {"verifiers": "wordle", "rewards": {"raters": {"a": {"rater": "exact"}}}},
            "environment.e.rewards: has no effect on an environment of `verifiers`",
        ),
        ({"entry": "a:B", "sampling": {"max_tokens": 1}}, "environment.e.sampling: is for an environment of"),
        (
            {"verifiers": "wordle", "sampling": {"temperature": -1}},
            "environment.e.sampling.temperature: must be greater than or equal to 0 (got -1)",
        ),
    ],
)
def test_a_package_is_one_source_of_an_environment(section: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"environment": {"e": section}})
    assert str(caught.value).startswith(error)


def test_a_package_has_a_name_with_or_without_its_owner() -> None:
    for name in ("wordle", "primeintellect/wordle", "reasoning-gym-env", "prime.intellect/i3_math"):
        section = {"verifiers": name, "sampling": {"max_tokens": 8}, "options": {"a": 1}}
        found = validate({"environment": {"e": section}})
        assert found.environment["e"].verifiers == name
        assert RunConfig.model_validate_json(found.model_dump_json()) == found
