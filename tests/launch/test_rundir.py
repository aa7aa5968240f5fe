"""A run directory has one owner, and an earlier run in it is never lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch import rundir
from rolloutmq.launch.settings import load
from rolloutmq.schemas.errors import MissingError, RunDirInUseError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Role
from rolloutmq.services.process.child import spawn
from rolloutmq.services.process.identity import boot_id


def configure(layout: RunLayout) -> None:
    write_json(layout.config, load(None, environ={}))


def test_the_second_owner_is_told_who_the_first_is(run_dir: Path) -> None:
    with (
        rundir.claimed(run_dir, "token", resume=False),
        pytest.raises(RunDirInUseError) as caught,
        rundir.claimed(run_dir, "other", resume=False),
    ):
        raise AssertionError("claimed twice")
    assert f"process {os.getpid()}" in str(caught.value)


def test_a_directory_is_free_again_after_its_owner(run_dir: Path) -> None:
    for _ in range(2):
        with rundir.claimed(run_dir, "token", resume=True) as layout:
            assert rundir.owner(layout) is not None
    assert rundir.owner(RunLayout(run_dir)) is None


def test_an_earlier_run_is_moved_aside(run_dir: Path) -> None:
    for number in range(3):
        with rundir.claimed(run_dir, "token", resume=False) as layout:
            configure(layout)
            (layout.root / "number").write_text(str(number))
    kept = sorted(path.read_text() for path in run_dir.parent.glob("run*/number"))
    assert kept == ["0", "1", "2"]
    assert (run_dir / "number").read_text() == "2"


def test_records_without_a_configuration_are_moved_aside_too(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    layout.journal.mkdir()
    (layout.journal / "facts-00000001.rmq").write_bytes(b"old")
    with rundir.claimed(run_dir, "token", resume=False) as layout:
        assert not layout.journal.exists()
    (kept,) = run_dir.parent.glob("run.*/journal/facts-00000001.rmq")
    assert kept.read_bytes() == b"old"


def test_resume_keeps_what_is_there(run_dir: Path) -> None:
    with rundir.claimed(run_dir, "token", resume=False) as layout:
        configure(layout)
        layout.saved.write_text("groups")
    with rundir.claimed(run_dir, "token", resume=True) as layout:
        assert layout.saved.read_text() == "groups"


def test_what_a_killed_launcher_left_is_ended(run_dir: Path) -> None:
    argv = (sys.executable, "-c", "import time; time.sleep(60)")
    spec = ProcessSpec(name="left", role=Role.WORKER, argv=argv, log=str(run_dir / "log"))
    stray = spawn(spec, "old")
    write_json(RunLayout(run_dir).workers, [stray.identity])
    with rundir.claimed(run_dir, "token", resume=True):
        ended = stray.poll()
    stray.close()
    assert ended is not None


def test_a_forged_identity_is_never_touched(run_dir: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    forged = ProcessIdentity(
        name="w", role=Role.WORKER, pid=child.pid, start_ticks=1, boot_id=boot_id(), marker="old/w"
    )
    write_json(RunLayout(run_dir).workers, [forged])
    try:
        with rundir.claimed(run_dir, "token", resume=True):
            assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_the_run_that_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingError, match="runs/ has no active run"):
        rundir.find_run(None)
    with pytest.raises(MissingError, match="elsewhere has no run"):
        rundir.find_run(Path("elsewhere"))
    configure(make(tmp_path / "runs" / "old"))
    assert rundir.find_run(None, living=False) == Path("runs/old")
    with rundir.claimed(tmp_path / "runs" / "new", "token", resume=False) as layout:
        configure(layout)
        assert rundir.find_run(None) == Path("runs/new")
        with rundir.claimed(tmp_path / "runs" / "other", "token", resume=False) as other:
            configure(other)
            with pytest.raises(MissingError, match="runs/new, runs/other"):
                rundir.find_run(None)


def make(root: Path) -> RunLayout:
    root.mkdir(parents=True)
    return RunLayout(root)
