"""What a configuration may ask of the evaluation."""

from typing import Any

import pytest
from pydantic import ValidationError

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.evaluation import EvaluationConfig, evaluated
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

CLASS = {"entry": "a:B"}
PROGRAM = {"command": ["true"]}
GATEWAY = {"enabled": True, "listen": True}


def tree(**sections: Any) -> dict[str, Any]:
    return {"environment": {"e": CLASS}, "evaluation": {"enabled": True}, **sections}


def test_every_environment_with_a_class_is_evaluated() -> None:
    config = validate(tree(environment={"e": CLASS, "f": CLASS, "p": PROGRAM}, gateway=GATEWAY))
    assert config.evaluated == ("e", "f")
    assert validate({"environment": {"e": CLASS}}).evaluated == ()
    named = validate(
        tree(environment={"e": CLASS, "f": CLASS}, evaluation={"enabled": True, "environments": ["f"]})
    )
    assert named.evaluated == ("f",)
    assert evaluated(EvaluationConfig(environments=("e",)), {"e": EnvironmentConfig(**CLASS)}) == ()


def test_a_held_out_environment_takes_part() -> None:
    held_out = {**CLASS, "split": "eval"}
    assert validate(tree(environment={"e": CLASS, "h": held_out})).evaluated == ("e", "h")
    mine = validate({"environment": {"h": held_out}, "trainer": {"enabled": False}})
    assert mine.evaluated == (), "a trainer of one's own may pull the split itself"


@pytest.mark.parametrize(
    ("sections", "path", "problem"),
    [
        (
            {"evaluation": {"enabled": True, "every": 5}, "trainer": {"enabled": False}},
            "evaluation.every",
            "must be 0 with trainer.enabled = false",
        ),
        (
            {"evaluation": {"enabled": True, "greedy": False, "samples": 0}},
            "evaluation.samples",
            "must be at least 1 with greedy = false",
        ),
        ({"evaluation": {"environments": ["x"]}}, "evaluation.environments", "there is no environment x"),
        (
            {"evaluation": {"environments": ["e", "e"], "enabled": True}},
            "evaluation.environments",
            "must name each environment once",
        ),
        (
            {
                "evaluation": {"environments": ["p"]},
                "environment": {"e": CLASS, "p": PROGRAM},
                "gateway": GATEWAY,
            },
            "evaluation.environments",
            "p is a program, which answers no tasks",
        ),
        (
            {"environment": {"p": PROGRAM}, "gateway": GATEWAY},
            "evaluation.enabled",
            "must be false without an environment that has a class",
        ),
        (
            {"environment": {"e": {**CLASS, "split": "eval"}}, "evaluation": {}},
            "environment.e.split",
            "set evaluation.enabled = true",
        ),
        (
            {
                "environment": {"e": CLASS, "h": {**CLASS, "split": "eval"}},
                "evaluation": {"enabled": True, "environments": ["e"]},
            },
            "environment.h.split",
            "add h to evaluation.environments",
        ),
        ({"environment": {"e" * 49: CLASS}}, f"environment.{'e' * 49}", "at most 48 characters"),
        (
            {"evaluation": {"enabled": True, "max_share": 1.5}},
            "evaluation.max_share",
            "less than or equal to 1",
        ),
        (
            {"evaluation": {"enabled": True, "every": 10, "max_share": 0}},
            "evaluation.max_share",
            "must be above 0 with every",
        ),
        ({"evaluation": {"enabled": True, "tasks": 0}}, "evaluation.tasks", "greater than or equal to 1"),
    ],
)
def test_what_nobody_could_answer_is_refused_by_its_path(
    sections: dict[str, Any], path: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(tree(**sections))
    assert refused.value.path == path
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "section", [{"deadline_s": float("inf")}, {"deadline_s": 2e9}, {"pass_score": float("nan")}]
)
def test_values_that_would_fail_later_are_refused(section: dict[str, Any]) -> None:
    (key,) = section
    with pytest.raises(ConfigError, match=f"evaluation.{key}"):
        validate(tree(evaluation={"enabled": True, **section}))


def test_an_evaluated_environment_keeps_a_worker() -> None:
    none = {"e": CLASS | {"min_workers": 0}}
    with pytest.raises(ConfigError, match="min_workers: must be at least 1 with evaluation"):
        validate(tree(environment=none))
    validate({"environment": none})
    with pytest.raises(ConfigError, match='min_workers: must be at least 1 with split = "eval"'):
        validate({"environment": {"e": CLASS | {"min_workers": 0, "split": "eval"}}})
    validate(tree(environment=none, orchestrator={"enabled": False}))


def test_a_long_name_is_fine_without_evaluation() -> None:
    assert RunConfig.model_validate({"environment": {"e" * 49: CLASS}}).evaluated == ()
    with pytest.raises(ValidationError):
        RunConfig.model_validate(tree(environment={"e" * 49: CLASS}))
