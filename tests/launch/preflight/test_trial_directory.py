"""The directory of a trial goes with its owner, or with the next trial."""

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest

from rolloutmq.launch.preflight import trial_directory as directories
from rolloutmq.launch.preflight.trial_directory import PREFIX, remove_left, trial_directory
from rolloutmq.services.process.identity import runs

OWNER: Final = """
import signal, sys
from rolloutmq.launch.preflight.trial_directory import trial_directory
from rolloutmq.schemas.process import ProcessSpec, Role
from rolloutmq.services.process.child import spawn

with trial_directory() as directory:
    command = (sys.executable, "-S", "-c", "import signal; signal.pause()")
    spec = ProcessSpec(name="trial", role=Role.WORKER, argv=command, log=str(directory / "log"))
    identity = spawn(spec, directory.name).identity
    print(directory, identity.pid, identity.start_ticks, flush=True)
    signal.pause()
"""
"""Tries for ever: holds a directory, with a process in it."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a directory for temporary files of its own, in which none is young."""
    monkeypatch.setattr(directories, "YOUNG_S", -60.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_next_trial_removes_what_a_killed_one_left_and_not_before_it_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            path, pid, ticks = owner.stdout.readline().split()
            assert remove_left() == []
            assert runs(int(pid), int(ticks))
        finally:
            owner.kill()
    pidfd = os.pidfd_open(int(pid))
    with trial_directory() as mine:
        assert not Path(path).exists()
        assert mine.exists()
        assert select.select([pidfd], [], [], 30.0)[0], "its process ends, too"
    os.close(pidfd)
    assert not mine.exists()


def test_the_directory_of_a_living_owner_stays() -> None:
    with trial_directory() as mine:
        assert remove_left() == []
        assert mine.exists()
    assert not mine.exists()


def test_a_young_directory_may_have_an_owner_that_has_not_locked_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / f"{PREFIX}new").mkdir()
    monkeypatch.setattr(directories, "YOUNG_S", 60.0)
    assert remove_left() == []
    monkeypatch.setattr(directories, "YOUNG_S", -60.0)
    assert remove_left() == [temporary / f"{PREFIX}new"]


def test_the_directory_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / f"{PREFIX}theirs").mkdir()
    monkeypatch.setattr(os, "getuid", lambda owner=os.getuid(): owner + 1)
    assert remove_left() == []
    assert (temporary / f"{PREFIX}theirs").exists()


def test_nothing_else_is_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(directories, "end_marked", ended.append)
    kept = temporary / "kept"
    kept.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(kept)
    (temporary / f"{PREFIX}file").touch()
    assert remove_left() == []
    assert len(list(temporary.iterdir())) == 3
    assert ended == [], "no process of a name that is none of ours"
