import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from benchmarks.harness import stage
from rolloutmq.schemas.files import RunLayout


def test_a_player_is_told_and_answers_with_a_figure(tmp_path: Path) -> None:
    script = "import sys; print('hello'); print('ready', flush=True); print(sys.stdin.readline()); print(2.5)"
    with fake(tmp_path, script) as one:
        one.wait_ready()
        one.begin("4")
        assert one.figure() == 4.0
        assert one.figure() == 2.5


def test_a_player_that_ends_is_an_error_with_what_it_complained_of(tmp_path: Path) -> None:
    with (
        fake(tmp_path, "raise ValueError('no luck')") as one,
        pytest.raises(stage.StageError, match="no luck"),
    ):
        one.wait_ready()


def test_a_player_that_is_silent_is_an_error(tmp_path: Path) -> None:
    with (
        fake(tmp_path, "import sys; sys.stdin.readline()") as one,
        pytest.raises(stage.StageError, match="is silent"),
    ):
        one.line(within_s=0.01)


def test_a_broker_that_ends_is_not_waited_for(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    layout.config.write_text("no configuration")
    with stage.broker(layout) as process, pytest.raises(stage.StageError, match="ended"):
        stage.bound(layout, process)


def test_an_environment_counts_once_it_is_whole(tmp_path: Path) -> None:
    assert f"there is no {tmp_path.name}" in stage.missing(tmp_path)
    (tmp_path / ".installed").touch()
    assert stage.missing(tmp_path) == ""


def fake(directory: Path, script: str) -> AbstractContextManager[stage.Player]:
    """A player whose interpreter runs a script, whatever file it is given."""
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{script}"\n')
    python.chmod(0o755)
    return stage.player("harness.stage", python=python)
