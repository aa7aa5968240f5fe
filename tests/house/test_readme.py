"""The README's code blocks run as they stand: an environment, a trainer, a producer, a project of one's own."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.launch.declarations.services import app
from rolloutmq.launch.settings import load
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.worker.scripted import ScriptedPolicy, play

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"<!-- test: (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)


def blocks() -> dict[str, str]:
    return dict(BLOCK.findall(README.read_text()))


def lines_of(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


def test_every_code_block_is_tested() -> None:
    languages = re.findall(r"```(\w+)\n", README.read_text())
    assert languages.count("python") + languages.count("sh") == len(blocks()) == 4


def test_every_process_that_a_command_runs_is_listed() -> None:
    (row,) = [one for one in README.read_text().splitlines() if one.endswith("| run one process of a run |")]
    shown = [command for command in app.registered_commands if not command.hidden]
    known = {command.name or getattr(command.callback, "__name__", "") for command in shown}
    assert set(re.findall(r"`(\w+)`", row)) == known


def test_the_environment_is_fifteen_lines_and_scores() -> None:
    code = blocks()["environment"]
    assert lines_of(code) <= 15
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    right = ScriptedPolicy(lambda prompt: str(sum(map(int, prompt.rstrip("=").split("+")))))
    assert list(play(names["Addition"](), right).scores) == [1.0] * 4
    assert list(play(names["Addition"](), ScriptedPolicy("-")).scores) == [0.0] * 4


def test_the_trainer_is_ten_lines_and_gets_what_the_producer_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layout = RunLayout(Path("runs/mine"))
    layout.root.mkdir(parents=True)
    trainer, producer = blocks()["trainer"], blocks()["producer"]
    assert lines_of(trainer) <= 10
    # The README's trainer runs until it is ended; this one is ended after two steps, in order.
    two_steps = trainer.replace("for batch in consumer:", "for _, batch in zip(range(2), consumer):")
    assert two_steps != trainer
    with running_broker(load(None, environ={}), layout):
        sender = subprocess.Popen([sys.executable, "-c", producer])
        try:
            trained = subprocess.run([sys.executable, "-c", two_steps], timeout=60, check=False)
            assert trained.returncode == 0
            assert sender.wait(60) == 0
        finally:
            sender.kill()
            sender.wait()


def test_a_project_of_ones_own_passes_its_test(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", blocks()["init"]],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
