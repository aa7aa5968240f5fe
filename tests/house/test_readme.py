"""The README's code blocks run as they stand: an environment and its run, a trainer, a producer, a project."""

import json
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
    assert sum(map(languages.count, ("python", "toml", "sh"))) == len(blocks()) == 6


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


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A directory with the environment and the configuration of the README."""
    for name, file in (("environment", "environment.py"), ("config", "config.toml")):
        assert f"`{file}`" in README.read_text()
        (tmp_path / file).write_text(blocks()[name])
    return tmp_path


def shell(command: str, directory: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-ec", command],
        cwd=directory,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_the_environment_passes_the_check_with_its_configuration(written: Path) -> None:
    done = shell(blocks()["run"].splitlines()[0], written, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok      environment addition: 8 tasks drawn, 4 scripted rollouts\n" in done.stdout


def test_the_check_names_character_prompt_and_key(written: Path) -> None:
    config = written / "config.toml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("alphabet")))
    done = shell(blocks()["run"].splitlines()[0], written, 120)
    assert done.returncode == 2
    assert re.search(
        r"model\.alphabet: lacks '\+' of the prompt '\d\+\d=' of environment addition", done.stdout
    )


@pytest.mark.extended
def test_the_environment_learns_by_the_commands_beside_it(written: Path) -> None:
    done = shell(blocks()["run"], written, 560)
    assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = written.glob("runs/*/summary.json")
    found = json.loads(summary.read_bytes())
    assert found["reward_first"] < 0.5
    assert (
        found["reward_last"] > 0.75
    )  # 0.99 as a rule; now and then three or four of the 25 sums are missing


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
    done = shell(blocks()["init"], tmp_path, 60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
