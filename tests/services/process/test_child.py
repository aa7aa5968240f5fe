"""Real processes: spawned, recognised, signalled, reaped, and nobody else touched."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.services.orchestrator.children import (
    DRAINABLE,
    PARENT,
    PATIENT,
    STUBBORN,
    spec,
    wait_for,
    wait_up,
)

from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Role
from rolloutmq.services.process.child import Exit, Process, adopt, end_marked, end_strays, spawn
from rolloutmq.services.process.identity import (
    MARKER,
    alive,
    exists,
    find_marked,
    identify,
    inherited_token,
    is_marked,
)

Spawn = Callable[[ProcessSpec], Process]
TOKEN = f"test-{os.getpid()}"


@pytest.fixture
def start() -> Iterator[Spawn]:
    """Spawn processes that end with the test."""
    started: list[Process] = []

    def spawned(what: ProcessSpec) -> Process:
        started.append(spawn(what, TOKEN))
        return started[-1]

    yield spawned
    for process in started:
        if process.fileno() >= 0:
            process.send_group(signal.SIGKILL)
            ended(process)


def ended(process: Process) -> Exit:
    found: list[Exit] = []

    def look() -> bool:
        exit_ = process.poll()
        if exit_ is not None:
            found.append(exit_)
        return bool(found)

    wait_for(look)
    process.close()
    return found[0]


def end_when_told(process: Process) -> None:
    """Show that the process was not killed before: a signal that came earlier would tell."""
    process.send(signal.SIGTERM)
    assert ended(process) == Exit(-15)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_leads_its_own_session_and_writes_to_its_log(start: Spawn, tmp_path: Path) -> None:
    (tmp_path / "w.log").write_text("earlier\n")
    process = start(spec("w", PATIENT, tmp_path))
    assert wait_up(tmp_path / "w.log", "up\n") == "earlier\nup\n"
    pid = process.identity.pid
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert Path(f"/proc/{pid}/fd/0").resolve() == Path("/dev/null")
    variables = psutil.Process(pid).environ()
    assert variables[MARKER] == process.identity.marker == f"{TOKEN}/w"
    assert variables["OMP_NUM_THREADS"] == "1"
    assert process.poll() is None


def test_no_descriptor_of_ours_is_inherited(start: Spawn, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        start(spec("w", PATIENT, tmp_path))
        wait_up(tmp_path / "w.log")
        os.close(writer)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("code", "number", "text"),
    [
        ("raise SystemExit(0)", 0, "exit code 0"),
        ("raise SystemExit(7)", 7, "exit code 7"),
        ("import os; os.abort()", -6, "killed by SIGABRT"),
    ],
)
def test_the_exit_is_told(start: Spawn, tmp_path: Path, code: str, number: int, text: str) -> None:
    found = ended(start(spec("w", code, tmp_path)))
    assert found == Exit(number)
    assert str(found) == text


def test_what_does_not_exist_cannot_be_started(tmp_path: Path) -> None:
    missing = ProcessSpec(name="w", role=Role.WORKER, argv=("/nowhere",), log=str(tmp_path / "w.log"))
    with pytest.raises(FileNotFoundError):
        spawn(missing, TOKEN)


def test_a_drain_does_not_kill_a_process_that_still_imports(start: Spawn, tmp_path: Path) -> None:
    process = start(spec("w", DRAINABLE, tmp_path))
    process.send(signal.SIGUSR1)
    assert ended(process) == Exit(0)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_group_and_escaped_grandchild_end_with_their_leader(start: Spawn, tmp_path: Path) -> None:
    process = start(spec("w", PARENT, tmp_path))
    near, far = map(int, wait_up(tmp_path / "w.log", "\n").split())
    wait_for(lambda: is_marked(far, f"{TOKEN}/w"))
    process.send(signal.SIGKILL)
    assert ended(process) == Exit(-9)
    wait_for(lambda: is_gone(near) and is_gone(far))


def test_a_zombie_is_not_alive_but_still_itself(start: Spawn, tmp_path: Path) -> None:
    process = start(spec("w", "raise SystemExit(0)", tmp_path))
    wait_for(lambda: psutil.Process(process.identity.pid).status() == psutil.STATUS_ZOMBIE)
    os.kill(process.identity.pid, 0)
    assert exists(process.identity)
    assert not alive(process.identity)
    process.send(signal.SIGKILL)
    assert ended(process) == Exit(0)
    assert not exists(process.identity)


@pytest.mark.parametrize(
    "forged",
    [
        lambda one: msgspec.structs.replace(one, start_ticks=one.start_ticks - 1),
        lambda one: msgspec.structs.replace(one, boot_id="another"),
        lambda one: msgspec.structs.replace(one, marker="another/w"),
    ],
)
def test_a_stranger_is_never_signalled(
    start: Spawn, tmp_path: Path, forged: Callable[[ProcessIdentity], ProcessIdentity]
) -> None:
    process = start(spec("w", PATIENT, tmp_path))
    wait_up(tmp_path / "w.log")
    false = forged(process.identity)
    assert adopt(false) is None
    # One of the run that the marker names would rightly be swept; this one is of another run.
    assert end_strays([msgspec.structs.replace(false, marker="another/w")], 0.1) == 0
    impostor = Process(false, os.pidfd_open(false.pid), None)
    if false.marker == process.identity.marker:
        impostor.send_group(signal.SIGKILL)
    impostor.close()
    end_when_told(process)


def test_an_adopted_process_is_watched_like_our_own(start: Spawn, tmp_path: Path) -> None:
    process = start(spec("w", PATIENT, tmp_path))
    wait_up(tmp_path / "w.log")
    adopted = adopt(process.identity)
    assert adopted is not None
    assert adopted.poll() is None
    adopted.send_group(signal.SIGTERM)
    assert ended(adopted) == Exit(None)
    assert str(Exit(None)) == "ended, exit code unknown"
    assert adopt(process.identity) is None


def test_strays_are_ended_the_patient_by_sigterm_the_stubborn_by_sigkill(
    start: Spawn, tmp_path: Path
) -> None:
    patient, stubborn = (
        start(spec(name, code, tmp_path)) for name, code in (("p", PATIENT), ("s", STUBBORN))
    )
    wait_up(tmp_path / "p.log")
    wait_up(tmp_path / "s.log")
    assert end_strays([patient.identity, stubborn.identity], 0.3) == 2
    assert ended(patient) == Exit(-15)
    assert ended(stubborn) == Exit(-9)


def test_a_marker_finds_one_process_or_the_whole_run(start: Spawn, tmp_path: Path) -> None:
    one, ten = (start(spec(name, PATIENT, tmp_path)).identity.pid for name in ("w-1", "w-10"))
    wait_up(tmp_path / "w-1.log")
    wait_up(tmp_path / "w-10.log")
    assert find_marked(f"{TOKEN}/w-1") == [one]
    assert sorted(find_marked(f"{TOKEN}/")) == sorted([one, ten])
    assert find_marked(f"{TOKEN}") == []
    assert end_marked(f"{TOKEN}/") == 2


def test_whoever_sweeps_and_its_ancestors_are_spared(tmp_path: Path) -> None:
    code = (
        "from rolloutmq.services.process.child import end_marked; import sys;sys.exit(end_marked('sweep/'))"
    )
    shell = [
        sys.executable,
        "-c",
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))",
    ]
    done = subprocess.run(shell, env={**os.environ, MARKER: "sweep/all"}, timeout=20, cwd=tmp_path)
    assert done.returncode == 0


def test_the_token_of_a_run_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARKER, raising=False)
    assert inherited_token() is None
    monkeypatch.setenv(MARKER, "abc/orchestrator")
    assert inherited_token() == "abc"


def test_nobody_has_no_identity() -> None:
    with pytest.raises(ProcessLookupError):
        identify("w", Role.WORKER, 1 << 30, "x/w")
    assert not is_marked(1 << 30, "x/w")


def test_a_foreign_program_starts_where_it_is_told_and_with_no_signal_blocked(
    start: Spawn, tmp_path: Path
) -> None:
    shows = "print(os.getcwd(), signal.pthread_sigmask(signal.SIG_BLOCK, []), 'up', flush=True)"
    code = f"import os, signal; {shows}; signal.pause()"
    for foreign, blocked in ((True, "set()"), (False, "{<Signals.SIGUSR1")):
        what = msgspec.structs.replace(spec(f"f{foreign}", code, tmp_path), foreign=foreign, cwd="/")
        start(what)
        said = wait_up(Path(what.log))
        assert said.startswith(f"/ {blocked}"), said
