"""`rolloutmq workers`: state of every worker of a run, and the target counts."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import RunLayout, Supervision
from rolloutmq.schemas.printable import printable_lines
from rolloutmq.schemas.wire.control import GetStatus, StatusReply, WorkerStatus
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of
from rolloutmq.services.monitor.status import orchestrator_view
from rolloutmq.services.monitor.status.worker_view import (
    WorkerRow,
    fields,
    joined,
    slots_of,
    supervision_of,
    target_text,
    trouble_text,
    with_hangs,
)
from rolloutmq.services.monitor.text import format
from rolloutmq.services.monitor.text.exit_codes import FAILED, USAGE, complain, reader_may_leave
from rolloutmq.services.process.identity import alive

PATIENCE_S: Final = 3.0
"""Longest wait for the broker, which normally replies in milliseconds."""
HOST_CHARS: Final = 24
LEFT: Final = 3
"""Columns of text; the others are numbers."""
_HEAD: Final = (
    "worker",
    "state",
    "host",
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
    """Print the workers of a run; return the exit code. Blocks for at most six seconds."""
    layout = RunLayout(where)
    fate = fate_of(layout)
    if not where.is_dir():
        return complain(f"{where}: no run directory; start a run with `rolloutmq up CONFIG`", USAGE)
    known, heard = supervision_of(layout), _heard(layout)
    if known is None and heard is None and fate.life is not RunLiveness.ENDED:
        return complain(fate.say(layout), FAILED)
    heard_at = orchestrator_view.listen(layout, known)
    now, wall = time.monotonic(), time.time()
    rows = with_hangs(joined(known, heard, now, slots_of(layout)), layout)
    over = (
        [fate.say(layout)]
        if fate.life in {RunLiveness.ENDED, RunLiveness.DEAD} and not fate.elsewhere
        else []
    )
    if as_json:
        orchestrator = orchestrator_view.fields(layout, known, now, wall, heard_at)
        plain = {"orchestrator": orchestrator, **fields(known, rows)}
        text = msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()
    else:
        silent = orchestrator_view.problem(layout, known, now, wall, heard_at)
        over += [f"orchestrator: {silent}"] if silent else []
        mirrored = layout.connection.exists()
        is_over = fate.life is RunLiveness.ENDED
        lines = _table(rows) if is_over else _lines(known, heard, rows, is_mirrored=mirrored)
        text = "\n".join([*over, *lines])
    with reader_may_leave():
        sys.stdout.write(printable_lines(text) + "\n")
    return 0


def _lines(
    known: Supervision | None,
    heard: tuple[WorkerStatus, ...] | None,
    rows: Sequence[WorkerRow],
    *,
    is_mirrored: bool = False,
) -> list[str]:
    """Return targets and workers. Of a run of another host only the broker's view is known."""
    lines = []
    if known is None and not is_mirrored:
        lines.append("no orchestrator; these workers were started by hand")
    elif known is not None and not alive(known.orchestrator):
        lines.append(f"the orchestrator, process {known.orchestrator.pid}, is gone; its last report:")
    if heard is None:
        lines.append("the broker does not reply: the work of the workers is unknown")
    lines += [f"{one.env}: {target_text(one)}" for one in (known.targets if known is not None else ())]
    return [*lines, *_table(rows)]


def _table(rows: Sequence[WorkerRow]) -> list[str]:
    """Return a line for each worker, and the trouble of each that is unwell."""
    if not rows:
        return ["no workers"]
    lines: list[str] = []
    table = [_HEAD, *map(_cells, rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEAD))]
    for cells, row in zip(table, [None, *rows], strict=True):
        lines.append("  ".join(map(_placed, cells, widths, range(len(cells)))).rstrip())
        if row is not None and row.is_unwell:
            lines.append(f"    {trouble_text(row)}")
            lines += [f"    | {line}" for line in row.last_lines]
    return lines


def _placed(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < LEFT else cell.rjust(width)


def _cells(row: WorkerRow) -> tuple[str, ...]:
    return (
        row.worker,
        row.state,
        row.host[:HOST_CHARS] or "-",
        str(row.pid or "-"),
        "-" if row.age_s is None else format.clock(row.age_s),
        *("-" if count is None else str(count) for count in (row.in_hand, row.produced, row.abandoned)),
        "-" if row.blocked_s is None else f"{row.blocked_s:.0f} s",
        "-" if row.silent_s is None else f"{row.silent_s:.1f} s",
        str(row.crashes or "-"),
    )


def _heard(layout: RunLayout) -> tuple[WorkerStatus, ...] | None:
    """Ask the broker; None if it does not reply."""
    endpoints = endpoints_of(layout)
    if endpoints is None:
        return None
    try:
        with BlockingClient(endpoints.serve, keys=keys_of(endpoints)) as client:
            reply = client.request(GetStatus(), timeout_s=PATIENCE_S)
    except RolloutMQError:
        return None
    return reply.pressure.workers if isinstance(reply, StatusReply) else None
