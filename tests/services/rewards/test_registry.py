"""The registry of raters: built in, registered, and of other packages."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.rewards import registry
from rolloutmq.services.rewards.builtin import BUILTIN, Length
from rolloutmq.services.rewards.registry import check_rater, known_raters, make_rater, register_rater

KEY = "environment.math.rewards.raters.one"


class Always:
    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __call__(self, task: Any, answer: Any) -> float:
        del task, answer
        return self.value


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(BUILTIN))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package on the import path whose metadata names two raters; returns the name of its module."""
    (tmp_path / "a_plugin.py").write_text(
        "class Polite:\n    def __call__(self, task, answer):\n        return 0.5\n"
    )
    info = tmp_path / "a_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[rolloutmq.raters]\npolite = a_plugin:Polite\nbroken = no_such_module:Rater\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "a_plugin", raising=False)
    return "a_plugin"


def test_built_in_raters_are_made_with_their_options() -> None:
    assert known_raters() == ["exact", "length", "number", "regex"]
    assert make_rater(KEY, "length", {"most": 5}) == Length(5)


def test_a_program_registers_its_own() -> None:
    register_rater("always", Always)
    register_rater("always", Always)  # again is no conflict
    assert make_rater(KEY, "always", {"value": 3.0})(None, None) == 3.0
    with pytest.raises(ConfigError, match="another factory is registered"):
        register_rater("always", Length)


def test_raters_of_other_packages_load_when_they_are_made(plugin: str) -> None:
    assert "polite" in known_raters()
    check_rater(KEY, "polite", {})
    assert plugin not in sys.modules
    assert make_rater(KEY, "polite", {})(None, None) == 0.5
    assert plugin in sys.modules
    with pytest.raises(ConfigError, match=r"one\.rater: loading broken raised ModuleNotFoundError"):
        make_rater(KEY, "broken", {})
    with pytest.raises(ConfigError, match=r"one\.options: .*unexpected keyword argument 'louder'"):
        make_rater(KEY, "polite", {"louder": True})


def test_unknown_names_and_options_are_refused_by_their_path() -> None:
    with pytest.raises(
        ConfigError, match=r"one\.rater: unknown rater \(got 'exakt'\); did you mean `exact`\?"
    ):
        check_rater(KEY, "exakt", {})
    with pytest.raises(ConfigError, match=r"one\.options: missing a required argument: 'most'; length takes"):
        check_rater(KEY, "length", {})
    with pytest.raises(ConfigError, match=r"one\.options: least and most"):
        check_rater(KEY, "length", {"most": -1})
    check_rater(KEY, "length", None)  # with secrets, the options are known in the worker
