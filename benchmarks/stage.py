"""Processes of a measurement: a broker as a run starts it, and players of roles that are told when to begin.

A player is a process of its own that speaks in lines: it says `ready`, waits for a line, plays, and may say a figure.
"""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from rolloutmq.bus.endpoint import read_endpoints
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import Endpoints

DEADLINE_S: Final = 60.0
"""A process that is silent for so long ends the measurement."""
ENV: Final = "bench"
GIB: Final = 1 << 30
LOOK_S: Final = 0.002
ERROR_LINES: Final = 20
"""So much of what a process complained of is told when it does not do its part."""


class StageError(Exception):
    """A process of a measurement did not do its part."""


def missing(environment: Path) -> str:
    """Say that a rival's environment is not whole; empty if it is."""
    return (
        "" if (environment / ".installed").exists() else f"there is no {environment.name}: make bench-rivals"
    )


def config(**broker: Any) -> RunConfig:
    """The queue is the thing measured: nothing is held back or dropped because of its age, nothing kept once trained.

    Args:
        broker: What differs from the defaults of `[broker]`.
    """
    ageless = {"entry": "bench.py:Bench", "pacing": False, "stale": "pass"}
    return RunConfig.model_validate(
        {"broker": {"retain_bytes": 1, **broker}, "environment": {ENV: ageless}},
    )


@contextlib.contextmanager
def broker(layout: RunLayout, about: RunConfig | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a broker in a process of its own, as the launcher does, and kill it at the end.

    Args:
        layout: The run directory, which exists.
        about: The configuration; None if it is in the run directory already.
    """
    if about is not None:
        write_json(layout.config, about)
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "broker", "--run-dir", str(layout.root)]
    with (
        (layout.root / "broker.out").open("ab") as log,
        ended(subprocess.Popen(command, stdout=log, stderr=log)) as one,
    ):
        yield one


@contextlib.contextmanager
def ended(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    """Kill a process when the block is left, however it is left."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def bound(layout: RunLayout, process: "subprocess.Popen[bytes]") -> Endpoints:
    """Block until the broker's sockets are bound; StageError if it ended."""
    while (found := read_endpoints(layout.root)) is None:
        if process.poll() is not None:
            raise StageError(f"the broker ended with {process.returncode}")
        time.sleep(LOOK_S)
    return found


class Player:
    """One process that plays a role; see `player`."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", errors: TextIO) -> None:
        self.name = name
        self._process = process
        self._errors = errors
        self._heard = b""

    def line(self, within_s: float = DEADLINE_S) -> str:
        """Block until the process has said a line; StageError if it says none."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            if not select.select([fd], [], [], within_s)[0]:
                raise StageError(f"{self.name} is silent\n{self._last_errors()}")
            if not (more := os.read(fd, select.PIPE_BUF)):
                raise StageError(f"{self.name} ended\n{self._last_errors()}")
            self._heard += more
        said, _, self._heard = self._heard.partition(b"\n")
        return said.decode(errors="replace").strip()

    def _last_errors(self) -> str:
        self._errors.seek(0)
        return "".join(deque(self._errors, ERROR_LINES))

    def wait_ready(self, within_s: float = DEADLINE_S) -> None:
        """Block until it said so."""
        while self.line(within_s) != "ready":
            pass  # a library that it uses may print

    def begin(self, what: str = "go") -> None:
        """Tell it to play, by a line that may say what."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()

    def figure(self) -> float:
        """Block until it has said a figure; lines of others who write there are passed over."""
        while True:
            with contextlib.suppress(ValueError):
                return float(self.line())


@contextlib.contextmanager
def player(
    module: str, *words: object, python: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Player]:
    """Start `python -m benchmarks.MODULE WORDS`, and kill it at the end.

    Args:
        module: Name of the module in this package.
        words: What its `main` is called with.
        python: Interpreter of another environment, which runs the module's file alone.
        env: Environment variables; those of this process by default.
    """
    file = Path(__file__).with_name(f"{module}.py")
    what = ["-m", f"benchmarks.{module}"] if python is None else [str(file)]
    command = [str(python or sys.executable), *what, *map(str, words)]
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=env)
        with ended(process):
            yield Player(" ".join((module, *map(str, words[:1]))), process, errors)


@contextlib.contextmanager
def players(module: str, calls: Sequence[Sequence[object]]) -> Iterator[list[Player]]:
    """Start several players of one module."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(player(module, *words)) for words in calls]


def ready() -> None:
    """Say, as a player, that everything is prepared; and block until told to begin."""
    print("ready", flush=True)
    sys.stdin.readline()
