"""Trial of the environments before a run: a process of its own loads each class as a worker would, and rolls out.

So classes, options, raters and ensembles that cannot work, rows that a data set lacks, characters that a built-in model
cannot read and exceptions in any method are found before anything starts, all of them at once.

The user's code runs in that process only (`examination`), and whatever it starts ends with it. An environment that
takes longer than the time-out, or ends the process, refuses nothing: it is told, and the others are tried in another
process. Not tried are programs, environments with GPUs, which only a worker is given, and those whose workers the run
does not start.
"""

import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.preflight.noted_methods import FAULTS, NOTES, noted
from rolloutmq.launch.preflight.trial_directory import trial_directory
from rolloutmq.launch.preflight.verdicts import Problem, Progress, Verdict
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.process import ProcessSpec, Role, python_command
from rolloutmq.services.process.child import KILL_WAIT_S, Process, spawn
from rolloutmq.services.process.logbook import last_message
from rolloutmq.services.process.stacks import fault_in

TIMEOUT_S: Final = 60.0
"""Time-out of each environment, in seconds: its modules may import torch."""
GRACE_S: Final = 2.0
"""Time to end after the last verdict, in seconds: threads of the user's code may go on."""
START_S: Final = 10.0
"""Time for the process to start, beside the time-out."""
TOLD_S: Final = 2.0
"""Time after which a trial says what it does, in seconds."""
POLL_S: Final = 0.1
LATE: Final = "it took longer than"

Tell = Callable[[str], None]
"""Called with what takes long, in one line."""

_lines: Final = msgspec.json.Decoder(Progress | Verdict)


def try_environments(
    config: RunConfig,
    names: Sequence[str] | None = None,
    *,
    rolled: bool = True,
    timeout_s: float = TIMEOUT_S,
    tell: Tell = lambda _text: None,
) -> list[Verdict]:
    """Try the environments of a run in another process, and return a verdict on each.

    Blocks for as long as their modules and rollouts take, at most about `timeout_s` for each.

    Args:
        config: Configuration of the run.
        names: Environments to try; None for all that can be.
        rolled: Whether to draw tasks and roll out, too.
        timeout_s: Time-out of each environment.
        tell: Told of an environment that takes longer than `TOLD_S`.
    """
    left = list(tried(config) if names is None else names)
    found: list[Verdict] = []
    while left:
        some = _Trial(config, left, rolled=rolled, timeout_s=timeout_s, tell=tell).verdicts()
        found += some
        left = left[len(some) :]
    return found


def tried(config: RunConfig) -> list[str]:
    """Return the names of the environments to try."""
    if not config.orchestrator.enabled:
        return []
    return [name for name, env in config.environment.items() if not env.command and not env.gpus]


class _Trial:
    """One process that tries environments, until one takes too long or ends it."""

    def __init__(
        self, config: RunConfig, names: Sequence[str], *, rolled: bool, timeout_s: float, tell: Tell
    ) -> None:
        self._config = config
        self._names = names
        self._rolled = rolled
        self._timeout_s = timeout_s
        self._tell = tell

    def verdicts(self) -> list[Verdict]:
        """Return a verdict on each of the first environments, at least on one."""
        with trial_directory() as directory:
            file, result, log = (directory / name for name in ("config.json", "result.jsonl", "log"))
            write_json(file, self._config)
            how = ("all" if self._rolled else "loading", *self._names)
            words = (str(file), str(result), str(self._timeout_s), *how)
            command = python_command(sys.executable, "rolloutmq.launch.preflight.examination", *words)
            spec = ProcessSpec(name="trial", role=Role.WORKER, argv=command, log=str(log))
            ended = self._ended(spawn(spec, directory.name), result)
            found = _verdicts(result)
            if len(found) < len(self._names) and not _ends_with_verdict(result):
                at = self._place(result)
                found.append(self._lost(self._names[len(found)], at, ended, last_message(log)))
        return found

    def _ended(self, process: Process, result: Path) -> str:
        """Wait for the end of the process, then end what is left of it; return how it ended."""
        poll = select.poll()
        poll.register(process, select.POLLIN)
        at, since, told, how = self._names[0], time.monotonic(), False, ""
        deadline = since + START_S + self._timeout_s
        try:
            while not poll.poll(POLL_S * 1000) and not how:
                now, current = time.monotonic(), _current(result) or self._names[0]
                if current != at:
                    at, since, told = current, now, False
                    deadline = now + self._timeout_s
                if len(_verdicts(result)) == len(self._names):
                    deadline, told = min(deadline, now + GRACE_S), True
                if not told and now >= since + TOLD_S:
                    told = True
                    self._tell(f"checks environment {at} (timeout {self._timeout_s:g} s)")
                if now >= deadline:
                    how = f"{LATE} {self._timeout_s:g} s"
        finally:
            process.send_group(signal.SIGKILL)
            poll.poll(KILL_WAIT_S * 1000)
            ended = process.poll()
            process.close()
        return how or str(ended)

    def _place(self, result: Path) -> str:
        """Return what the process did last, with the place if a fatal signal ended it there."""
        at, faults = noted(result.with_name(NOTES)), result.with_name(FAULTS)
        text = faults.read_text(errors="replace") if faults.exists() else ""
        place = fault_in(text, self._config.base_dir.resolve())
        return f"{at}, at {place}," if at and place else at

    def _lost(self, name: str, at: str, ended: str, last: str) -> Verdict:
        """Return the verdict on an environment that ended the process or took too long; `at` is what it did last."""
        if ended.startswith(LATE):
            text = f"could not be checked, {ended}{f' in {at}' if at else ''}; its workers will tell"
        elif at:
            text = (
                f"{at} ended the process: {ended}{f': {last}' if last else ''}; it would end its workers, too"
            )
        else:
            text = f"could not be checked, {ended}{f': {last}' if last else ''}; its workers will tell"
        return Verdict(env=name, failures=(Problem(path=f"environment.{name}", problem=text),))


def _read(result: Path) -> list[Progress | Verdict]:
    """Return the whole lines of a result so far."""
    if not result.exists():
        return []
    whole, _, _ = result.read_bytes().rpartition(b"\n")
    return [_lines.decode(line) for line in whole.splitlines()]


def _verdicts(result: Path) -> list[Verdict]:
    return [line for line in _read(result) if isinstance(line, Verdict)]


def _ends_with_verdict(result: Path) -> bool:
    """Return whether the process ended between two environments: the last one took too long, and has its verdict."""
    return bool(lines := _read(result)) and isinstance(lines[-1], Verdict)


def _current(result: Path) -> str:
    lines = _read(result)
    return lines[-1].env if lines else ""
