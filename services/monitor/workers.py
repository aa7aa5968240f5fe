"""`rolloutmq workers`: every worker of a run, how it does, and how many there should be."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.client import BlockingClient
from rolloutmq.schemas.control import GetStatus, StatusReply, WorkerStatus
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import Supervision
from rolloutmq.services.monitor import figures
from rolloutmq.services.monitor.crew import (
    WorkerRow,
    fields,
    joined,
    supervision_of,
    target_text,
    trouble_text,
)
from rolloutmq.services.monitor.exits import FAILED, USAGE, complain, reader_may_leave
from rolloutmq.services.monitor.life import Life, fate_of
from rolloutmq.services.orchestrator.identity import alive
from rolloutmq.services.telemetry.feed import endpoints_of

PATIENCE_S: Final = 3.0
"""A broker that lives answers in milliseconds."""
_HEAD: Final = (
    "worker",
    "state",
    "pid",
    "age",
    "in hand",
    "produced",
    "abandoned",
    "blocked",
    "silent",
    "crashes",
)


def workers(where: Path, as_json: bool) -> int:
    """Print the workers of a run; returns the exit code. Blocks for three seconds at most."""
    layout = RunLayout(where)
    fate = fate_of(layout)
    if not where.is_dir():
        return complain(f"{where} is no run directory", USAGE)
    known, heard = supervision_of(layout), _heard(layout)
    if known is None and heard is None:
        return complain(fate.say(layout), FAILED)
    rows = joined(known, heard, time.monotonic())
    over = [fate.say(layout)] if fate.life in {Life.ENDED, Life.DEAD} and not fate.elsewhere else []
    text = _json(known, rows) if as_json else "\n".join([*over, *_lines(known, heard, rows)])
    with reader_may_leave():
        sys.stdout.write(text + "\n")
    return 0


def _json(known: Supervision | None, rows: Sequence[WorkerRow]) -> str:
    return msgspec.json.format(msgspec.json.encode(fields(known, rows)), indent=2).decode()


def _lines(
    known: Supervision | None, heard: tuple[WorkerStatus, ...] | None, rows: Sequence[WorkerRow]
) -> list[str]:
    lines = []
    if known is None:
        lines.append("no orchestrator; these were started by others")
    elif not alive(known.orchestrator):
        lines.append(f"the orchestrator, process {known.orchestrator.pid}, is gone; it knew last:")
    if heard is None:
        lines.append("the broker does not answer: nothing is known of the work")
    lines += [f"{one.env}: {target_text(one)}" for one in (known.targets if known is not None else ())]
    if not rows:
        return [*lines, "no workers"]
    table = [_HEAD, *map(_cells, rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEAD))]
    for cells, row in zip(table, [None, *rows], strict=True):
        lines.append("  ".join(map(_placed, cells, widths, range(len(cells)))).rstrip())
        if row is not None and row.is_unwell:
            lines.append(f"    {trouble_text(row)}")
            lines += [f"    | {line}" for line in row.last_lines]
    return lines


def _placed(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)


def _cells(row: WorkerRow) -> tuple[str, ...]:
    return (
        row.worker,
        row.state,
        str(row.pid or "-"),
        "-" if row.age_s is None else figures.clock(row.age_s),
        *("-" if count is None else str(count) for count in (row.in_hand, row.produced, row.abandoned)),
        "-" if row.blocked_s is None else f"{row.blocked_s:.0f} s",
        "-" if row.silent_s is None else f"{row.silent_s:.1f} s",
        str(row.crashes or "-"),
    )


def _heard(layout: RunLayout) -> tuple[WorkerStatus, ...] | None:
    """Ask the broker; None if it does not answer."""
    endpoints = endpoints_of(layout)
    if endpoints is None:
        return None
    try:
        with BlockingClient(endpoints.serve) as client:
            reply = client.request(GetStatus(), timeout_s=PATIENCE_S)
    except RolloutMQError:
        return None
    return reply.pressure.workers if isinstance(reply, StatusReply) else None
