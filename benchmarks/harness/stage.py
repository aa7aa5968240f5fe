"""Processes of a measurement: a broker started as in a run, and players that start on command.

A player is a process with a line protocol: it prints `ready`, waits for a line, plays, and may print a figure.
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

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Endpoints, RunLayout

DEADLINE_S: Final = 60.0
"""Silence of a process that ends the measurement."""
ENV: Final = "bench"
GIB: Final = 1 << 30
STEPS: Final = 1_000_000
"""More steps than any measurement takes."""
LOOK_S: Final = 0.002
ERROR_LINES: Final = 20
"""Lines of a failed process's errors that are shown."""

PACKAGE: Final = Path(__file__).parents[1]


class StageError(Exception):
    """A process of a measurement failed."""


def missing(environment: Path) -> str:
    """Return why a rival's environment is incomplete; empty if it is complete."""
    return (
        "" if (environment / ".installed").exists() else f"there is no {environment.name}: make bench-rivals"
    )


def config(**broker: Any) -> RunConfig:
    """Return a configuration that holds back, drops and keeps nothing, since the queue is measured.

    A consumer's loop ends after `trainer.steps`: small groups fill its default in less than a round.

    Args:
        broker: Changes to the defaults of `[broker]`.
    """
    ageless = {"entry": "bench.py:Bench", "pacing": False, "stale": "pass"}
    return RunConfig.model_validate(
        {
            "broker": {"retain_bytes": 1, **broker},
            "environment": {ENV: ageless},
            "trainer": {"steps": STEPS},
        },
    )


@contextlib.contextmanager
def broker(layout: RunLayout, about: RunConfig | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a broker in its own process, like the launcher, and kill it at the end.

    Args:
        layout: The run directory, which exists.
        about: The configuration; None if the run directory has it.
    """
    if about is not None:
        write_json(layout.config, about)
    with service(layout, "broker") as one:
        yield one


@contextlib.contextmanager
def service(layout: RunLayout, name: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a service of a run in its own process, like the launcher, and kill it at the end."""
    module = "rolloutmq.launch.service_process"
    command = [sys.executable, "-m", module, name, "--run-dir", str(layout.root)]
    with (
        (layout.root / f"{name}.out").open("ab") as log,
        ended(subprocess.Popen(command, stdout=log, stderr=log)) as one,
    ):
        yield one


@contextlib.contextmanager
def ended(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    """Kill a process at the end of the block, however it ends."""
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

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def line(self, within_s: float = DEADLINE_S) -> str:
        """Block until the process has printed a line; StageError if it prints none."""
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
        """Block until it is ready."""
        while self.line(within_s) != "ready":
            pass  # a library may print

    def begin(self, what: str = "go") -> None:
        """Start it with a line, which may carry a parameter."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()

    def figure(self) -> float:
        """Block until it has printed a figure; other lines are skipped."""
        while True:
            with contextlib.suppress(ValueError):
                return float(self.line())


@contextlib.contextmanager
def player(
    module: str, *words: object, python: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Player]:
    """Start `python -m benchmarks.MODULE WORDS`, and kill it at the end.

    Args:
        module: Dotted name of the module below `benchmarks`, such as `broker.proxy`.
        words: Arguments of its `main`.
        python: Interpreter of another environment, which runs only the module's file.
        env: Environment variables; default: those of this process.
    """
    file = (PACKAGE / module.replace(".", "/")).with_suffix(".py")
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
    """Report, as a player, that everything is prepared; block until started."""
    print("ready", flush=True)
    sys.stdin.readline()
