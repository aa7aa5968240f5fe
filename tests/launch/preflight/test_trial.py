"""Environments are tried in another process before a run, and whatever they do there stays there."""

import os
import re
import select
import sys
from pathlib import Path
from typing import Final

import pytest
from tests.launch.preflight.support import CLASSES, config

from rolloutmq.launch.preflight import checks, trial
from rolloutmq.launch.preflight.trial import try_environments
from rolloutmq.launch.preflight.verdicts import Verdict
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

ENDED_WITHIN_S: Final = 30.0


def test_another_process_tries_them(base_dir: Path) -> None:
    (found,) = try_environments(config(base_dir, "Printing"))
    assert found == Verdict(env="e", tried="8 tasks drawn, 4 scripted rollouts")
    with pytest.raises(ConfigError, match=r"^environment\.e\.rewards\.raters: Own has its own `rewards`"):
        checks.check(config(base_dir, "Own", {"rewards": {"raters": {"c": {"rater": "exact"}}}}))
    assert "rolloutmq_entry_tried" not in sys.modules


def several(base_dir: Path, *kinds: str) -> RunConfig:
    environment = {kind.lower(): {"entry": f"tried.py:{kind}"} for kind in kinds}
    return validate({"environment": environment, "base_dir": str(base_dir)})


def test_one_that_ends_the_process_or_hangs_hides_no_other(base_dir: Path) -> None:
    told: list[str] = []
    found = try_environments(
        several(base_dir, "Leaving", "Hanging", "Spinning", "Good"), timeout_s=6.0, tell=told.append
    )
    left, hung, spun, good = found
    assert left.failures[0].error.path == "environment.leaving"
    assert re.fullmatch(
        r"loading tried\.py:Leaving, at tried\.py:\d+, ended the process: exit code 7; it would end its workers, too",
        left.failures[0].problem,
    )
    assert re.match(
        r"loading it and drawing tasks took longer than 5 s, at tried\.py:\d+; raise --timeout",
        hung.failures[0].problem,
    )
    assert re.match(
        r"its scripted rollouts took longer than 2 s, at tried\.py:\d+;", spun.failures[0].problem
    )
    assert "in score\n" in spun.failures[0].report
    assert (good.env, good.problems, good.failures) == ("good", (), ())
    assert not any(one.problems for one in found)
    assert "checks environment hanging (timeout 6 s)" in told


@pytest.mark.parametrize(
    ("kind", "method", "line", "ended"),
    [
        ("ScoreExits", "score", "os._exit(0)", "exit code 0"),
        ("PromptKills", "prompt", "", "killed by SIGKILL"),
        ("RolloutFaults", "rollout", "os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("RaterExits", "", 'rewards = Ensemble({"a": lambda task, answer: os._exit(3)})', "exit code 3"),
        ("RaterFaults", "", "ctypes.string_at(0)", "killed by SIGSEGV"),
        ("OverlapExits", "score", "os._exit(5)", "exit code 5"),
        ("ScoredExits", "rollout", "os._exit(5)  # unless a score did", "exit code 5"),
    ],
)
def test_the_line_and_the_method_that_ended_the_process_are_named(
    kind: str, method: str, line: str, ended: str, base_dir: Path
) -> None:
    (found,) = try_environments(config(base_dir, kind))
    what = rf"`{kind}\.{method}` \(tried\.py:\d+\)" if method else "its scripted rollouts"
    place = rf", at tried\.py:{_number(line)}," if line else ""
    assert re.fullmatch(
        rf"{what}{place} ended the process: {ended}; it would end its workers, too", found.failures[0].problem
    )


def _number(line: str) -> int:
    """Return the number of a line of the classes."""
    return next(number for number, one in enumerate(CLASSES.splitlines(), 1) if one.strip() == line)


def test_one_that_cannot_be_interrupted_is_ended(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "START_S", 0.0)
    (told,) = try_environments(config(base_dir, "Good"), timeout_s=0.01)
    assert (
        told.failures[0].problem == "could not be checked, it took longer than 0.01 s; its workers will tell"
    )


SHADOWS: Final = ("json", "logging", "numpy", "random", "types")
"""Modules that every process imports."""


def test_files_named_like_modules_change_nothing(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHADOWS:
        (base_dir / f"{name}.py").write_text("from helper import Good\n")
    (base_dir / "helper.py").write_text(CLASSES)
    monkeypatch.chdir(base_dir)
    for entry in ("tried.py:Good", "random.py:Good", "helper:Good"):
        assert try_environments(config(base_dir, entry)) == [
            Verdict(env="e", tried="8 tasks drawn, 4 scripted rollouts")
        ]


def test_an_error_that_no_encoding_has_is_told(base_dir: Path) -> None:
    (found,) = try_environments(config(base_dir, "Surrogate"))
    assert r"E   ValueError: bad \udcff" in found.problems[0].report


def test_what_takes_long_is_told(base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TOLD_S", 0.0)
    told: list[str] = []
    try_environments(config(base_dir, "Good"), tell=told.append)
    assert told == ["checks environment e (timeout 60 s)"]


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
    (found,) = try_environments(config(base_dir, "Starting", {"options": {"file": str(file)}}))
    assert found.problems == ()
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
