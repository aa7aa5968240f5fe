"""Commands that change a running run: `down`, `drain`, `restart`, `scale`, `set`, and `up --detach`."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

from rolloutmq.bus.engine_registry import FIRST, engines_of
from rolloutmq.bus.files import private_file, require_private
from rolloutmq.bus.rundir import load_run, read_run
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch.results import conclude, print_report
from rolloutmq.launch.rundir import (
    END_SIGNAL,
    STRAY_GRACE_S,
    clear,
    end_waits,
    in_use,
    owner,
    recorded,
    trim_journal,
)
from rolloutmq.launch.settings import assigned
from rolloutmq.schemas.config.base import INTEGER_LIMIT, PROCESSES_LIMIT
from rolloutmq.schemas.config.live_settings import split
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, RefusedError, UsageError
from rolloutmq.schemas.files import RunLayout, Supervision, Target
from rolloutmq.schemas.printable import printable_lines, shell_word
from rolloutmq.schemas.process import python_command
from rolloutmq.schemas.wire.control import (
    Drain,
    GetStatus,
    RestartWorker,
    Setting,
    SetValues,
    SetWorkers,
    StatusReply,
    ValueRefused,
    ValuesSet,
    WorkerState,
)
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import Reply
from rolloutmq.schemas.wire.requests import Request
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of
from rolloutmq.services.monitor.status.confirmation import confirmed, unconfirmed
from rolloutmq.services.monitor.status.worker_view import WorkerRow, joined, supervision_of, trouble_text
from rolloutmq.services.monitor.text.exit_codes import FAILED, INTERRUPTED, complain, reader_may_leave
from rolloutmq.services.orchestrator.supervision.core import Phase
from rolloutmq.services.process.child import end_strays
from rolloutmq.services.process.identity import alive
from rolloutmq.services.process.logbook import last_lines

ANSWER_S: Final = 5.0
"""Longest wait for the broker's reply to a command."""
LAST_LINES: Final = 200
"""Most lines of a detached command that are searched for its error."""
PAGE: Final = "dashboard http"
"""Beginning of the line of a run with the link to its page."""
START_S: Final = 120.0
"""Longest wait for the broker of a detached run. The trial of its environments may take half of it."""
LOOK_S: Final = 0.05
END_LOOK_S: Final = 0.5
"""Interval between two looks at what the end of a run waits for."""
KILL_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
"""Two signals that each end a launcher, so the second one kills; of the same one it might see only one."""
NO_PROCESS: Final = frozenset({Phase.WAITING.value, Phase.FATAL.value, WorkerState.FAILED.value})
"""States of a worker without a process that does work."""


def down(run_dir: Path, *, at_once: bool = False) -> int:
    """Stop a run and wait for its end. If its launcher is dead, end its remaining processes and clean up.

    A run that has ended is said to have ended, with exit code 0; a run of nobody, or of a broker that was started by
    hand, with exit code 1. Blocks without limit, and prints what the end waits for once it lasts. A `down` of a run
    that is ending waits with the first.

    Args:
        run_dir: Its directory.
        at_once: Kill its processes, instead of ending them in order.
    """
    layout = RunLayout(run_dir.resolve())
    require_private(layout.root)  # its files name the processes to end
    launcher = owner(layout)
    if launcher is None:
        return _put_away(layout)
    pidfd = os.pidfd_open(launcher.pid)
    try:
        # Compare the identity again while the pidfd is held: from here on the pid cannot be reused.
        if owner(layout) == launcher:
            for number in KILL_SIGNALS if at_once else (END_SIGNAL,):
                signal.pidfd_send_signal(pidfd, number)
        _await_end(layout, pidfd)
    except KeyboardInterrupt:
        return complain(
            f"run {layout.root} is still ending; to kill it: rolloutmq down {shell_word(run_dir)} --now",
            INTERRUPTED,
        )
    finally:
        os.close(pidfd)
    _say(f"ended {layout.root}")
    return 0


def _await_end(layout: RunLayout, launcher: int) -> None:
    """Wait until the process of a pidfd has ended, and print what it waits for."""
    said = ""
    while not select.select([launcher], [], [], END_LOOK_S)[0]:
        text = end_waits(layout)
        if text not in {"", said}:
            with reader_may_leave():
                _say(printable_lines(text))
        said = text


def _put_away(layout: RunLayout) -> int:
    """End and clean up a run without a launcher, and print how it ended; FAILED if there was nothing to stop."""
    config, _ = load_run(layout.root)
    fate = fate_of(layout)
    left = layout.endpoints.exists()
    ended = end_strays(recorded(layout), STRAY_GRACE_S)
    clear(layout)
    layout.owner.unlink(missing_ok=True)
    what = f"ended {ended} remaining processes"
    match fate.life:
        case RunLiveness.DEAD:
            trim_journal(layout)
            how = (
                "belonged to another boot or machine; if it still runs, stop it there"
                if fate.elsewhere
                else "was killed"
            )
            _say(f"run {layout.root} was dead: its launcher, process {fate.launcher}, {how}; {what}")
            conclude(config, layout, "its launcher was killed")
        case RunLiveness.ENDED if not ended:
            _say(f"run {layout.root} had already ended: {fate.reason}")
        case _ if ended:
            _say(f"run {layout.root} has no launcher; {what}")
        case RunLiveness.LIVING:
            started = "its broker was started by hand; stop it where it was started"
            return complain(f"run {layout.root} has no launcher, so nothing was stopped: {started}", FAILED)
        case _ if left:
            _say(f"run {layout.root} was not active; removed the addresses of its broker")
        case _:
            return complain(f"run {layout.root} is not active, so nothing was stopped", FAILED)
    return 0


def detach(config: RunConfig, arguments: Sequence[str]) -> int:
    """Start the same command in its own session, and return once its broker answers.

    Args:
        config: Resolved from the same arguments.
        arguments: This command line, with `--detach`.

    Raises:
        RunDirInUseError: A running launcher owns the directory. Its output file is left as it is.
    """
    root = config.run.dir
    if (living := owner(RunLayout(root))) is not None:
        raise in_use(root, living)
    root.parent.mkdir(parents=True, exist_ok=True)
    output = root.with_name(f"{root.name}.out")
    rest = [argument for argument in arguments if argument != "--detach"]
    command = python_command(sys.executable, "rolloutmq.launch.cli", *rest, "--plain")
    with private_file(output, "wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    until = time.monotonic() + START_S
    layout = RunLayout(root)
    while time.monotonic() < until:
        if child.poll() is not None:
            _say(_last_words(output) or f"the run ended at once; output in {output}")
            return child.returncode or 0
        launcher = owner(layout)
        if launcher is not None and launcher.pid == child.pid and layout.endpoints.exists():
            child.returncode = 0  # the run continues; nobody waits for it here
            _say(f"started {root} as process {child.pid}; output in {output}")
            if link := next((one for one in last_lines(output, LAST_LINES) if one.startswith(PAGE)), ""):
                _say(link)
            return 0
        time.sleep(LOOK_S)
    _say(f"not ready after {START_S:.0f} s; output in {output}")
    return 1


def _last_words(output: Path) -> str:
    """Return the error that a command ended with, which may have several lines; else its last line."""
    lines = last_lines(output, LAST_LINES)
    begins = [at for at, line in enumerate(lines) if line.startswith("rolloutmq: ")]
    return "\n".join(lines[begins[-1] if begins else -1 :])


def drain(run_dir: Path, worker: str) -> int:
    """Drain a worker: it finishes its running rollouts, then exits; return the exit code.

    A worker that the orchestrator did not start drains by itself, and nobody confirms it.

    Raises:
        UsageError: It has no process that could drain, or one that has not reported yet after a crash; or nobody knows
            it.
    """
    layout = RunLayout(run_dir)
    known = supervision_of(layout)
    _require_process(run_dir, known, worker)
    try:
        _ask(run_dir, Drain(worker=worker))
    except RefusedError as error:
        if error.code is not ErrorCode.UNKNOWN:
            raise
        raise UsageError(f"{worker}: no such worker; `rolloutmq workers` lists the workers") from None
    if known is not None and any(one.worker == worker for one in known.workers):
        phase = confirmed(layout, lambda report: _phase_of(report, worker))
        if phase is None:
            return unconfirmed(layout, f"drain of {worker}")
        if phase in NO_PROCESS:  # its process ended since
            return complain(
                f"{worker}: is {phase}, so nothing drains; use `rolloutmq restart {worker}`", FAILED
            )
    _say(f"draining {worker}")
    return 0


def _require_process(run_dir: Path, known: Supervision | None, worker: str) -> None:
    """Raise UsageError if a worker has nothing to drain. The report of a dead orchestrator says nothing."""
    status = _ask(run_dir, GetStatus())
    assert isinstance(status, StatusReply)
    current = known if known is not None and alive(known.orchestrator) else None
    rows = joined(current, status.pressure.workers, time.monotonic())
    row = next((row for row in rows if row.worker == worker), None)
    if row is not None and (row.state in NO_PROCESS or (row.starts_again and row.in_hand is None)):
        raise UsageError(f"worker {worker}: nothing to drain ({trouble_text(row)}); {_instead(row)}")


def _instead(row: WorkerRow) -> str:
    number = f"for another number of workers: rolloutmq scale {row.env} N"
    if row.state in {Phase.FATAL, WorkerState.FAILED}:
        return f"for another in its place: rolloutmq restart {row.worker}; {number}"
    return f"drain it once it is ready; {number}"


def _phase_of(report: Supervision, worker: str) -> str | None:
    """Return the phase of a worker that is not left as it is; None while the orchestrator lets it run."""
    phase = next((one.phase for one in report.workers if one.worker == worker), Phase.ENDED.value)
    return None if phase == Phase.RUNNING else phase


def restart(run_dir: Path, worker: str, *, at_once: bool = False) -> int:
    """End a worker or an engine, and have another started in its place; return the exit code.

    Args:
        run_dir: Of a live run.
        worker: Worker in any state, or an engine beyond the first.
        at_once: Kill it, instead of draining it: its unfinished rollouts are lost.

    Raises:
        UsageError: Nobody knows it, or it is the first engine, which belongs to the launcher.
        RefusedError: It joined from another host, where its command restarts it.
    """
    layout, order = RunLayout(run_dir), uuid4().hex
    if worker == FIRST:
        raise UsageError(
            f"{worker}: is the first engine, which the launcher runs and no order restarts; end its process on the "
            "run's host, and the launcher starts another"
        )
    known = supervision_of(layout)
    if layout.connection.exists():
        _require_heard(layout, worker)
    pids = {one.name: one.pid for one in engines_of(layout)}
    pids |= {one.worker: one.pid for one in known.workers} if known is not None else {}
    _ask(run_dir, RestartWorker(worker=worker, order=order, pid=pids.get(worker, 0), at_once=at_once))
    outcome = confirmed(layout, lambda report: report.restarts.get(order))
    if outcome is None:
        return unconfirmed(layout, f"restart of {worker}", "kept for a minute")
    if not outcome.done:
        return complain(f"{worker}: {outcome.text}", FAILED)
    _say(f"{worker}: {outcome.text}")
    return 0


def _require_heard(layout: RunLayout, worker: str) -> None:
    """Raise UsageError if a run of another host has no such worker or engine: nobody there would answer the order."""
    status = _ask(layout.root, GetStatus())
    assert isinstance(status, StatusReply)
    names = {one.worker for one in status.pressure.workers} | {one.name for one in engines_of(layout)}
    if worker not in names:
        raise UsageError(
            f"{worker}: no such worker or engine is heard; `rolloutmq workers` lists the workers. One that was given "
            "up long ago is restarted on the run's host"
        )


def scale(run_dir: Path, env: str, count: int | None) -> int:
    """Pin the worker count of an environment; None returns it to autoscaling. Return the exit code.

    The name `inference` means the inference servers. Prints the number that the orchestrator decided, with the reason
    if it is another one.

    Raises:
        ConfigError: Unknown environment, a number above the limit, or the inference servers of this run cannot be
            scaled.
    """
    config, _ = read_run(run_dir)
    if env == FIRST:
        _check_engines(config)
    elif env not in config.environment:
        raise ConfigError(env, f"unknown environment; this run has: {', '.join(config.environment)}")
    if count is not None:
        _require_at_most("count", count, PROCESSES_LIMIT)
    _ask(run_dir, SetWorkers(env=env, count=count))
    what = "inference servers" if env == FIRST else "workers"
    order = f"{env}: autoscaling" if count is None else f"{env}: pinned to {count} {what}"
    layout = RunLayout(run_dir)
    target = confirmed(layout, lambda report: _target_of(report, env, count))
    if target is None:
        return unconfirmed(layout, order)
    is_other = count is not None and target.target != count
    _say(f"{env}: {target.target} {what}, not {count}: {target.reason}" if is_other else order)
    return 0


def _require_at_most(name: str, value: int, limit: int) -> None:
    if abs(value) > limit:
        bound = f"must be at most {limit}" if value > 0 else f"must be at least {-limit}"
        raise ConfigError(name, f"{bound} (got {value})")


def _target_of(report: Supervision, env: str, count: int | None) -> Target | None:
    """Return the target of an environment, or of the engines, once it follows the pinned count."""
    targets = (*report.targets, report.engines) if report.engines is not None else report.targets
    return next((one for one in targets if one.env == env and one.wanted == count), None)


def _check_engines(config: RunConfig) -> None:
    if config.inference.kind == "external":
        raise ConfigError("inference.kind", "is `external`: this run does not start or stop that server")
    if config.inference.max_engines == 1:
        raise ConfigError("inference.max_engines", "is 1; raise it and restart the run")


def set_values(run_dir: Path, assignments: Sequence[str]) -> int:
    """Change settings of a running run, all or none; return the exit code. The orchestrator confirms bounds of workers.

    Raises:
        ConfigError: A setting is not changeable, or its value is invalid; nothing was changed.
    """
    values: dict[str, Setting] = {}
    for assignment in assignments:
        key, value = assigned(assignment)
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(key, "must be a number, a string, true or false")
        if key in values:
            raise ConfigError(key, "is given twice")
        if isinstance(value, int):
            _require_at_most(key, value, INTEGER_LIMIT)
        values[key] = str(value) if isinstance(value, str) else value
    reply = _ask(run_dir, SetValues(values=values))
    if isinstance(reply, ValueRefused):
        raise ConfigError(reply.key, reply.reason)
    assert isinstance(reply, ValuesSet)
    for key, value in reply.values.items():
        _say(f"{key} = {value}")
    layout, bounds = (
        RunLayout(run_dir),
        {key: one for key, one in reply.values.items() if split(key).of_orchestrator},
    )
    if bounds and not confirmed(layout, lambda report: bounds.items() <= report.settings.items() or None):
        return unconfirmed(layout, ", ".join(f"{key} = {one}" for key, one in bounds.items()))
    return 0


def report(run_dir: Path, *, as_json: bool, picture: Path | None = None, page: Path | None = None) -> int:
    """Print the result of a run and produced against trained groups; return the exit code. See `print_report`.

    Args:
        run_dir: The run directory.
        as_json: Print JSON.
        picture: File to draw the run to (.png), if any.
        page: File to write the page of the run to (.html), if any.
    """
    config, layout = read_run(run_dir)
    require_own_records(layout)
    if page is not None:
        from rolloutmq.services.dashboard.page.report import write_page

        write_page(run_dir, page)
    with reader_may_leave():
        print_report(config, layout, as_json=as_json, picture=picture)
    return 0


def _ask(run_dir: Path, request: Request) -> Reply:
    found = resolve_blocking(run_dir, ANSWER_S)
    with BlockingClient(found.serve, keys=keys_of(found)) as client:
        return client.request(request, ANSWER_S)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
