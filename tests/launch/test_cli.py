"""Exit codes and one-line errors of the command line, as a user meets them."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch import cli
from rolloutmq.launch.declarations.records import dead, ledger
from rolloutmq.launch.declarations.services import app as services
from rolloutmq.launch.rundir import claimed
from rolloutmq.schemas.process import Role
from rolloutmq.services.process.identity import identify


def rolloutmq(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rolloutmq.launch.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


def test_help_names_every_command() -> None:
    told = rolloutmq("--help")
    assert told.returncode == 0
    for command in (
        "up",
        "down",
        "status",
        "workers",
        "top",
        "logs",
        "doctor",
        "init",
        "drain",
        "scale",
        "cordon",
        "broker",
    ):
        assert f" {command} " in told.stdout


def test_help_loses_no_word_in_brackets() -> None:
    """Typer takes `[word]` in a help text for markup, and prints nothing in its place."""
    known = [
        *cli.app.registered_commands,
        *(one for app in (services, ledger, dead) for one in app.registered_commands),
    ]
    texts = {
        one.name or getattr(one.callback, "__name__", ""): inspect.getdoc(one.callback) or "" for one in known
    }
    assert {"evaluate", "curriculum"} <= texts.keys()
    assert [name for name, text in texts.items() if re.search(r"\[\w+(\.\w+)?\]", text)] == []


def test_version() -> None:
    assert rolloutmq("--version").stdout.startswith("rolloutmq 0.")


ENVIRONMENT = """
from rolloutmq import SingleTurn


class E(SingleTurn):
    def task(self, rng):
        return 1

    def prompt(self, task):
        return "1="

    def score(self, task, completion):
        return 0.0
"""
ON_A_GPU = ["up", "run.toml", "--set", "trainer.device=cuda", "--set", "weights.backend=disk"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["up", "none.toml"], 2, "none.toml: cannot be read"),
        (["up", "run.toml", "--set", "broker.hig_bytes=1"], 2, "broker.hig_bytes: unknown key"),
        (["up", "run.toml", "--set", "environment.e.min_workers=9"], 2, "must not exceed max_workers"),
        (["up", "run.toml", "--set", "environment.e.entry=none.py:E"], 2, "there is no file"),
        (
            ["up", "run.toml", "--set", "environment.e.entry=e.py:F"],
            2,
            "e.py has no class `F`",
        ),
        (["up", "run.toml", "--set", "weights.backend=vllm_http"], 2, "works only with vLLM"),
        (ON_A_GPU, 1, "trainer.device"),
        (["up"], 2, "config"),
        (["no-such-command"], 2, "no-such-command"),
        (
            ["up", "run.toml", "--resume", "--run-dir", "typo"],
            1,
            "run directory typo has no run to resume: name",
        ),
        (["status", "e.py"], 1, "e.py has no run"),
        (["up", "run.toml", "--run-dir", "e.py"], 1, "run directory e.py: cannot be used ("),
        (["up", "run.toml", "--run-dir", "e.py/run"], 1, "run directory e.py/run: cannot be used ("),
        (["status", "nowhere"], 1, "nowhere has no run"),
        (["down"], 1, "runs/ has no active run"),
        (["scale", "e", "many"], 2, "must be a number"),
        (["cordon"], 2, "gpu"),
        (["cordon", "GPU-1"], 1, "runs/ has no active run"),
        (["uncordon", "GPU-1", "--run-dir", "nowhere"], 1, "nowhere has no run"),
        (["ledger", "verify", "nowhere"], 1, "nowhere has no run"),
        (["explain", "g1", "--run-dir", "nowhere"], 1, "nowhere has no run"),
        (["explain"], 2, "group_id"),
        (["dead", "list"], 1, "runs/ has no active run"),
        (["dead", "show", "g1", "--run-dir", "nowhere"], 1, "nowhere has no run"),
        (["dead", "requeue", "g1"], 1, "runs/ has no active run"),
        (["worker", "--run-dir", "nowhere", "--worker", "e-0"], 1, "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_a_code(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "run.toml").write_text('[environment.e]\nentry = "e.py:E"\n')
    (tmp_path / "e.py").write_text(ENVIRONMENT)
    told = rolloutmq(*arguments, cwd=tmp_path)
    assert told.returncode == code, told.stderr
    assert words in told.stderr
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "runs").exists()


def test_every_error_is_told_at_once_with_the_frames_of_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[trainer]\nstepz = 4\n[environment.e]\nentry = "e.py:E"\n[environment.f]\nentry = "e.py:G"\n'
    )
    (tmp_path / "e.py").write_text("raise OSError('no data')\n")
    told = rolloutmq("up", "run.toml", cwd=tmp_path)
    assert told.returncode == 2
    lines = told.stderr.splitlines()
    start = lines.index("rolloutmq: the configuration has 3 errors")
    assert lines[start + 1].startswith("trainer.stepz: unknown key; did you mean `steps`?")
    raised = "environment.e.entry: importing e.py raised OSError: no data (e.py:1)"
    assert [line.strip() for line in lines[start + 2 : start + 7]] == [
        raised,
        "",
        "e.py:1: in <module>",
        "raise OSError('no data')",
        "E   OSError: no data",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_detached_run_that_is_refused_says_why(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[environment.e]\nentry = "e.py:E"\n')
    (tmp_path / "e.py").write_text(ENVIRONMENT.replace("return 0.0", "return 1 / (task - 1)"))
    told = rolloutmq("up", "run.toml", "--detach", cwd=tmp_path)
    assert told.returncode == 2
    assert told.stdout.startswith(
        "rolloutmq: environment.e.entry: every scripted rollout failed: ZeroDivisionError"
    )
    assert "    e.py:13: in score\n" in told.stdout


def test_a_run_without_an_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\ndir = "runs/mine"\n')
    for command in ("up", "check", "try"):
        told = rolloutmq(command, "run.toml", cwd=tmp_path)
        assert told.returncode == 2
        assert "environment: there is none" in told.stdout + told.stderr


@pytest.mark.parametrize("arguments", ["--help", "--version", "doctor", "ledger verify"])
def test_an_output_that_is_closed_or_full_is_no_traceback(tmp_path: Path, arguments: str) -> None:
    cli = f'"{sys.executable}" -m rolloutmq.launch.cli {arguments}'
    for redirection in (">&-", "> /dev/full", ">&- 2>&-", "| true"):
        told = subprocess.run(
            ["bash", "-c", f"{cli} {redirection}"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            check=False,
        )
        assert "Traceback" not in told.stderr, redirection
        assert "Exception ignored" not in told.stderr, redirection
        assert told.returncode in {0, 1, 2}, (redirection, told.stderr)
        full = "standard output: cannot be written" in told.stderr
        printed = "has no active run" not in told.stderr  # else there was nothing to print
        assert full == (redirection == "> /dev/full" and told.returncode == 1 and printed), told.stderr


def test_a_directory_that_somebody_has_is_a_code_of_its_own(tmp_path: Path) -> None:
    """A script can tell it from a failure: whoever is there goes on."""
    (tmp_path / "run.toml").write_text('[environment.e]\nentry = "e.py:E"\n')
    (tmp_path / "e.py").write_text(ENVIRONMENT)
    with claimed(tmp_path / "here", "token", resume=False):
        told = rolloutmq("up", "run.toml", "--run-dir", "here", cwd=tmp_path)
    assert told.returncode == 4, told.stderr
    assert f"is in use by process {os.getpid()} (rolloutmq up) since 20" in told.stderr


def test_a_run_that_was_killed_is_named_where_a_living_one_is_looked_for(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    launcher = identify("up", Role.LAUNCHER, os.getpid(), "token")
    write_json(run / "run.json", msgspec.structs.replace(launcher, start_ticks=1))
    told = rolloutmq("scale", "e", "2", cwd=tmp_path)
    assert told.returncode == 1
    assert (
        "runs/mine is dead, its launcher was killed: clean up with `rolloutmq down runs/mine`" in told.stderr
    )
    told = rolloutmq("status", cwd=tmp_path)
    assert told.returncode == 1
    assert "the run in runs/mine is dead: its launcher, process" in told.stderr
