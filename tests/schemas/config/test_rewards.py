"""The sections of rewards and health in a whole configuration: paths of errors, and the way through config.json."""

from typing import Any

import pytest

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

RATERS = {"a": {"rater": "exact"}, "b": {"rater": "judge.py:rate", "weight": 2.0}}

ONE = {"a": {"rater": "exact"}}
FOUR = {name: {"rater": "exact"} for name in "abcd"}
WEIGHTLESS = {"rater": "exact", "weight": 0.0}


def config(rewards: dict[str, Any], **environment: Any) -> RunConfig:
    return validate({"environment": {"math": {"entry": "m.py:M", "rewards": rewards, **environment}}})


@pytest.mark.parametrize(
    "rewards",
    [
        {},
        {"raters": RATERS, "combine": "median", "agreement": {"act": "hold"}},
        {"raters": RATERS, "missing": "hold", "hold_s": 5.0},
        {"raters": FOUR, "combine": "trimmed_mean", "trim": 0.4},
        {"raters": ONE, "combine": "majority", "pass_at": 0.9},
        {"raters": FOUR, "agreement": {"act": "down_weight", "outlier_weight": 0.5}},
        {"raters": RATERS, "scale": "rank", "window": 768, "agreement": {"metric": "ratio"}},
    ],
)
def test_a_written_configuration_is_read_back(rewards: dict[str, Any]) -> None:
    made = config(rewards)
    assert RunConfig.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("rewards", "path"),
    [
        ({"combine": "median"}, "combine"),
        ({"raters": {"a": {"rater": "exact", "weight": 0.0}}}, "raters"),
        ({"raters": {"a": {"rater": "exact", "weight": -1}}}, "raters.a.weight"),
        ({"raters": {"a": {"weight": 1}}}, "raters.a.rater"),
        ({"raters": {"a": {"rater": "x:y:z"}}}, "raters.a.rater"),
        ({"raters": {"a": {"rater": "exact", "wait": 1}}}, "raters.a.wait"),
        ({"raters": RATERS, "agreement": {"act": "down_weight"}}, "agreement.act"),
        ({"raters": RATERS, "trim": 0.5}, "trim"),
        ({"raters": RATERS, "window": 8}, "agreement.min_items"),
        ({"raters": RATERS, "hold_s": 5.0}, "hold_s"),
        ({"raters": RATERS, "combine": "median", "pass_at": 0.9}, "pass_at"),
        ({"raters": RATERS, "trim": 0.4}, "trim"),
        ({"raters": FOUR, "combine": "trimmed_mean", "trim": 0.2}, "trim"),
        ({"raters": FOUR | {"d": WEIGHTLESS}, "combine": "trimmed_mean"}, "trim"),
        ({"raters": FOUR, "agreement": {"outlier_weight": 0.5}}, "agreement.outlier_weight"),
        ({"raters": ONE, "agreement": {"act": "hold"}}, "agreement.act"),
        ({"raters": ONE, "agreement": {"low": 0.5}}, "agreement.low"),
        ({"raters": RATERS, "scale": "zscore", "agreement": {"metric": "ratio"}}, "agreement.metric"),
        ({"raters": RATERS, "window": 769, "agreement": {"metric": "ratio"}}, "window"),
        ({"raters": FOUR, "agreement": {"metric": "ratio"}}, "window"),
        ({"raters": RATERS, "median": True}, "median"),
    ],
)
def test_errors_name_the_dotted_path(rewards: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(rewards)
    assert refused.value.path == f"environment.math.rewards.{path}"


def test_a_program_has_no_raters() -> None:
    environment = {"command": ["run"], "rewards": {"raters": RATERS}}
    with pytest.raises(ConfigError, match=r"environment\.math\.rewards: has no effect on a program"):
        validate({"environment": {"math": environment}, "gateway": {"enabled": True}})
    made = validate({"environment": {"math": {"command": ["run"]}}, "gateway": {"enabled": True}})
    assert RunConfig.model_validate_json(made.model_dump_json()) == made


def test_health_names_findings_that_exist() -> None:
    assert validate({"health": {"stop_on": ["collapse"]}}).health.stop_on == ("collapse",)
    with pytest.raises(ConfigError) as refused:
        validate({"health": {"stop_on": ["colapse"]}})
    assert refused.value.path == "health.stop_on.0"


def test_a_score_passes_by_its_environment_or_exactly_as_in_the_evaluation() -> None:
    environment = {"own": {"entry": "a:B", "pass_score": 0.5}, "usual": {"entry": "a:B"}}
    config = validate({"environment": environment})
    assert config.passes("own", 0.5)
    assert config.passes("own", 3.0)
    assert not config.passes("own", 0.25)
    for env in ("usual", "of one's own"):
        assert config.passes(env, 1.0)
        assert not config.passes(env, 3.0), "a score of another scale"
        assert not config.passes(env, 0.5)
