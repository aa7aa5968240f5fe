"""One run of the quickstart, started from the command line, with faults injected from outside.

A scenario is the command line, the fault, and the summary of the run. Processes are found by the identities in the
run's files, and steps are counted in the trainer's log.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessIdentity, Role

QUICKSTART: Final = Path(__file__).parents[2] / "examples" / "quickstart.toml"
POLL_S: Final = 0.1
RUN_DEADLINE_S: Final = 240.0


class ScenarioError(Exception):
    """The run did not reach a state the scenario waits for."""


class LiveRun:
    """A running run, as a fault sees it."""

    def __init__(self, layout: RunLayout, process: subprocess.Popen[bytes], deadline: float) -> None:
        self.layout = layout
        self.process = process
        self.deadline = deadline

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Block until the condition holds; ScenarioError if the run ends or the time is up."""
        while not condition():
            if self.process.poll() is not None:
                raise ScenarioError(f"the run ended with {self.process.returncode} before {what}")
            if time.monotonic() > self.deadline:
                raise ScenarioError(f"no {what} in time")
            time.sleep(POLL_S)

    def wait_for_step(self, step: int) -> None:
        """Block until the trainer has logged that step."""
        self.wait_for(f"step {step}", lambda: steps_logged(self.layout) >= step)

    def processes(self) -> dict[str, ProcessIdentity]:
        """Return the running processes by name, from the run's own files."""
        found: dict[str, ProcessIdentity] = {}
        for file in (self.layout.processes, self.layout.workers, self.layout.engines):
            if file.exists():
                known = msgspec.json.decode(file.read_bytes(), type=list[ProcessIdentity])
                found |= {identity.name: identity for identity in known}
        return found

    def wait_for_process(self, name: str) -> ProcessIdentity:
        """Block until the run has a process of that name."""
        self.wait_for(f"process {name}", lambda: name in self.processes())
        return self.processes()[name]

    def kill(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process of the run."""
        os.kill(self.wait_for_process(name).pid, number)

    def workers(self) -> list[str]:
        """Return the names of the running workers."""
        return sorted(name for name, one in self.processes().items() if one.role is Role.WORKER)


def steps_logged(layout: RunLayout) -> int:
    """Return the highest step in the trainer's log so far, 0 if there is none."""
    if not layout.trained.exists():
        return 0
    lines = layout.trained.read_bytes().splitlines()
    for line in reversed(lines[-2:]):
        try:
            return int(json.loads(line)["version"][1])
        except (ValueError, KeyError, IndexError):
            continue  # the last line may be half written
    return 0


def run(
    run_dir: Path,
    assignments: Sequence[str] = (),
    *,
    flags: Sequence[str] = (),
    config: Path = QUICKSTART,
    fault: Callable[[LiveRun], None] | None = None,
    deadline_s: float = RUN_DEADLINE_S,
) -> tuple[int, dict[str, Any]]:
    """Run to the end and return the exit code and the summary.

    Raises:
        ScenarioError: The fault could not be injected, or the run did not end in time.
    """
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "up", str(config), "--plain"]
    command += ["--run-dir", str(run_dir), *flags]
    for assignment in assignments:
        command += ["--set", assignment]
    deadline = time.monotonic() + deadline_s
    output = run_dir.parent / f"{run_dir.name}.out"
    with output.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    layout = RunLayout(run_dir)
    try:
        if fault is not None:
            fault(LiveRun(layout, process, deadline))
        code = process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ScenarioError(f"the run did not end within {deadline_s:g} s; see {output}") from None
    finally:
        _end(process)
    if not layout.summary.exists():
        raise ScenarioError(f"the run ended with {code} and left no summary; see {output}")
    return code, json.loads(layout.summary.read_bytes())


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(30)
