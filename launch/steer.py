"""Commands to a run that lives already: end it, drain a worker, ask for workers, change settings."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rolloutmq.bus.client import BlockingClient
from rolloutmq.bus.endpoint import resolve_blocking
from rolloutmq.bus.engines import FIRST
from rolloutmq.bus.rundir import load_run
from rolloutmq.launch.results import conclude, retell
from rolloutmq.launch.rundir import STRAY_GRACE_S, clear, give_back, in_use, owner, recorded
from rolloutmq.launch.settings import assigned
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.control import Drain, Setting, SetValues, SetWorkers, ValueRefused, ValuesSet
from rolloutmq.schemas.delivery import Reply, Request
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.logbook import last_line
from rolloutmq.services.monitor.exits import reader_may_leave
from rolloutmq.services.monitor.life import Life, fate_of
from rolloutmq.services.orchestrator.processes import end_strays

ANSWER_S: Final = 5.0
"""Longest wait for the broker's answer to a command."""
START_S: Final = 60.0
"""Longest wait for a detached run to have a broker."""
LOOK_S: Final = 0.05


def down(run_dir: Path) -> int:
    """End a run and wait until it has ended. Where its launcher is gone, end what that left behind."""
    layout = RunLayout(run_dir.resolve())
    launcher = owner(layout)
    if launcher is None:
        return _put_away(layout)
    pidfd = os.pidfd_open(launcher.pid)
    try:
        # The identity is looked at again once the descriptor is held: only now can it not change.
        if owner(layout) == launcher:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        select.select([pidfd], [], [])
    finally:
        os.close(pidfd)
    _say(f"ended {layout.root}")
    return 0


def _put_away(layout: RunLayout) -> int:
    """End and clear what is left of a run without a launcher, and say how it came to that."""
    config, _ = load_run(layout.root)
    fate = fate_of(layout)
    ended = end_strays(recorded(layout), STRAY_GRACE_S)
    clear(config, layout)
    layout.owner.unlink(missing_ok=True)
    what = f"{ended} processes that it left were ended"
    if fate.life is Life.DEAD:
        give_back(layout)
        _say(f"the run in {layout.root} was dead: its launcher, process {fate.launcher}, was killed; {what}")
        conclude(config, layout, "its launcher was killed", None)
    elif fate.life is Life.ENDED and not ended:
        _say(f"the run in {layout.root} had ended already: {fate.reason}")
    else:
        _say(f"no launcher lives in {layout.root}; {what}")
    return 0


def detach(config: RunConfig, arguments: Sequence[str]) -> int:
    """Start the same command in a session of its own and return once its broker answers.

    Args:
        config: Resolved from the same arguments.
        arguments: Of this command line, `--detach` among them.

    Raises:
        RunDirInUseError: A living launcher owns the directory. Its output is left as it is.
    """
    root = config.run.dir
    if (living := owner(RunLayout(root))) is not None:
        raise in_use(root, living)
    root.parent.mkdir(parents=True, exist_ok=True)
    output = root.with_name(f"{root.name}.out")
    rest = [argument for argument in arguments if argument != "--detach"]
    command = [sys.executable, "-m", "rolloutmq.launch.cli", *rest, "--plain"]
    with output.open("wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    until = time.monotonic() + START_S
    layout = RunLayout(root)
    while time.monotonic() < until:
        if child.poll() is not None:
            _say(last_line(output) or f"the run ended at once; see {output}")
            return child.returncode or 0
        launcher = owner(layout)
        if launcher is not None and launcher.pid == child.pid and layout.endpoints.exists():
            child.returncode = 0  # it lives on, and nobody waits for it here
            _say(f"started {root} as process {child.pid}; output in {output}")
            return 0
        time.sleep(LOOK_S)
    _say(f"not ready after {START_S:.0f} s; see {output}")
    return 1


def drain(run_dir: Path, worker: str) -> int:
    """Let a worker finish and go."""
    _ask(run_dir, Drain(worker=worker))
    _say(f"draining {worker}")
    return 0


def scale(run_dir: Path, env: str, count: int | None) -> int:
    """Ask for a number of workers of an environment; None gives the orchestrator its judgement back.

    `inference` is no environment, but the engines.

    Raises:
        ConfigError: There is no such environment, or the engines of this run are not to be scaled.
    """
    config, _ = load_run(run_dir)
    if env == FIRST:
        _check_engines(config)
    elif env not in config.environment:
        raise ConfigError(env, f"is no environment of this run; there are: {', '.join(config.environment)}")
    _ask(run_dir, SetWorkers(env=env, count=count))
    what, itself = ("engines", "as the workers need") if env == FIRST else ("workers", "as the pressure asks")
    _say(f"{env}: {itself if count is None else f'{count} {what} asked for'}")
    return 0


def _check_engines(config: RunConfig) -> None:
    if config.inference.kind == "external":
        raise ConfigError("inference.kind", "is `external`: nobody here can start or end that server")
    if config.inference.max_engines == 1:
        raise ConfigError("inference.max_engines", "is 1: configure more, and start the run again")


def set_values(run_dir: Path, assignments: Sequence[str]) -> int:
    """Change settings of the living broker, all of them or none.

    Raises:
        ConfigError: One of them may not change, or cannot have the value; nothing was changed.
    """
    values: dict[str, Setting] = {}
    for assignment in assignments:
        key, value = assigned(assignment)
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(key, "must be a number, a text, true or false")
        if key in values:
            raise ConfigError(key, "is named twice")
        values[key] = value
    reply = _ask(run_dir, SetValues(values=values))
    if isinstance(reply, ValueRefused):
        raise ConfigError(reply.key, reply.reason)
    assert isinstance(reply, ValuesSet)
    for key, value in reply.values.items():
        _say(f"{key} = {value}")
    return 0


def report(run_dir: Path, *, as_json: bool) -> int:
    """Write summary and picture again from what is in the run directory, and print produced against trained."""
    config, layout = load_run(run_dir)
    with reader_may_leave():
        retell(config, layout, as_json=as_json)
    return 0


def _ask(run_dir: Path, request: Request) -> Reply:
    with BlockingClient(resolve_blocking(run_dir, ANSWER_S).serve) as client:
        return client.request(request, ANSWER_S)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
