"""Small processes for the tests of supervision: they start fast and do one thing."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rolloutmq.schemas.process import ProcessSpec, Restart, Role

PATIENT = "import signal; print('up', flush=True); signal.pause()"
"""Lives until it is signalled."""
DRAINABLE = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
print('up', flush=True)
while True: signal.pause()
"""
"""Ends with 0 at SIGUSR1."""
STUBBORN = """
import signal
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
print('up', flush=True)
while True: signal.pause()
"""
"""Ends only at SIGKILL."""
PARENT = """
import signal, subprocess, sys
sleeper = [sys.executable, '-S', '-c', 'import signal; signal.pause()']
near = subprocess.Popen(sleeper)
far = subprocess.Popen(sleeper, start_new_session=True)
print(near.pid, far.pid, flush=True)
while True: signal.pause()
"""
"""Has a child in its group and one that escaped to a session of its own."""


def argv(code: str) -> tuple[str, ...]:
    """Return the command of a small Python program."""
    return sys.executable, "-S", "-c", code


def spec(
    name: str, code: str, folder: Path, restart: Restart = Restart.ON_FAILURE, role: Role = Role.WORKER
) -> ProcessSpec:
    """Describe such a process; its log is `<folder>/<name>.log`."""
    return ProcessSpec(
        name=name, role=role, argv=argv(code), log=str(folder / f"{name}.log"), restart=restart
    )


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for something that another process does; AssertionError if it does not in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


def wait_up(log: Path, text: str = "up") -> str:
    """Wait until a log has the text; return the log."""
    wait_for(lambda: log.exists() and text in log.read_text())
    return log.read_text()
