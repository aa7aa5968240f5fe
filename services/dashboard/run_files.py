"""What the files of a run directory say beside its events, read at one moment for a page.

The directory may be anybody's, damaged, or gone: what cannot be read is named in `problems`, and the rest is shown.
Blocks on the disk for some milliseconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.rundir import read_run
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import GpuBook, InferenceAddress, RunLayout, Supervision
from rolloutmq.services.monitor.liveness import Fate, RunLiveness, fate_of
from rolloutmq.services.monitor.report.evaluation import NO_EVALUATIONS, Evaluations
from rolloutmq.services.monitor.report.history import ran_s
from rolloutmq.services.monitor.status import orchestrator_view, record_view, waits
from rolloutmq.services.monitor.status.ended import EndedFigures, read_summary
from rolloutmq.services.monitor.status.gpus import read_gpus, with_limits
from rolloutmq.services.monitor.status.worker_view import supervision_of

T = TypeVar("T")

REMOVED = "removed"
"""Life of a run whose directory is gone."""


@dataclass(frozen=True)
class RunFiles:
    """One reading.

    Attributes:
        life: A `RunLiveness`, or `REMOVED`.
        text: The fate of the run, as one line.
        ended: Why it ended; empty while it goes on.
        answers: Whether a broker may answer: events come, and the run can be changed.
        dead: Number of dead letters.
        problems: What cannot be read or does not work, by its name.
    """

    life: str
    text: str
    ended: str = ""
    answers: bool = False
    ran_s: float | None = None
    supervision: Supervision | None = None
    book: GpuBook = field(default_factory=GpuBook)
    engines: tuple[InferenceAddress, ...] = ()
    outside: str = ""
    unserved: str = ""
    evaluations: Evaluations = NO_EVALUATIONS
    summary: EndedFigures | None = None
    dead: int = 0
    problems: Mapping[str, str] = field(default_factory=dict)


def read_files(layout: RunLayout, now: float, wall: float, decided_at: float | None) -> RunFiles:
    """Read the files of a run once. Raises nothing of the file system.

    Args:
        layout: The run directory.
        now: CLOCK_MONOTONIC.
        wall: Seconds since the epoch.
        decided_at: When the orchestrator was heard last on the bus, on CLOCK_MONOTONIC.
    """
    if not layout.root.is_dir():
        return RunFiles(REMOVED, f"the run directory {layout.root} is gone")
    problems: dict[str, str] = {}

    def read(what: str, reads: Callable[[], T], without: T) -> T:
        try:
            return reads()
        except (OSError, RolloutMQError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            problems[what] = str(error)
            return without

    unknown = Fate(RunLiveness.ABSENT)
    fate = read("run directory", lambda: fate_of(layout), unknown)
    supervision = read("supervision", lambda: supervision_of(layout), None)
    answers = fate.life is RunLiveness.LIVING or fate.broker
    told = {
        "orchestrator": lambda: orchestrator_view.problem(layout, supervision, now, wall, decided_at),
        "record": lambda: record_view.problem(layout, now, wall),
    }
    for what, tells in told.items():
        if text := read(what, tells, ""):
            problems[what] = text
    return RunFiles(
        life=fate.life.value,
        text=fate.say(layout) if fate is not unknown else f"the files in {layout.root} cannot be read",
        ended="" if fate.life is RunLiveness.LIVING else fate.told,
        answers=answers,
        ran_s=read("lives", lambda: ran_s(layout, wall), None),
        supervision=supervision,
        book=with_limits(read("gpus", lambda: read_gpus(layout), GpuBook()), supervision),
        engines=read("engines", lambda: tuple(engines_of(layout)), ()) if answers else (),
        outside=read("trainer", lambda: waits.outside(layout), "") if answers else "",
        unserved=read("inference", lambda: waits.unserved(layout), "") if answers else "",
        evaluations=read("evaluations", lambda: Evaluations.read(layout), NO_EVALUATIONS),
        summary=None if answers else read("summary", lambda: _summary(layout), None),
        dead=read("dead letters", lambda: sum(1 for _ in layout.dead.glob("*.rmq")), 0),
        problems=problems,
    )


def read_config(root: Path) -> RunConfig | str:
    """Return the configuration of a run, or why it cannot be read."""
    try:
        return read_run(root)[0]
    except (RolloutMQError, ValueError, RecursionError) as error:
        return str(error)


def _summary(layout: RunLayout) -> EndedFigures | None:
    found: dict[str, Any] | None = read_summary(layout)
    return None if found is None else EndedFigures.of(found)
