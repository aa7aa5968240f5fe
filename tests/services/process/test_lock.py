"""One holder, who is named to all others, however the one before ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolloutmq.schemas.errors import RunDirInUseError
from rolloutmq.services.process.lock import only_one

HOLDS = """
import sys
from pathlib import Path
from rolloutmq.services.process.lock import only_one
with only_one(Path(sys.argv[1]), "orchestrator"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_whoever_is_refused_is_told_who_holds_it(tmp_path: Path) -> None:
    lock = tmp_path / "orchestrator.lock"
    before = time.time()
    with (
        only_one(lock, "orchestrator"),
        pytest.raises(RunDirInUseError) as caught,
        only_one(lock, "orchestrator"),
    ):
        raise AssertionError
    error = caught.value
    assert (error.path, error.owner, error.pid) == (str(tmp_path), "another orchestrator", os.getpid())
    assert before <= error.since <= time.time()
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error.since))
    assert f"is in use by process {os.getpid()} (another orchestrator) since {since}; stop that run" in str(
        error
    )


def test_a_refusal_says_what_to_do(tmp_path: Path) -> None:
    lock = tmp_path / "e-far.lock"
    with (
        only_one(lock, "program"),
        pytest.raises(RunDirInUseError, match=r"; end that process$"),
        only_one(lock, "program", "end that process"),
    ):
        raise AssertionError


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "orchestrator.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunDirInUseError) as caught, only_one(lock, "orchestrator"):
            raise AssertionError
        assert caught.value.pid == holder.pid
        holder.kill()
        holder.wait()
        with only_one(lock, "orchestrator"):
            assert f'"pid":{os.getpid()}' in lock.read_text()


@pytest.mark.parametrize("left", [b"", b"{", b'{"name": 1}'])
def test_a_file_that_says_nothing_yet_is_no_obstacle(tmp_path: Path, left: bytes) -> None:
    lock = tmp_path / "orchestrator.lock"
    with only_one(lock, "orchestrator"):
        lock.write_bytes(left)
        with (
            pytest.raises(RunDirInUseError, match=r"in use by another orchestrator;"),
            only_one(lock, "orchestrator"),
        ):
            raise AssertionError
    with only_one(lock, "orchestrator"):
        assert f'"pid":{os.getpid()}' in lock.read_text()
