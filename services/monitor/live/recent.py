"""The state of a run at once, without waiting for its next events: for `rolloutmq top --once`.

The broker's reply has the queues and the workers. The end of `metrics.jsonl` has the rest: samples of the last seconds,
steps, findings. Where steps take minutes, the last ones are far before the end, behind thousands of samples: there the
lines are searched for them, in blocks and up to a limit, so a long run takes no longer.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec

from rolloutmq.bus.files import open_regular
from rolloutmq.schemas.files import DroppedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.wire.control import Pressure, StatusReply
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.schemas.wire.training import BatchSettled
from rolloutmq.services.monitor.live.run_state import GroupEnd, RunState
from rolloutmq.services.monitor.report.history import decoded, ran_s
from rolloutmq.services.monitor.status.lately import blocks_before

END_BYTES: Final = 2 << 20
"""End of the metrics that is read."""
STEPS: Final = 10
"""Steps that the views take a mean of; with as many, and a point of the evaluation, the search ends."""
GROUPS_BYTES: Final = 128 << 10
"""End of a log of groups that is read."""
GROUPS_KEPT: Final = 200
MOMENTARY_S: Final = 60.0
"""Age from which a sample says nothing of now; steps, findings and points of the evaluation last."""
_MOMENTARY: Final = frozenset(
    {"host_sample", "gpu_sample", "gpu_absence", "process_sample", "engine_sample", "latency_sample"}
)
_STEPS: Final = (b"step_done", b"batch_settled")
_EVALUATION: Final = b"evaluation_done"
_LASTS: Final = re.compile(
    rb'"kind":"('
    + b"|".join((*_STEPS, _EVALUATION, b"step_figures", b"curriculum_progress", b"health_finding"))
    + b')"'
)
"""Kinds of events that show the state of now until the next one comes."""


class _Head(msgspec.Struct):
    """Time and kind of a line."""

    t: float
    kind: str


def fill(board: RunState, layout: RunLayout, reply: StatusReply, now: float, wall: float) -> None:
    """Bring a new state up to date. Blocks on the disk, for milliseconds.

    Args:
        board: State without events.
        layout: Files of the run.
        reply: The broker's state.
        now: CLOCK_MONOTONIC.
        wall: Seconds since the epoch.
    """
    if (ran := ran_s(layout, wall)) is not None:
        board.started_at = now - ran
    for at, event in _events(_read(layout.metrics), wall):
        board.feed(event, now - max(0.0, wall - at))
    if board.step is None:  # nobody records the events of a broker that was started by hand
        for batch in _batches(layout, reply.run):
            board.feed(batch, now - max(0.0, wall - batch.at))
    board.feed(reply.pressure, now)
    board.total_steps = board.total_steps or reply.total_steps


def _read(path: Path) -> Iterator[bytes]:
    """Yield the lines that may count: those before the end that last, and all of the end."""
    end = end_of(path, END_BYTES)
    found = [one[1] for one in _LASTS.finditer(end)]
    steps, points = sum(found.count(kind) for kind in _STEPS), found.count(_EVALUATION)
    before: list[bytes] = []
    for block in blocks_before(path, len(end)):
        if steps >= STEPS and points:
            break
        lasting: list[bytes] = []
        for one in _LASTS.finditer(block):
            steps, points = steps + (one[1] in _STEPS), points + (one[1] == _EVALUATION)
            start, stop = block.rfind(b"\n", 0, one.start()) + 1, block.find(b"\n", one.end())
            lasting.append(block[start : stop if stop >= 0 else None])
        before = lasting + before
    yield from before
    yield from end.splitlines()


def _events(lines: Iterator[bytes], wall: float) -> Iterator[tuple[float, Event]]:
    """Yield the recorded events that still count; lines that do not decode are passed over."""
    for line in lines:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            head = msgspec.json.decode(line, type=_Head)
            if head.kind == "pressure" or (head.kind in _MOMENTARY and wall - head.t > MOMENTARY_S):
                continue
            if (known := decoded(line)) is not None:
                yield known.at, known.event
                continue
            fields = msgspec.json.decode(line, type=dict[str, Any])
            for name in ("t", "topic", "trimmed"):
                fields.pop(name, None)
            event: Event = msgspec.convert(fields, Event)
            if not isinstance(event, Pressure):
                yield head.t, event


def _batches(layout: RunLayout, run: str) -> Iterator[BatchSettled]:
    """Yield the last batches as the broker logs them, which counts neither sequences nor tokens."""
    for one in _records(layout.settled, SettledBatch):
        yield BatchSettled(
            run=run,
            incarnation=one.version.incarnation,
            step=one.version.step,
            at=one.at,
            stepped=bool(one.trained),
            reward=fmean(one.rewards) if one.rewards else 0.0,
            sequences=0,
            tokens=0,
            trained=len(one.trained),
            filtered=len(one.filtered),
            rejected=len(one.rejected),
            staleness_max=max(one.staleness, default=0),
            staleness_mean=fmean(one.staleness) if one.staleness else 0.0,
        )


def recent_groups(layout: RunLayout) -> list[GroupEnd]:
    """Return the groups that were settled or dropped last, the newest first. Blocks on the disk, for milliseconds."""
    settled = _settled(layout.trained) or _settled(layout.settled)
    dropped = [
        GroupEnd(one.group_id, f"{one.state} ({one.reason})", one.at)
        for one in _records(layout.dropped, DroppedGroup)
    ]
    return sorted(chain(settled, dropped), key=lambda one: -one.at)[:GROUPS_KEPT]


def _settled(path: Path) -> list[GroupEnd]:
    return [
        GroupEnd(group_id, outcome, batch.at)
        for batch in _records(path, SettledBatch)
        for outcome in ("trained", "filtered", "rejected")
        for group_id in getattr(batch, outcome)
    ]


def _records(path: Path, kind: type[Any]) -> Iterator[Any]:
    """Yield the last records of a log; lines that do not decode are passed over."""
    decoder = msgspec.json.Decoder(kind)
    for line in end_of(path, GROUPS_BYTES).splitlines():
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield decoder.decode(line)


def end_of(path: Path, limit: int) -> bytes:
    """Return the end of a file from the beginning of a line; nothing if it cannot be read."""
    try:
        with open_regular(path) as file:
            if (size := file.seek(0, os.SEEK_END)) > limit:
                file.seek(size - limit)
                file.readline()  # the rest of a cut line
            else:
                file.seek(0)
            return file.read(limit)
    except OSError:
        return b""
