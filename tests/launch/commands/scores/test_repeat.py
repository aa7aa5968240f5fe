"""`rolloutmq doctor --rewards`: scores that depend on more than task and answer are found, each by its way."""

import json
import os
import re
from pathlib import Path

import pytest

from rolloutmq.launch.commands.scores.repeat import report
from rolloutmq.schemas.errors import ConfigError

EXAMPLES = Path(__file__).parents[4] / "examples"
CLASSES = """
import os
import random
import time

from rolloutmq import Ensemble, SingleTurn


class Steady(SingleTurn):
    max_tokens = 8

    def task(self, rng):
        return str(rng.randrange(1000))

    def prompt(self, task):
        return task

    def score(self, task, completion):
        return len(completion.text) / 8


class Lucky(Steady):
    def score(self, task, completion):
        return random.random()


class Clocked(Steady):
    def score(self, task, completion):
        return float(time.monotonic_ns())


class Growing(Steady):
    def __init__(self):
        self.seen = 0

    def score(self, task, completion):
        self.seen += 1
        return float(self.seen)


class Unordered(Steady):
    def score(self, task, completion):
        return float(hash(completion.text) % 1000)


class Unseeded(Steady):
    def task(self, rng):
        return str(random.random())

    def score(self, task, completion):
        return 1.0


class Judged(Steady):
    rewards = Ensemble(
        {"fine": lambda task, answer: 1.0, "hashed": lambda task, answer: hash(answer.text) % 97}, scale="rank"
    )


def at_first(task, answer):
    return len(answer.text) / 8 if os.getpid() == FIRST else None


def failing(task, answer):
    raise ValueError("no judge")


class Late(Steady):
    rewards = Ensemble({"fine": lambda task, answer: 1.0, "late": at_first, "mute": lambda task, answer: None})


class Alone(Steady):
    rewards = Ensemble({"late": at_first})


class Unrated(Steady):
    rewards = Ensemble({"failing": failing})


class Broken(Steady):
    def score(self, task, completion):
        raise ValueError("no such reference")


class Once(Steady):
    def score(self, task, completion):
        if os.getpid() != FIRST:
            raise ValueError("only in the first process")
        return 1.0


FIRST = int(os.environ["TEST_FIRST_PROCESS"])
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEST_FIRST_PROCESS", str(os.getpid()))
    (tmp_path / "scoring.py").write_text(CLASSES)
    names = re.findall(r"^class (\w+)", CLASSES, re.MULTILINE)
    sections = [f'[environment.{name.lower()}]\nentry = "scoring.py:{name}"\n' for name in names]
    sections.append('[environment.program]\ncommand = ["run"]\n[gateway]\nenabled = true\n')
    file = tmp_path / "run.toml"
    file.write_text("".join(sections))
    return file


def test_the_example_scores_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("rubric", EXAMPLES / "rubric" / "rubric.toml", as_json=False) == 0
    assert capsys.readouterr().out.count("64 sequences in 8 groups are the same") == 3


@pytest.mark.parametrize(
    ("env", "how"),
    [
        ("steady", ["same", "same", "same"]),
        ("lucky", ["DIFFERS", "DIFFERS", "DIFFERS"]),
        ("clocked", ["DIFFERS", "DIFFERS", "DIFFERS"]),
        ("growing", ["DIFFERS", "same", "same"]),
        ("unordered", ["same", "DIFFERS", "DIFFERS"]),
        ("unseeded", ["DIFFERS", "DIFFERS", "DIFFERS"]),
        ("judged", ["same", "DIFFERS", "DIFFERS"]),
        ("once", ["same", "DIFFERS", "DIFFERS"]),
        ("late", ["same", "MISSING", "MISSING"]),
        ("alone", ["same", "MISSING", "MISSING"]),
        ("unrated", ["MISSING"]),
        ("broken", ["FAILED"]),
    ],
)
def test_each_dependence_is_found(
    env: str,
    how: list[str],
    configured: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = report(env, configured, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == how
    assert found == int(how != ["same"] * 3)
    text = "\n".join(lines)
    if env == "judged":
        assert "hashed" in text
        assert "make the raters hashed depend on task and answer alone" in text
    if env == "unseeded":
        assert "take all randomness of the rollout from `rng`" in text
    if env == "late":
        assert "the same, without a rating of mute 64 times" in lines[0]
        assert "of 64 sequences differ: late 64 times" in lines[1]
        assert "repair these raters" in lines[1]
    if env == "unrated":
        assert "failing: ValueError: no judge" in text
        assert "reward finding env=unrated finding=raters_missing" in caplog.text
    if env == "once":
        assert "only in the first process" in text


def test_a_broken_score_is_a_finding(configured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("broken", configured, as_json=True) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["found"] == "ValueError: no such reference"


def test_what_cannot_be_checked_is_refused(configured: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.math: no such section \(configured: steady, lucky"):
        report("math", configured, as_json=False)
    with pytest.raises(ConfigError, match="a program scores by itself"):
        report("program", configured, as_json=False)
    with pytest.raises(ConfigError, match="no such section"):
        report("math", None, as_json=False)
