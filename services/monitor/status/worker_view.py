"""The workers of a run: a join of the orchestrator's and the broker's view. Pure, except for reading files of the run
directory and the pids of this host.

The orchestrator knows the process: phase, reason of a failure, next start, last log lines. The broker knows the work:
running rollouts, produced groups, silence. Only the orchestrator knows a worker it has given up. Only the broker knows
a worker that it did not start.
"""

import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from rolloutmq.bus.rundir import read_json, read_run
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import RunLayout, Supervision, Target, WorkerRecord
from rolloutmq.schemas.printable import printable, shell_word
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import SILENT, SILENT_S, WorkerState, WorkerStatus
from rolloutmq.services.orchestrator.supervision.core import Phase
from rolloutmq.services.process.identity import boot_id, runs
from rolloutmq.services.process.stacks import hang_of

ABANDONS_S: Final = 30.0
"""Time before the end of a drain from which its unfinished rollouts are trouble."""
REASON_CHARS: Final = 300
_UNWELL: Final = frozenset({Phase.WAITING.value, Phase.FATAL.value, WorkerState.FAILED.value, SILENT})
_UP: Final = frozenset({Phase.RUNNING.value, WorkerState.STARTING.value})
"""States of a process that is not known to be ready."""
_LIFE: Final = (Phase.WAITING.value, *WorkerState, SILENT, Phase.STOPPING.value, Phase.FATAL.value)
"""States in the order in which a worker has them; others come last."""
_REPORTED: Final = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING})
"""States that only the worker's heartbeat confirms."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. None means unknown.

    Attributes:
        state: State reported by the worker, else `waiting` for its next start, `stopping` or `fatal`; `silent` if it
            was ready and the broker hears it no more; `running` if no broker replies; `gone` if its process has ended
            and the orchestrator has not reported it.
        age_s: Seconds since the start of its process.
        phase_s: Seconds in its phase of supervision.
        blocked_s: Seconds of its life that a rollout slot waited for credit or a submitted task, on average.
        crashes: Crashes in a row, without being ready for `orchestrator.stable_s` in between.
        next_start_s: Seconds until its next start, or until a given-up worker is replaced.
        reason: Why it is not up, or its last error.
        ends_s: Seconds until its drain ends, which abandons unfinished rollouts.
        hang: What holds its event loop while it is silent; empty if nothing is known.
        host: Host of its process, as it told; empty if it was not heard.
        node: Id of its node on a cluster; empty for none.
    """

    worker: str
    env: str
    state: str
    pid: int = 0
    age_s: float | None = None
    phase_s: float | None = None
    in_hand: int | None = None
    produced: int | None = None
    abandoned: int | None = None
    blocked_s: float | None = None
    silent_s: float | None = None
    crashes: int = 0
    restarts: int = 0
    next_start_s: float | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    ends_s: float | None = None
    hang: str = ""
    host: str = ""
    node: str = ""

    @property
    def is_unwell(self) -> bool:
        """Return whether the worker needs attention."""
        return self.state in _UNWELL or self.starts_again or self.is_silent or self.abandons

    @property
    def is_silent(self) -> bool:
        """Return whether its heartbeat is overdue."""
        return (self.silent_s or 0.0) > SILENT_S

    @property
    def counts_as(self) -> str:
        """Return the state under which it is counted, see `WorkerStatus.counts_as`."""
        return SILENT if self.is_silent and self.state in _REPORTED else self.state

    @property
    def starts_again(self) -> bool:
        """Return whether its process was started after a crash and is not ready yet."""
        return self.state in _UP and self.crashes > 0

    @property
    def abandons(self) -> bool:
        """Return whether it is about to abandon rollouts."""
        return bool(self.in_hand) and self.ends_s is not None and self.ends_s <= ABANDONS_S


def supervision_of(layout: RunLayout) -> Supervision | None:
    """Return the orchestrator's last report; None if there was none since boot."""
    try:
        found = read_json(layout.supervision, Supervision)
    except (msgspec.DecodeError, NotADirectoryError):
        return None
    return found if found is not None and found.orchestrator.boot_id == boot_id() else None


def slots_of(layout: RunLayout) -> dict[str, int]:
    """Return the rollout slots of a worker, by environment; empty if the configuration cannot be read."""
    try:
        config, _ = read_run(layout.root)
    except RolloutMQError:
        return {}
    return {name: env.concurrency for name, env in config.environment.items()}


def joined(
    known: Supervision | None,
    heard: Iterable[WorkerStatus] | None,
    now: float,
    slots: Mapping[str, int] = MappingProxyType({}),
) -> list[WorkerRow]:
    """Return a row for each worker that has not gone, by environment and number.

    A failed worker that the orchestrator of its environment no longer knows was replaced.

    Args:
        known: The orchestrator's view.
        heard: The broker's view; None if it does not reply, which leaves the state of running workers unknown.
        now: CLOCK_MONOTONIC.
        slots: Rollout slots of a worker, by environment; 1 where it is not known.
    """
    heard = None if heard is None else [_per_slot(status, slots.get(status.env, 1)) for status in heard]
    statuses = {status.worker: status for status in heard or ()}
    rows = []
    for record in known.workers if known is not None else ():
        status = statuses.get(record.worker)
        if status is not None and record.pid not in {0, status.pid}:
            status = None
        if known is not None and _has_died(record, status, known.orchestrator):
            rows.append(_gone(record))
        elif status is not None:
            rows.append(_row(record, status, now))
        elif heard is None and record.phase == Phase.RUNNING:
            rows.append(msgspec.structs.replace(_row(record, None, now), state=Phase.RUNNING.value))
        else:
            rows.append(_row(record, None, now))
        statuses.pop(record.worker, None)
    supervised = {target.env for target in known.targets} if known is not None else set()
    for status in statuses.values():
        is_replaced = status.state is WorkerState.FAILED and status.env in supervised
        if not _has_ended(status) and not is_replaced:
            rows.append(_unsupervised(status))
    return sorted(rows, key=lambda row: by_number(row.worker))


def with_hangs(rows: Iterable[WorkerRow], layout: RunLayout) -> list[WorkerRow]:
    """Return the rows; those of silent workers with what holds their event loop, as the run directory says."""
    return [msgspec.structs.replace(row, hang=_hang(row, layout)) for row in rows]


def _hang(row: WorkerRow, layout: RunLayout) -> str:
    hang = hang_of(layout, row.worker, row.pid) if row.is_silent else None
    return "" if hang is None else printable(hang.text)


def counted(rows: Iterable[WorkerRow]) -> Counter[str]:
    """Return the number of workers by state; every view and every reason counts them by this rule."""
    return Counter(row.counts_as for row in rows)


def still_given_up(known: Mapping[str, str], rows: Sequence[WorkerRow], layout: RunLayout) -> dict[str, str]:
    """Return why each environment has no worker any more, and where to look; until a worker of it works again.

    Args:
        known: The environments that had none, and what was said of them.
        rows: The workers.
        layout: Run directory.
    """
    staffed = {row.env for row in rows if row.state != Phase.FATAL}
    working = {row.env for row in rows if row.produced and row.state != Phase.FATAL}
    run = shell_word(layout.root)
    found = {
        row.env: f"environment {row.env} has no worker any more: {row.reason[:REASON_CHARS]}; "
        f"see `rolloutmq workers {run}` and `rolloutmq report {run}`"
        for row in rows
        if row.env not in staffed
    }
    return {**found, **{env: text for env, text in known.items() if env not in working}}


def in_order(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the number and the name of each state with workers, in the order of a worker's life."""
    states = sorted(counts, key=lambda state: _LIFE.index(state) if state in _LIFE else len(_LIFE))
    return [(str(counts[state]), str(state)) for state in states if counts[state]]


def fields(known: Supervision | None, rows: Sequence[WorkerRow]) -> dict[str, Any]:
    """Return workers and targets as JSON objects."""
    return {
        "targets": msgspec.to_builtins(known.targets if known is not None else ()),
        "workers": msgspec.to_builtins(rows),
    }


def target_text(target: Target) -> str:
    """Return target and current count of an environment, and the reason."""
    others = f", {target.joined} of them joined by themselves" if target.joined else ""
    return f"target {target.target}, current {target.current}{others}; {target.reason}"


def trouble_text(row: WorkerRow) -> str:
    """Return the trouble of a worker as one line."""
    if row.state not in _UNWELL and not row.starts_again and row.is_silent:
        return f"silent for {row.silent_s or 0.0:.0f} s{f': {row.hang}' if row.hang else ''}"
    if row.abandons:
        return (
            f"draining for {row.phase_s or 0.0:.0f} s; {row.in_hand} rollouts are abandoned within "
            f"{row.ends_s or 0.0:.0f} s unless they finish"
        )
    parts = [row.state]
    if row.next_start_s is not None:
        what = "replaced" if row.state == Phase.FATAL else "restart"
        parts.append(f"{what} in {row.next_start_s:.0f} s")
    if row.crashes and row.state != Phase.FATAL:
        parts.append(f"after crash {row.crashes} in a row")
    if row.reason:
        parts.append(row.reason[:REASON_CHARS])
    return "; ".join(parts)


def _per_slot(status: WorkerStatus, slots: int) -> WorkerStatus:
    """Return the status with the mean wait of a slot: the sum exceeds the age of the process."""
    return msgspec.structs.replace(status, blocked_s=status.blocked_s / slots)


def _row(record: WorkerRecord, status: WorkerStatus | None, now: float) -> WorkerRow:
    row = WorkerRow(
        worker=record.worker,
        env=record.env,
        state=_state(record, status),
        pid=record.pid,
        age_s=None if record.started is None else max(0.0, now - record.started),
        phase_s=max(0.0, now - record.since),
        crashes=record.crashes,
        restarts=record.restarts,
        next_start_s=None if record.due is None else max(0.0, record.due - now),
        reason=printable(record.reason),
        last_lines=tuple(map(printable, record.last_lines)),
        ends_s=None if record.ends is None else max(0.0, record.ends - now),
        host=printable(record.host),
        node=printable(record.node),
    )
    return row if status is None else _with_work(row, status, is_living=record.pid > 0)


def _has_died(record: WorkerRecord, status: WorkerStatus | None, orchestrator: ProcessIdentity) -> bool:
    """Return whether the process of a worker has ended, unreported: the report may be old, or the last of a run.

    Of one on another node only its orchestrator knows; without that one the report is old.
    """
    is_heard = status is not None and status.silent_s <= SILENT_S
    if record.node:
        return not is_heard and not runs(orchestrator.pid, orchestrator.start_ticks)
    return bool(record.start_ticks) and not is_heard and not runs(record.pid, record.start_ticks)


def _gone(record: WorkerRecord) -> WorkerRow:
    return WorkerRow(
        worker=record.worker,
        env=record.env,
        state=WorkerState.GONE,
        pid=record.pid,
        crashes=record.crashes,
        restarts=record.restarts,
        reason="its process has ended; the orchestrator has not reported how",
    )


def _state(record: WorkerRecord, status: WorkerStatus | None) -> str:
    if record.phase not in {Phase.RUNNING, Phase.STOPPING}:
        return record.phase
    if status is None:
        if record.phase == Phase.STOPPING:
            return Phase.STOPPING
        return SILENT if record.ready else WorkerState.STARTING  # the broker forgets who hangs for minutes
    if record.phase == Phase.STOPPING and status.state is not WorkerState.DRAINING:
        return Phase.STOPPING
    return _said(status)


def _said(status: WorkerStatus) -> str:
    draining = status.draining and status.state is WorkerState.READY
    return WorkerState.DRAINING if draining else status.state.value


def _with_work(row: WorkerRow, status: WorkerStatus, *, is_living: bool) -> WorkerRow:
    error = printable(status.error)
    return msgspec.structs.replace(
        row,
        in_hand=status.in_hand if is_living else 0,
        produced=status.produced,
        abandoned=status.abandoned,
        blocked_s=status.blocked_s,
        silent_s=status.silent_s if is_living else None,
        reason=(error or row.reason) if is_living else (row.reason or error),
        host=printable(status.host) or row.host,
    )


def _has_ended(status: WorkerStatus) -> bool:
    """Return whether a worker signed off; or was killed on this host, of which the broker hears nothing."""
    if status.state is WorkerState.GONE:
        return True
    return status.is_silent and status.host == socket.gethostname() and not runs(status.pid)


def _unsupervised(status: WorkerStatus) -> WorkerRow:
    row = WorkerRow(worker=status.worker, env=status.env, state=_said(status), pid=status.pid)
    return _with_work(row, status, is_living=True)


def by_number(worker: str) -> list[tuple[int, str]]:
    """Return the sort key of a name, with numbers by value: `w-2` before `w-10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", worker)]
