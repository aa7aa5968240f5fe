"""The note of a process's end: read by a supervisor that is not its parent."""

import os
import sys
import time
from pathlib import Path

import pytest

from rolloutmq.schemas.process import ProcessSpec, Role
from rolloutmq.services.process.child import Exit, adopt, spawn
from rolloutmq.services.process.ending import VARIABLE, note_end, note_of, noted_code
from rolloutmq.services.process.identity import identify

NOTES = """
import pathlib, sys, time
from rolloutmq.services.process.ending import note_end
while not pathlib.Path("{go}").exists():
    time.sleep(0.01)
note_end({code})
sys.exit({code})
"""


def test_a_note_counts_once_and_for_its_own_process(tmp_path: Path) -> None:
    log = tmp_path / "math-far.0.log"
    mine = identify("math-far.0", Role.WORKER, os.getpid(), "t/math-far.0")
    assert noted_code(log, mine) is None
    note_end(3, {VARIABLE: str(note_of(log))})
    assert note_of(log).stat().st_mode & 0o777 == 0o600
    assert noted_code(log, mine) == 3
    assert noted_code(log, mine) is None
    note_end(3, {VARIABLE: str(note_of(log))})
    other = identify("math-far.0", Role.WORKER, os.getppid(), "t/math-far.0")
    assert noted_code(log, other) is None


def test_no_note_is_written_unless_it_is_wanted_and_can_be(tmp_path: Path) -> None:
    note_end(0, {})
    note_end(0, {VARIABLE: str(tmp_path / "missing" / "w.end")})
    assert not list(tmp_path.iterdir())


def test_a_damaged_note_counts_as_none(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    note_of(log).write_bytes(b"{")
    assert noted_code(log, identify("w", Role.WORKER, os.getpid(), "t/w")) is None


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_an_adopted_process_is_known(tmp_path: Path, code: int) -> None:
    """It was unknown, so a worker that had drained counted as crashed, and was started again."""
    argv = (sys.executable, "-c", NOTES.format(code=code, go=str(tmp_path / "go")))
    spec = ProcessSpec(name="w", role=Role.WORKER, argv=argv, log=str(tmp_path / "w.log"))
    parent = spawn(spec, "token")
    adopted = adopt(parent.identity)
    assert adopted is not None
    (tmp_path / "go").touch()
    until = time.monotonic() + 30.0
    while (found := adopted.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert found == Exit(None)
    assert noted_code(Path(spec.log), adopted.identity) == code
    adopted.close()
    parent.poll()
    parent.close()
