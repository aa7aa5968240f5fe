"""The keys that differ, and no others."""

from typing import Any

from rolloutmq.launch.settings import validate
from rolloutmq.services.monitor.compare.config_keys import differing, value_text

MATH: dict[str, Any] = {"entry": "a:B", "group_size": 8}


def test_equal_configurations_have_none_but_their_names() -> None:
    one, other = ({"environment": {"math": MATH}, "run": {"dir": f"runs/{x}", "name": x}} for x in "ab")
    assert differing([validate(one), validate(other)]) == {}


def test_defaults_are_values_and_missing_sections_one_key() -> None:
    runs: list[dict[str, Any]] = [
        {"environment": {"math": MATH}, "trainer": {"steps": 7}},
        {"environment": {"math": {**MATH, "weight": 2.0}}},
        {"environment": {"math": MATH, "code": MATH}},
    ]
    found = differing([validate(run) for run in runs])
    default = validate({"environment": {"math": MATH}}).trainer.steps
    assert found == {
        "environment.math.weight": [1.0, 2.0, 1.0],
        "environment.code": ["absent", "absent", "present"],
        "trainer.steps": [7, default, default],
    }


def test_values_are_short_text() -> None:
    assert [value_text(one) for one in (None, "x", 1.5, True, ["a", 1])] == [
        "none",
        "x",
        "1.5",
        "true",
        '["a", 1]',
    ]
