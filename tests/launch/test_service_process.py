"""The start of one process of a run, without the library of the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.launch import service_process
from rolloutmq.launch.declarations.services import app
from rolloutmq.launch.plan import plan
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import python_command

Words = tuple[str, ...]


def started(*words: str) -> "subprocess.CompletedProcess[str]":
    command = python_command(sys.executable, "rolloutmq.launch.service_process", *words)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_process_of_a_plan_is_started_by_it(tmp_path: Path) -> None:
    about = {
        "environment": {"e": {"entry": "a:B", "task_count": 5}},
        "curriculum": {"e": {}},
        "teacher": {"path": "/teacher"},
        "gateway": {"enabled": True},
        "weights": {"backend": "stream"},
        "cluster": {"engine": "ray"},
        "trainer": {"ranks": 2, "distillation": {"kind": "top_k"}},
    }
    specs = plan(RunConfig.model_validate(about), RunLayout(tmp_path), "python")
    names = {spec.argv[4] for spec in specs}
    assert {spec.argv[:4] for spec in specs} == {("python", "-P", "-m", "rolloutmq.launch.service_process")}
    assert names | {"worker", "serve-dashboard"} == service_process.STARTS.keys()


@pytest.mark.parametrize("name", ["logging", "types"])
def test_a_file_named_like_a_module_does_not_replace_it(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('replaced')\n")
    command = python_command(sys.executable, "rolloutmq.launch.service_process", "broker")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "replaced" not in ended.stderr
    assert "--run-dir" in ended.stderr


def test_it_starts_the_same_processes_as_the_command_line() -> None:
    named = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    assert named == service_process.STARTS.keys()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("trainer", ("--rank", "3"), {"rank": "3"}),
        ("worker", ("--worker", "e-1"), {"worker": "e-1"}),
        ("inference", ("--engine", "inference-1"), {"engine": "inference-1"}),
        ("broker", (), {}),
    ],
)
def test_the_options_reach_the_process(
    monkeypatch: pytest.MonkeyPatch, name: str, options: Words, expected: dict[str, str]
) -> None:
    got = {}

    def start(run_dir: Path, **about: str) -> int:
        got[run_dir] = about
        return 7

    monkeypatch.setitem(service_process.STARTS, name, start)
    monkeypatch.setattr("sys.argv", ["", name, "--run-dir", "here", *options])
    with pytest.raises(SystemExit) as ended:
        service_process.main()
    assert (ended.value.code, got) == (7, {Path("here"): expected})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Usage"),
        (("nonsense", "--run-dir", "x"), "No such command"),
        (("broker",), "Missing option"),
        (("worker", "--run-dir", "x"), "Invalid value for --worker"),
        (("broker", "--run-dir", "x", "--rank", "1"), "No such option"),
        (("trainer", "--run-dir", "x", "--rank", "-1"), "Invalid value"),
        (("trainer", "--run-dir"), "requires an argument"),
    ],
)
def test_other_arguments_are_refused_as_by_the_command_line(words: Words, said: str) -> None:
    ended = started(*words)
    assert ended.returncode == 2
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_error_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    ended = started("worker", "--run-dir", str(tmp_path), "--worker", "e-0")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("rolloutmq: ")
    assert "Traceback" not in ended.stderr


def test_it_does_not_import_the_library_of_the_command_line() -> None:
    code = "import sys, rolloutmq.launch.service_process; print('typer' in sys.modules, 'pydantic' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.split() == ["False", "False"]
