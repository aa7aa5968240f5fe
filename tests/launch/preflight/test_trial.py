"""Environments are tried before a run: what can never work is refused by its key, what cannot be told is advice."""

import json
import os
import re
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.launch.preflight import checks, trial
from rolloutmq.launch.preflight.trial import Verdict, _place, try_environments, verdict_on
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

CLASSES = """
import os

from rolloutmq import Ensemble, SingleTurn


class Good(SingleTurn):
    def task(self, rng):
        return rng.randrange(50), rng.randrange(50)

    def prompt(self, task):
        return f"{task[0]}={task[1]}"

    def score(self, task, completion):
        return 0.0


class Unscored(SingleTurn):
    task, prompt = Good.task, Good.prompt


class Weightless(Unscored):
    def __init__(self, **options):
        self.rewards = Ensemble({"a": "exact"}, **options)


class Own(Unscored):
    rewards = Ensemble({"a": "exact", "b": "number"})


class Plus(Good):
    def prompt(self, task):
        return f"<bos>{task[0]}+{task[1]}="


class Chat(Good):
    def prompt(self, task):
        return [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]


class Ids(Good):
    def prompt(self, task):
        return [1, 2, 3]


class Turns(Plus):
    async def rollout(self, policy, size, rng):
        return []


class Rows(Good):
    ROWS = [("1", "1"), ("2", "2"), ("3", "3")]

    def task_at(self, index, rng):
        return self.ROWS[index]


class HeldOut(Rows):
    def eval_task_at(self, index, rng):
        return self.ROWS[index % 2]


class Looked:
    async def rollout(self, policy, size, rng):
        return []

    async def rollout_at(self, policy, index, size, rng):
        return []


class Promptless(Good):
    def prompt(self, task):
        return None


class Unlucky(Good):
    def task(self, rng):
        raise KeyError("no such dataset")


class Managed(Unlucky):
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


class Leaving(Good):
    def __init__(self):
        os._exit(7)


class Hanging(Good):
    def __init__(self):
        while True:
            pass


class Broken(Good):
    def __init__(self):
        raise ValueError("no key")


class Brokenly(Broken):
    rollout = None
"""


@pytest.fixture
def base_dir(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tried.py").write_text(CLASSES)
    (tmp_path / "typo.py").write_text(
        "from rolloutmq import Ensemble, SingleTurn\n\n\nclass Typo(SingleTurn):\n"
        "    rewards = Ensemble({'a': 'exact'}, weights={'b': 1.0})\n"
    )
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("rolloutmq_entry_tried", "rolloutmq_entry_typo"):
        sys.modules.pop(name, None)


def config(
    base_dir: Path, kind: str, environment: dict[str, Any] | None = None, **sections: Any
) -> RunConfig:
    entry = kind if ":" in kind else f"tried.py:{kind}"
    about = {"e": {"entry": entry, **(environment or {})}}
    return validate({"environment": about, "base_dir": str(base_dir), **sections})


def refused(config: RunConfig) -> str:
    found = verdict_on(config)
    assert found.path, "the environments pass"
    return f"{found.path}: {found.problem}"


@pytest.mark.parametrize(
    ("kind", "environment", "problem"),
    [
        (
            "typo.py:Typo",
            {},
            "environment.e.entry: importing typo.py raised ConfigError: rewards.weights.b: no rater has this name; "
            "raters: a (typo.py, line 5)",
        ),
        ("Good", {"options": {"x": 1}}, "environment.e.options: got an unexpected keyword argument 'x'"),
        ("Goood", {}, "environment.e.entry: tried.py has no class `Goood`; did you mean `Good`?"),
        ("Unscored", {}, "environment.e.entry: Unscored does not implement `score`"),
        ("Broken", {}, "environment.e.entry: Broken() raised ValueError: no key (tried.py, line "),
        (
            "Weightless",
            {"options": {"weights": {"a": 0.0}}},
            "environment.e.entry: Weightless() raised ConfigError: rewards.raters: must have weights that add up to "
            "more than 0 (got 0); give one a weight (tried.py, line ",
        ),
        (
            "Own",
            {"rewards": {"raters": {"c": {"rater": "exact"}}}},
            "environment.e.rewards.raters: Own has its own `rewards`; remove them",
        ),
        (
            "Good",
            {"rewards": {"raters": {"c": {"rater": "exact"}}}},
            "environment.e.rewards.raters: Good has its own `score`, which they would replace; remove one",
        ),
        ("Looked", {"group_deadline_s": 1.0}, "environment.e.group_deadline_s: Looked has no method `task`"),
    ],
)
def test_a_class_that_cannot_work_is_refused_by_its_key(
    kind: str, environment: dict[str, Any], problem: str, base_dir: Path
) -> None:
    found = refused(config(base_dir, kind, environment))
    assert found.startswith(problem)
    assert "\n" not in found


def test_a_library_is_no_place_of_the_users_code(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    error = caught.value
    assert error.__traceback__ is not None
    error.with_traceback(error.__traceback__.tb_next)  # as raised below this package
    assert _place(error, tmp_path, {"mine"}) == ""
    assert re.match(r"decoder\.py, line \d+", _place(error, tmp_path, {"json"})), "installed by the user"


@pytest.mark.parametrize("kind", ["Plus", "Chat"])
def test_characters_that_the_model_does_not_know_are_named(kind: str, base_dir: Path) -> None:
    found = refused(config(base_dir, kind))
    assert re.match(
        r"model\.alphabet: lacks '\+' of the prompt '.*' of environment e \(got '0123456789= '\); add", found
    )
    assert verdict_on(config(base_dir, kind, model={"alphabet": "0123456789=+"})) == Verdict()


def test_characters_are_known_of_a_built_model_alone(base_dir: Path) -> None:
    assert verdict_on(config(base_dir, "Ids")) == Verdict()
    assert verdict_on(config(base_dir, "Turns")) == Verdict(), "its rollout has prompts of its own"
    external = {"kind": "external", "url": "http://127.0.0.1:9/v1"}
    assert verdict_on(config(base_dir, "Plus", inference=external)) == Verdict()


ENDED_WITHIN_S = 30.0
EVALUATION = {"enabled": True, "tasks": 4}


@pytest.mark.parametrize(
    ("kind", "environment", "sections", "problem"),
    [
        (
            "Rows",
            {"task_count": 3},
            {"evaluation": EVALUATION},
            "evaluation.tasks: must not exceed environment.e.task_count 3, because Rows has no `eval_task_at`",
        ),
        (
            "Looked",
            {"task_count": 3},
            {"evaluation": EVALUATION},
            "evaluation.tasks: must not exceed environment.e.task_count 3, because Looked has no `rollout_eval`",
        ),
        (
            "Rows",
            {},
            {"evaluation": EVALUATION},
            "evaluation.tasks: Rows.eval_task_at of environment e has no task 3, it raised IndexError: list index out "
            "of range (got 4); lower it",
        ),
        (
            "Rows",
            {"task_count": 9},
            {"curriculum": {"e": {}}},
            "environment.e.task_count: Rows.task_at of environment e has no task 8",
        ),
    ],
)
def test_rows_that_are_not_there_are_refused(
    kind: str, environment: dict[str, Any], sections: dict[str, Any], problem: str, base_dir: Path
) -> None:
    assert refused(config(base_dir, kind, environment, **sections)).startswith(problem)


def test_rows_that_are_there_pass(base_dir: Path) -> None:
    held_out = config(base_dir, "HeldOut", {"task_count": 3}, evaluation=EVALUATION, curriculum={"e": {}})
    assert verdict_on(held_out) == Verdict()
    drawn = config(base_dir, "Good", {"task_count": 3}, evaluation=EVALUATION)
    assert verdict_on(drawn) == Verdict()
    assert (
        verdict_on(config(base_dir, "Rows", {"task_count": 3}, evaluation={**EVALUATION, "tasks": 3}))
        == Verdict()
    )


def test_a_task_that_cannot_be_drawn_is_advice(base_dir: Path) -> None:
    """The next one may be drawn; and an environment that is entered first may have no data yet."""
    found = verdict_on(config(base_dir, "Unlucky"))
    assert (found.path, found.advice) == (
        "",
        ("environment.e.entry: drawing a task by `task` raised KeyError: 'no such dataset'",),
    )
    assert verdict_on(config(base_dir, "Managed")) == Verdict()
    (told,) = verdict_on(config(base_dir, "Promptless")).advice
    assert "`task` raised TypeError: 'NoneType' object is not iterable" in told


def test_another_process_tries_them(base_dir: Path) -> None:
    assert try_environments(config(base_dir, "Good")) == ()
    with pytest.raises(ConfigError, match=r"^environment\.e\.rewards\.raters: Own has its own `rewards`"):
        checks.check(config(base_dir, "Own", {"rewards": {"raters": {"c": {"rater": "exact"}}}}))
    assert "rolloutmq_entry_tried" not in sys.modules


def test_what_cannot_be_tried_refuses_nothing(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = try_environments(config(base_dir, "Leaving"))
    assert told == "the environments could not be tried, exit code 7; their workers will tell"
    monkeypatch.setattr(trial, "PATIENCE_S", 0.01)
    (told,) = try_environments(config(base_dir, "Hanging"))
    assert (
        told == "the environments could not be tried, they took longer than 0.01 s; their workers will tell"
    )


def test_programs_gpus_and_workers_of_others_are_not_tried(base_dir: Path) -> None:
    assert trial.tried(config(base_dir, "Brokenly", {"gpus": 1})) == []
    assert trial.tried(config(base_dir, "Brokenly", orchestrator={"enabled": False})) == []
    program = {"environment": {"p": {"command": ["run"]}}, "gateway": {"enabled": True}}
    assert trial.tried(validate(program)) == []
    assert trial.tried(config(base_dir, "Good")) == ["e"]


def test_a_process_that_the_environment_started_ends_with_the_trial(base_dir: Path) -> None:
    (base_dir / "tried.py").write_text(
        CLASSES
        + "\n\nimport subprocess\nimport sys\n\n\nclass Starting(Good):\n    def __init__(self, file):\n"
        "        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "        open(file, 'w').write(str(child.pid))\n"
    )
    file = base_dir / "pid"
    assert try_environments(config(base_dir, "Starting", {"options": {"file": str(file)}})) == ()
    assert _has_ended(int(file.read_text()))


def _has_ended(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(ENDED_WITHIN_S * 1000))
    finally:
        os.close(pidfd)
