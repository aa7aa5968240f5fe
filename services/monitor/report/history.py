"""The history of a run for a view that is attached later: when it began, and what `metrics.jsonl` recorded of training.

Without it a view would begin with its first event. Samples of the machine and the state of the queue are left out: new
ones come within a second. Lines that do not decode are passed over; `report` names damage.
"""

import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.bus.files import open_regular
from rolloutmq.bus.rundir import read_lives
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import Life, seconds_of
from rolloutmq.schemas.wire.control import StepDone
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.telemetry import CurriculumProgress
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of
from rolloutmq.services.monitor.report.waited import WaitedLives
from rolloutmq.services.process.run_lives import ended_lives, last_written

Recalled = StepDone | BatchSettled | StepFigures | EvaluationDone | HealthFinding | CurriculumProgress
"""Events of the history."""
KINDS: Final = tuple(
    f'"kind":"{kind}"'.encode()
    for kind in (
        *("step_done", "batch_settled", "step_figures"),
        *("evaluation_done", "health_finding", "curriculum"),
    )
)
HEAD_BYTES: Final = 512
"""Beginning of a line that has its kind: a topic has at most 256 bytes."""
LIFE: Final = re.compile(rb'"kind":"pressure","epoch":(\d{1,19})\b')
"""The life of the broker, in a line of its state."""
KEPT: Final = 4096
"""Most events of a kind that a history has: a view shows the rewards of as many steps, and the last of all else."""
MOMENTARY: Final = frozenset({"held", "rater_silent", "raters_missing", "window_restarted"})
"""Findings that nothing ends: most are about one group."""


class _Waits(msgspec.Struct):
    """The waits of a line of the broker's state."""

    epoch: int = 0
    starved_s: float = 0.0
    trainer_waits_s: dict[str, float] = {}
    producer_waits_s: dict[str, float] = {}


class _Line(msgspec.Struct):
    """The time of a line, and the figures of a step: JSON has no NaN, and says null."""

    t: float
    loss: float | None = None
    extra: dict[str, float | None] | None = None


class Event(NamedTuple):
    """A recorded event, and its wall clock."""

    at: float
    event: Recalled


def events(path: Path, waits: WaitedLives | None = None) -> Iterator[Event]:
    """Yield the events of training that `metrics.jsonl` has, in order; nothing without it. Blocks on the disk.

    Args:
        path: The record.
        waits: Gets the waits of each life of the broker; they are whole once all events were taken.
    """
    try:
        record = open_regular(path)
    except FileNotFoundError:
        return
    last: dict[bytes, bytes] = {}
    with record:
        for line in record:
            head = line[:HEAD_BYTES]
            if any(kind in head for kind in KINDS):
                if (found := decoded(line)) is not None:
                    yield found
            elif waits is not None and (life := LIFE.search(head)) is not None:
                last[life[1]] = line  # only the last one of a life is decoded: there may be thousands
    if waits is not None:
        for line in last.values():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                waits.take(msgspec.json.decode(line, type=_Waits))


def decoded(line: bytes) -> Event | None:
    """Return the event of a line; None if it has none of the history, or does not decode."""
    try:
        known = msgspec.json.decode(line, type=_Line)
        fields = msgspec.json.decode(line, type=dict[str, Any])
        for name in ("t", "topic", "trimmed"):
            fields.pop(name, None)
        if fields.get("kind") == "step_done":
            fields |= _with_nan(known)
        return Event(known.t, msgspec.convert(fields, Recalled))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _with_nan(line: _Line) -> dict[str, Any]:
    """Return the figures of a step as they were."""
    extra = {name: value for name, value in (line.extra or {}).items() if value is not None}
    return {"loss": nan if line.loss is None else line.loss, "extra": extra}


def lives_at(layout: RunLayout, wall: float) -> list[Life]:
    """Return the lives of a run, each with its end; that of a run that goes on ends at `wall`. Blocks on the disk.

    A run of another host has no record of its lives here: it counts from when its address was written.
    """
    fate = fate_of(layout)
    goes_on = fate.life is RunLiveness.LIVING or (fate.broker and not fate.elsewhere)
    lives = ended_lives(layout) if not goes_on else [*read_lives(layout)]
    if not lives:
        with contextlib.suppress(OSError):
            lives = [Life(layout.endpoints.stat().st_mtime)]
    end = wall if goes_on else last_written(layout)
    return [life if life.ended is not None else Life(life.began, max(life.began, end)) for life in lives]


def ran_s(layout: RunLayout, wall: float) -> float | None:
    """Return the seconds that a run has run, its lives together; None if nothing of it has been recorded."""
    lives = lives_at(layout, wall)
    return seconds_of(lives, wall) if lives else None


class History(NamedTuple):
    """What a view begins with.

    Attributes:
        ran_s: Seconds that the run has run, at the time `wall`; None if unknown.
        wall: Wall clock of the reading.
        events: Events in order; of each kind the last `KEPT`.
        waits: Waits of each life of the broker; None if they were not read.
    """

    ran_s: float | None
    wall: float
    events: tuple[Event, ...]
    waits: WaitedLives | None = None


def read_history(layout: RunLayout) -> History:
    """Read the history of a run, and keep the last events of each kind. Blocks: several seconds for 100 MB."""
    tails: dict[type[Recalled], deque[tuple[int, Event]]] = {}
    waits = WaitedLives()
    for numbered in enumerate(events(layout.metrics, waits)):
        tails.setdefault(type(numbered[1].event), deque(maxlen=KEPT)).append(numbered)
    wall = time.time()
    in_order = sorted(chain.from_iterable(tails.values()), key=itemgetter(0))
    return History(ran_s(layout, wall), wall, tuple(event for _, event in in_order), waits)
