"""A run directory has one owner, and an earlier run in it is never lost."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.services.broker.journal.other_versions import listing

from rolloutmq.bus.rundir import load_run, read_run, write_json
from rolloutmq.launch import rundir
from rolloutmq.launch.commands import steer
from rolloutmq.launch.settings import load, prepare_service
from rolloutmq.schemas.errors import (
    MissingError,
    NotPrivateError,
    RecordVersionError,
    RunDirInUseError,
    UnusablePathError,
)
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Role
from rolloutmq.services.process.child import spawn
from rolloutmq.services.process.identity import boot_id, identify


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


def test_the_second_owner_is_refused_though_the_lock_file_was_deleted(run_dir: Path) -> None:
    with rundir.claimed(run_dir, "token", resume=False):
        (run_dir / "run.lock").unlink()
        with (
            pytest.raises(RunDirInUseError, match=rf"process {os.getpid()} .*`rolloutmq down"),
            rundir.claimed(run_dir, "other", resume=True),
        ):
            raise AssertionError("claimed twice")
        assert rundir.owner(RunLayout(run_dir)) is not None


def test_a_resumed_run_forgets_the_servers_of_its_earlier_life(run_dir: Path) -> None:
    """Else workers would roll out before a server is up, and count the wait as the duration of the rollout."""
    layout = RunLayout(run_dir)
    configure(layout)
    servers = [layout.inference, layout.engine("inference-2"), layout.teacher, layout.crashes]
    kept = [layout.gateway, layout.root / "inference-notes.json"]
    for path in (*servers, *kept):
        path.write_text("{}")
    with rundir.claimed(run_dir, "token", resume=True):
        assert not any(path.exists() for path in servers)
        assert all(path.exists() for path in kept), "the gateway takes its port again, for clients outside"


@pytest.mark.parametrize("name", ["run.lock", "logs", "sockets", "run.json"])
def test_what_cannot_be_used_is_named(run_dir: Path, name: str) -> None:
    """A file in the place of a directory, and the other way round: root may do everything else."""
    layout = RunLayout(run_dir)
    layout.journal.mkdir()
    if name in {"run.lock", "run.json"}:
        (run_dir / name / "in the way").mkdir(parents=True)
    else:
        (run_dir / name).touch()
    if name == "sockets":  # only the trim of the journal needs it, and does without
        with rundir.claimed(run_dir, "token", resume=True):
            return
    with (
        pytest.raises(
            UnusablePathError, match=rf"run directory {run_dir}: cannot be used \(.*; make it readable"
        ),
        rundir.claimed(run_dir, "token", resume=True),
    ):
        raise AssertionError("claimed")


@pytest.mark.parametrize(
    "refused", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")]
)
def test_a_directory_that_may_not_be_written_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, refused: OSError
) -> None:
    opened = os.open

    def refuse(path: Path, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT and Path(path).is_relative_to(run_dir):
            raise refused
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(UnusablePathError, match=rf"{refused.strerror}\); make it readable and writable"),
        rundir.claimed(run_dir, "token", resume=False),
    ):
        raise AssertionError("claimed")


DOORS: dict[str, Callable[[Path], object]] = {
    "up": lambda root: rundir.claimed(root, "token", resume=False).__enter__(),
    "up --resume": lambda root: rundir.claimed(root, "token", resume=True).__enter__(),
    "sweep": lambda root: rundir.idle(root).__enter__(),
    "broker": lambda root: prepare_service(root, None, ["run.seed=1"]),
    "a service": load_run,
    "down": steer.down,
}


@pytest.mark.parametrize("door", DOORS)
def test_nothing_is_done_in_the_directory_of_another_user(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    layout = RunLayout(run_dir)
    configure(layout)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        write_json(layout.owner, identify("up", Role.LAUNCHER, victim.pid, "token"))
        before = listing(run_dir)
        here = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: here + 1)
        with pytest.raises(NotPrivateError, match=rf"^{run_dir}: belongs to user {here} "):
            DOORS[door](run_dir)
        assert listing(run_dir) == before
        assert victim.poll() is None
        victim.communicate(b"\n", 20.0)
    assert victim.returncode == 0, "nobody ended it"


def test_the_directory_of_another_user_may_be_looked_at(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(RunLayout(run_dir))
    here = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: here + 1)
    assert read_run(run_dir)[0] == load(None, environ={})
    assert rundir.find_run(run_dir) == run_dir
    before = listing(run_dir)
    assert steer.report(run_dir, as_json=False) == 0
    assert listing(run_dir) == before


def test_what_a_run_writes_into_a_directory_that_existed_is_private(tmp_path: Path) -> None:
    (root := tmp_path / "run").mkdir(mode=0o755)
    with rundir.claimed(root, "token", resume=False) as layout:
        configure(layout)
        modes = {path.name: path.stat().st_mode & 0o077 for path in root.iterdir()}
    assert {"config.json", "logs", "run.json", "run.lock"} <= modes.keys()
    assert not any(modes.values()), modes


def test_a_run_of_another_version_is_refused_before_anything_is_written(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    layout.journal.mkdir()
    (layout.journal / "facts-00000001.rmq").write_bytes(b"old")
    before = listing(run_dir)
    with (
        pytest.raises(RecordVersionError, match="got version 2"),
        rundir.claimed(run_dir, "token", resume=True),
    ):
        raise AssertionError("claimed")
    rundir.trim_journal(layout)
    assert listing(run_dir) == before


def test_only_a_run_can_be_resumed(run_dir: Path) -> None:
    typo = run_dir.with_name("rum")
    for place in (typo, run_dir):
        with pytest.raises(
            MissingError, match=rf"run directory {place} has no run to resume: name the directory"
        ):
            rundir.require_run(place)
    assert not typo.exists()
    configure(RunLayout(run_dir))
    rundir.require_run(run_dir)


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


def test_a_broker_started_by_hand_makes_a_run_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layout = make(tmp_path / "runs" / "mine")
    configure(layout)
    addresses = Endpoints(ingest="", serve="", events="", publish="", pid=os.getpid(), epoch=1)
    write_json(layout.endpoints, addresses)
    assert rundir.find_run(None) == Path("runs/mine")
    layout.endpoints.unlink()
    with pytest.raises(MissingError, match="has no active run"):
        rundir.find_run(None)


def make(root: Path) -> RunLayout:
    root.mkdir(parents=True)
    return RunLayout(root)
