"""Loading an environment from its `entry`, and the errors."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus import lifecycle
from rolloutmq.schemas.config.environment import DatasetConfig, EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker import loader
from rolloutmq.services.worker.loader import check_entry, load_environment
from rolloutmq.services.worker.scripted import ScriptedPolicy, play

GOOD = """
from dataclasses import dataclass
from rolloutmq import SingleTurn
from neighbour_of_the_entry import WORD

@dataclass
class Echo(SingleTurn):
    word: str = WORD
    times: int = 1

    def task(self, rng):
        return self.word * self.times

    def prompt(self, task):
        return task

    def score(self, task, completion):
        return 1.0

class Half(SingleTurn):
    def task(self, rng):
        return 0

class Unscored(Half):
    def prompt(self, task):
        return ""

def rate(task, answer, by=1.0):
    return by * len(answer.text)

class Stranger:
    pass

class Fussy(Echo):
    def __init__(self):
        raise ValueError("no   such\\nword")

class Refused(Echo):
    def __init__(self, key):
        raise ValueError(f"401 for {key}")

class Leaver(Echo):
    def __init__(self):
        raise SystemExit(0)

number = 3
"""


@pytest.fixture
def base_dir(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "package_of_the_entry").mkdir()
    (tmp_path / "package_of_the_entry" / "inner.py").write_text(GOOD)
    (tmp_path / "neighbour_of_the_entry.py").write_text("WORD = 'hi'")
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    (tmp_path / "garbled.py").write_text("class :")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(3)")
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if "entry" in name:
            del sys.modules[name]


def section(entry: str, **options: object) -> EnvironmentConfig:
    return EnvironmentConfig(entry=entry, options=options)


@pytest.mark.parametrize("entry", ["good.py:Echo", "package_of_the_entry.inner:Echo", "./good.py:Echo"])
def test_an_entry_is_loaded_with_its_options(base_dir: Path, entry: str) -> None:
    environment = load_environment("echo", section(entry, times=2), base_dir)
    policy = ScriptedPolicy("x")
    play(environment, policy)
    assert policy.prompts == ["hihi"]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("none.py:Echo", "there is no file"),
        ("good.py:Ecko", "good.py has no class `Ecko`; did you mean `Echo`?"),
        ("good.py:Zzz", "good.py has no class `Zzz`"),
        ("good.py:number", "`number` of good.py is not a class"),
        ("good.py:Stranger", "Stranger has no method `rollout`"),
        ("good.py:Half", "Half does not implement `prompt`"),
        ("good.py:Unscored", "Unscored does not implement `score`, and has no `rewards`"),
        ("good.py:Fussy", "Fussy() raised ValueError: no such word"),
        ("good.py:Leaver", "Leaver() raised SystemExit: 0"),
        ("good.py:two words", "`two words` is not a class name"),
        ("good.py:", "`` is not a class name"),
        ("broken.py:Echo", "importing broken.py raised ModuleNotFoundError: No module named 'no_such_module"),
        ("garbled.py:Echo", "importing garbled.py raised SyntaxError"),
        ("leaving.py:Echo", "importing leaving.py raised SystemExit: 3"),
        ("no_such_package.module:Echo", "there is no module no_such_package"),
        ("a/b:Echo", "`a/b` is neither a .py file nor a module"),
        (".good:Echo", "`.good` is neither a .py file nor a module"),
    ],
)
def test_what_is_wrong_is_said(base_dir: Path, entry: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment("mine", section(entry), base_dir)
    assert caught.value.path == "environment.mine.entry"
    assert problem in caught.value.problem
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "line"),
    [("good.py:Fussy", 'raise ValueError("no   such'), ("broken.py:Echo", "import no_such")],
)
def test_the_line_that_raised_is_in_the_log(
    base_dir: Path, caplog: pytest.LogCaptureFixture, entry: str, line: str
) -> None:
    with pytest.raises(ConfigError):
        load_environment("mine", section(entry), base_dir)
    assert line in caplog.text


def test_unknown_options_are_named_with_what_is_allowed(base_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment("mine", section("good.py:Echo", speed=1), base_dir)
    assert caught.value.path == "environment.mine.options"
    assert "speed" in caught.value.problem
    assert "times" in caught.value.problem


def test_a_secret_reaches_the_class_and_nobody_else(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_hidden", {})
    monkeypatch.setenv("ECHO_KEY", "s3cret-key")
    config = section("good.py:Echo", word="env:ECHO_KEY")
    play(load_environment("echo", config, base_dir), policy := ScriptedPolicy("x"))
    assert policy.prompts == ["s3cret-key"]
    assert config.options == {"word": "env:ECHO_KEY"}
    assert lifecycle.without_secrets("s3cret-key") == "env:ECHO_KEY"
    with pytest.raises(ConfigError, match=r"Refused\(\) raised ValueError: 401 for env:ECHO_KEY$"):
        load_environment("echo", section("good.py:Refused", key="env:ECHO_KEY"), base_dir)


def test_a_secret_that_is_not_set_is_named(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHO_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^environment\.echo\.options: `env:ECHO_KEY` .* is not set"):
        load_environment("echo", section("good.py:Echo", word="env:ECHO_KEY"), base_dir)


def test_an_entry_is_checked_without_running_it(base_dir: Path) -> None:
    check_entry("mine", section("leaving.py:Echo"), base_dir)
    with pytest.raises(ConfigError, match=r"environment\.mine\.entry: there is no file"):
        check_entry("mine", section("none.py:Echo"), base_dir)
    assert not [name for name in sys.modules if name.startswith("rolloutmq_entry_leaving")]


def test_a_module_that_fails_is_not_left_half_made(base_dir: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="ModuleNotFoundError"):
            load_environment("mine", section("broken.py:Echo"), base_dir)
    assert "rolloutmq_entry_broken" not in sys.modules


def rewarded(entry: str, **raters: dict[str, object]) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"entry": entry, "rewards": {"raters": raters}})


def test_raters_of_the_configuration_score(base_dir: Path) -> None:
    config = rewarded(
        "good.py:Unscored",
        own={"rater": "good.py:rate", "options": {"by": 3.0}},
        length={"rater": "length", "options": {"most": 9}},
    )
    environment = load_environment("mine", config, base_dir)
    assert play(environment, ScriptedPolicy("four")).scores.tolist() == [(12 + 1) / 2] * 4


@pytest.mark.parametrize(
    ("rater", "path", "problem"),
    [
        ({"rater": "none.py:rate"}, "one.rater", "there is no file"),
        ({"rater": "good.py:two words"}, "one.rater", "is not a function name"),
        ({"rater": "no.such.module:rate"}, "one.rater", "there is no module no"),
        ({"rater": "exactly"}, "one.rater", "did you mean `exact`"),
        ({"rater": "length", "options": {"least": 3}}, "one.options", "missing a required argument"),
    ],
)
def test_wrong_raters_are_refused_before_anything_is_imported(
    rater: dict[str, object], path: str, problem: str, base_dir: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_entry("mine", rewarded("good.py:Unscored", one=rater), base_dir)
    assert caught.value.path == f"environment.mine.rewards.raters.{path}"
    assert problem in caught.value.problem


def test_wrong_raters_of_the_users_code_are_refused_by_the_worker(base_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"raters\.one\.rater: good\.py has no function `rats`"):
        load_environment("mine", rewarded("good.py:Unscored", one={"rater": "good.py:rats"}), base_dir)
    wrong: dict[str, object] = {"rater": "good.py:rate", "options": {"factor": 3}}
    with pytest.raises(ConfigError, match=r"^environment\.mine\.rewards\.raters\.one\.options: .*'factor'"):
        load_environment("mine", rewarded("good.py:Unscored", one=wrong), base_dir)
    with pytest.raises(
        ConfigError, match=r"^environment\.mine\.rewards\.raters\.one\.rater: .*the class Echo"
    ):
        load_environment("mine", rewarded("good.py:Unscored", one={"rater": "good.py:Echo"}), base_dir)
    (base_dir / "own.py").write_text(
        "from rolloutmq import Ensemble\nfrom good import Unscored\n"
        "class Own(Unscored):\n    rewards = Ensemble({'a': 'exact'})\n"
    )
    with pytest.raises(ConfigError, match="Own has its own `rewards`"):
        load_environment("mine", rewarded("own.py:Own", one={"rater": "exact"}), base_dir)


def test_raters_of_the_configuration_never_replace_a_score(base_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^environment\.mine\.rewards\.raters: Echo has its own `score`"):
        load_environment("mine", rewarded("good.py:Echo", one={"rater": "exact"}), base_dir)


ROWS = """
from rolloutmq import RowTurn

class Asked(RowTurn):
    def prompt(self, task):
        return task["question"]

    def score(self, task, completion):
        return float(completion.text == task["answer"])

class Own(Asked):
    rows = [{"question": "own", "answer": "1"}]
"""


def test_rows_of_the_section_are_the_tasks(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base_dir / "rows.py").write_text(ROWS)
    rows = [{"question": f"{number}?", "answer": str(number)} for number in range(6)]
    told = []

    def opened(key: str, config: DatasetConfig, where: Path) -> tuple[list[Any], list[Any]]:
        told.append((key, config.path, where))
        return rows[:4], rows[4:]

    monkeypatch.setattr(loader, "open_rows", opened)
    given = EnvironmentConfig.model_validate({"entry": "rows.py:Asked", "dataset": {"path": "sums.jsonl"}})
    environment: Any = load_environment("mine", given, base_dir)
    assert told == [("environment.mine.dataset", "sums.jsonl", base_dir)]
    rng = random.Random(0)
    assert [environment.task_at(index, rng) for index in range(4)] == rows[:4]
    assert [environment.eval_task_at(index, rng) for index in range(2)] == rows[4:]
    assert environment.task(rng) in rows[:4]
    with pytest.raises(IndexError):
        environment.task_at(4, rng)
    with pytest.raises(IndexError):
        environment.eval_task_at(2, rng)
    group = play(environment, ScriptedPolicy(lambda prompt: prompt[:-1]), size=2)
    assert list(group.scores) == [1.0, 1.0]


def test_rows_need_a_section_unless_the_class_has_its_own(base_dir: Path) -> None:
    (base_dir / "rows.py").write_text(ROWS)
    with pytest.raises(
        ConfigError, match=r"^environment\.mine\.dataset\.path: required, because Asked takes"
    ):
        load_environment("mine", section("rows.py:Asked"), base_dir)
    own: Any = load_environment("mine", section("rows.py:Own"), base_dir)
    assert len(own.rows) == 1


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        ({"eval_rows": 3}, "path is required in a section `dataset`"),
        ({"path": "a/b", "eval_rows": 3, "eval_split": "test"}, "eval_rows must be 0 with eval_split 'test'"),
        ({"path": "a/b", "rows": 3}, "rows"),
    ],
)
def test_a_wrong_section_of_a_data_set_is_refused(dataset: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EnvironmentConfig.model_validate({"entry": "rows.py:Asked", "dataset": dataset})
    plain = EnvironmentConfig(entry="rows.py:Asked")
    assert EnvironmentConfig.model_validate_json(plain.model_dump_json()) == plain
