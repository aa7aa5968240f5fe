"""The guard of what a process has started: it acts at the death of its host, and not before."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolloutmq.services.orchestrator.cluster.guard import Guard
from rolloutmq.services.process.identity import MARKER, find_marked, runs

LIMIT_S = 60.0
HOST = """
import sys
from pathlib import Path
from rolloutmq.services.orchestrator.cluster.guard import Guard
guard = Guard(sys.argv[1], Path(sys.argv[2]))
print(guard._process.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def marked(marker: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process with a marker in a session of its own."""
    environment = {**os.environ, MARKER: marker}
    with subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_death_of_the_host_ends_what_is_marked_and_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.touch()
    marker = f"guard-{os.getpid()}/a"
    with marked(marker) as mine, marked(f"{marker}b") as other:
        with subprocess.Popen(
            [sys.executable, "-c", HOST, marker, str(secret)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as host:
            assert host.stdout is not None
            guard = int(host.stdout.readline())
            assert mine.poll() is None
            assert secret.exists()
            host.kill()
        assert mine.wait(LIMIT_S) == -9
        assert other.poll() is None
        assert not secret.exists()
        until = time.monotonic() + LIMIT_S
        while runs(guard):
            assert time.monotonic() < until, "the guard stays"
            time.sleep(0.02)


def test_a_dismissed_guard_leaves_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = f"guard-{os.getpid()}/c"
    monkeypatch.setenv(MARKER, marker)  # as in an actor that a marked process has started
    secret = tmp_path / "key"
    secret.touch()
    guard = Guard(marker, secret)
    assert find_marked(marker) == []
    with marked(marker) as mine:
        guard.dismiss()
        assert mine.poll() is None
        assert secret.exists()


def test_the_directory_of_an_engine_goes_with_its_host(tmp_path: Path) -> None:
    directory = tmp_path / "life"
    (directory / "run").mkdir(parents=True)
    host = HOST.replace("Path(sys.argv[2]))", "Path(sys.argv[2]), Path(sys.argv[2]).parent)")
    words = f"guard-{os.getpid()}/e", str(directory / "key")
    with subprocess.Popen(
        [sys.executable, "-c", host, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    until = time.monotonic() + LIMIT_S
    while directory.exists():
        assert time.monotonic() < until, "the directory stays"
        time.sleep(0.02)
