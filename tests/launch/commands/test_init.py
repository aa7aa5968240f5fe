"""`rolloutmq init`: what it writes works, and it overwrites nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.launch.commands.doctor import check
from rolloutmq.launch.commands.init import FILES, TRAINER_FILES, class_name, write_project
from rolloutmq.launch.settings import load
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import ScriptedPolicy, play

WITHOUT = ["-p", "no:cacheprovider"]


def test_the_written_test_passes_outside_this_repository(tmp_path: Path) -> None:
    write_project(tmp_path / "mine", "my-task")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", *WITHOUT],
        cwd=tmp_path / "mine",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert "Warning" not in done.stdout + done.stderr


def test_the_written_configuration_names_the_written_environment(tmp_path: Path) -> None:
    paths = write_project(tmp_path / "deep" / "down", "my-task")
    assert [path.name for path in paths] == list(FILES)
    config = load(paths[1], environ={})
    assert config.run.name == "my-task"
    environment = load_environment("my-task", config.environment["my-task"], config.base_dir)
    assert type(environment).__name__ == "MyTask"
    group = play(environment, ScriptedPolicy("321"), size=config.environment["my-task"].group_size)
    assert group.sequences == 16


def test_a_trainer_comes_with_its_test_and_a_configuration_that_leaves_the_training_to_it(
    tmp_path: Path,
) -> None:
    paths = write_project(tmp_path / "mine", "my-task", trainer=True)
    assert [path.name for path in paths] == [*FILES, *TRAINER_FILES]
    config = load(paths[1], environ={})
    assert (config.trainer.enabled, config.trainer.steps) == (False, 300)
    for path in paths:
        assert "$" not in path.read_text()
    for name in TRAINER_FILES:
        ast.parse((tmp_path / "mine" / name).read_text())
    # Public names are enough for a whole learning loop.
    imported = {
        node.module
        for node in ast.walk(ast.parse((tmp_path / "mine" / "trainer.py").read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert {name for name in imported if name and name.startswith("rolloutmq")} == {"rolloutmq"}


@pytest.mark.extended
def test_the_written_trainer_passes_its_test_outside_this_repository(tmp_path: Path) -> None:
    write_project(tmp_path / "mine", "my-task", trainer=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", *WITHOUT, f"--basetemp={tmp_path / 'runs'}"],
        cwd=tmp_path / "mine",
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_written_project_passes_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_project(tmp_path, "mine")
    code = check(tmp_path / "config.toml", assignments=[], timeout_s=60.0, as_json=False)
    assert code == 0, capsys.readouterr()
    assert "environment mine: 8 tasks drawn, 4 scripted rollouts\n" in capsys.readouterr().out


@pytest.mark.parametrize("trainer", [False, True])
@pytest.mark.parametrize("file", [*FILES, *TRAINER_FILES])
def test_nothing_is_overwritten(tmp_path: Path, file: str, trainer: bool) -> None:
    (tmp_path / file).write_text("mine")
    if not trainer and file in TRAINER_FILES:
        write_project(tmp_path, "task")
        assert (tmp_path / file).read_text() == "mine"
        return
    with pytest.raises(ConfigError, match="already exists"):
        write_project(tmp_path, "task", trainer=trainer)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(file, "mine")]


@pytest.mark.parametrize("name", ["", "7up", "a b", "a.b", "ä", "x" * 49, "a/b"])
def test_a_name_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="invalid environment name"):
        write_project(tmp_path / "new", name)
    assert not (tmp_path / "new").exists()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        write_project(tmp_path / "file" / "below", "task")


@pytest.mark.parametrize(
    ("name", "title"),
    [("task", "Task"), ("my-task", "MyTask"), ("sort3", "Sort3"), ("a_-b", "AB"), ("none", "NoneTask")],
)
def test_the_class_is_named_after_the_environment(name: str, title: str) -> None:
    assert class_name(name) == title
    assert title.isidentifier()
