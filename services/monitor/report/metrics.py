"""Series read from `metrics.jsonl` in one pass, with the values of the summary and the report.

Their size is bounded for a run of any length: what is drawn is thinned, and what is counted is folded.

Staleness bounds come from the configuration until the broker reports the bound in force. The bound of a run is the
largest of its training environments.

Worker reports become marks while they are read. A worker was drained if it reported so. It was killed if another
process took its name, or if it fell silent without draining.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.statistics.series import Fold, Series
from rolloutmq.schemas.wire.control import SILENT_S, WorkerState
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.monitor.report.figure_course import FigureCourse
from rolloutmq.services.monitor.report.ready_counts import ReadyCounts
from rolloutmq.services.monitor.report.steps import StepRecord
from rolloutmq.services.monitor.text.figures import of_step
from rolloutmq.services.monitor.text.jsonl import read_whole_lines

PRESSURES_LIMIT: Final = 4096
"""Most points of the pressure: more than a picture has columns."""
MARKS_LIMIT: Final = 1000
"""Most marks; the newest are kept."""
WORKERS_LIMIT: Final = 16_384
"""Most workers whose state is remembered; the one met first is forgotten for a further one."""


class BoundChange(msgspec.Struct, frozen=True):
    """New bound of one environment, from a time on."""

    t: float
    env: str
    max_staleness: int


def configured_bounds(config: RunConfig) -> dict[str, int]:
    """Return the configured bounds of the training environments."""
    return {name: env.max_staleness for name, env in config.environment.items() if env.split == "train"}


def bounds_in_force(config: RunConfig, changes: Iterable[BoundChange]) -> list[tuple[float, int]]:
    """Return the largest bound over time, as (since, bound) in order; the configured bound since 0, if any."""
    bounds = configured_bounds(config)
    course = [(0.0, max(bounds.values()))] if bounds else []
    for change in changes:
        bounds[change.env] = change.max_staleness
        largest = max(bounds.values())
        if not course or course[-1][1] != largest:
            course.append((change.t, largest))
    return course


class Line(msgspec.Struct, frozen=True):
    """Fields of all lines, and of the kinds read here."""

    t: float
    kind: str = ""
    rollout_pressure: float = 0.0
    late_members: dict[str, int] = {}
    lanes: tuple["LaneLine", ...] = ()
    worker_states: dict[str, int] = {}
    workers: tuple["WorkerLine", ...] | None = None
    incarnation: int = 0
    step: int = 0
    tokens: int = 0
    stepped: bool = False
    loss: float | None = None
    extra: dict[str, float | None] = {}
    figures: dict[str, float] = {}
    env: str = ""
    sampler: str = ""
    drawn: int = 0
    outcomes: int = 0
    flat: int = 0
    failed: int = 0
    dropped: int = 0

    def curriculum(self) -> dict[str, int | str]:
        """Return the counts of a curriculum."""
        names = ("sampler", "drawn", "outcomes", "flat", "failed", "dropped")
        return {name: getattr(self, name) for name in names}

    finding: str = ""


class LaneLine(msgspec.Struct, frozen=True):
    """One lane of a pressure message."""

    env: str
    split: Split = Split.TRAIN
    max_staleness: int | None = None


class WorkerLine(msgspec.Struct, frozen=True):
    """One worker of a pressure message."""

    worker: str
    state: WorkerState
    pid: int
    silent_s: float = 0.0
    draining: bool = False


class MarkKind(StrEnum):
    """Kind of event in a worker's life."""

    DRAINED = "drained"
    KILLED = "killed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Mark:
    """Event in a worker's life, at a wall-clock time."""

    t: float
    kind: MarkKind
    worker: str


@dataclass(frozen=True, slots=True)
class PressurePoint:
    """Queued batches, and workers by state: of one pressure message, or of several in a long run."""

    t: float
    pressure: float
    ready: float
    draining: float


class PressureCourse:
    """The pressures of a run: mean values of ever longer times, so that there are at most `PRESSURES_LIMIT`."""

    def __init__(self) -> None:
        folds = {"pressure": Fold.MEAN, "ready": Fold.LAST, "draining": Fold.LAST}
        self._series = Series(folds, width_s=1e-3, limit=PRESSURES_LIMIT)

    def add(self, point: PressurePoint) -> None:
        """Take a point; they come in the order of time."""
        values = {"pressure": point.pressure, "ready": point.ready, "draining": point.draining}
        self._series.add(point.t, values, 1)

    def points(self) -> list[PressurePoint]:
        """Return the points; the time of one is the mean of its messages."""
        change = self._series.since(-1)
        rows = zip(*change.columns.values(), strict=True) if change is not None else ()
        return [PressurePoint(*(value or 0.0 for value in row)) for row in rows]


@dataclass(slots=True)
class Metrics:
    """Series of a run in order of arrival. Times are wall clock."""

    pressures: PressureCourse = field(default_factory=PressureCourse)
    ready: ReadyCounts = field(default_factory=ReadyCounts)
    """Numbers of ready workers."""
    steps: StepRecord = field(default_factory=StepRecord)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS_LIMIT))
    bounds: list[BoundChange] = field(default_factory=list)
    """Staleness bounds reported by the broker, and their changes."""
    findings: set[str] = field(default_factory=set)
    """Findings about rewards, as `environment.finding`."""
    first_t: float = 0.0
    last_t: float = 0.0
    late_members: int = 0
    """Sequences missing from groups closed at their deadline; the maximum over the lives of the broker."""

    curricula: dict[str, dict[str, int | str]] = field(default_factory=dict)
    """Last recorded counts of each curriculum, by environment."""

    @property
    def span_s(self) -> float:
        """Return the seconds from the first line to the last."""
        return self.last_t - self.first_t

    @property
    def figures(self) -> dict[str, FigureCourse]:
        """The course of each figure of learning."""
        return self.steps.figures()


@dataclass(slots=True)
class WorkerWatch:
    """Last known state of each worker; returns a mark for each change."""

    _pids: dict[str, int] = field(default_factory=dict)
    _over: dict[str, MarkKind] = field(default_factory=dict)

    def see(self, t: float, workers: Iterable[WorkerLine]) -> list[Mark]:
        """Apply one report. A worker missing from it is unknown, not gone: the broker may have restarted."""
        marks = []
        for worker in workers:
            name = worker.worker
            if name not in self._pids and len(self._pids) >= WORKERS_LIMIT:
                self._forget_oldest()
            other = self._pids.setdefault(name, worker.pid) != worker.pid
            if other:
                self._pids[name] = worker.pid
                if self._over.pop(name, None) is None:
                    marks.append(Mark(t, MarkKind.KILLED, name))
            kind = _end_of(worker)
            if kind is not None and name not in self._over:
                self._over[name] = kind
                marks.append(Mark(t - min(worker.silent_s, t), kind, name))
        return marks

    def _forget_oldest(self) -> None:
        oldest = next(iter(self._pids))
        del self._pids[oldest]
        self._over.pop(oldest, None)


def _end_of(worker: WorkerLine) -> MarkKind | None:
    match worker.state:
        case WorkerState.FAILED:
            return MarkKind.FAILED
        case WorkerState.DRAINING | WorkerState.GONE:
            return MarkKind.DRAINED
        case WorkerState.STARTING:
            return MarkKind.DRAINED if worker.draining else None
        case WorkerState.READY:
            if worker.draining:
                return MarkKind.DRAINED
            return MarkKind.KILLED if worker.silent_s > SILENT_S else None


def _changes(line: Line, bounds: dict[str, int]) -> list[BoundChange]:
    """Return the changed bounds, and remember them."""
    current = {
        x.env: x.max_staleness for x in line.lanes if x.split is Split.TRAIN and x.max_staleness is not None
    }
    found = [BoundChange(line.t, env, bound) for env, bound in current.items() if bounds.get(env) != bound]
    bounds |= current
    return found


def _take_step(line: Line, steps: StepRecord) -> None:
    """Take a line that may be about a step."""
    version = PolicyVersion(line.incarnation, line.step)
    if line.kind == "batch_settled" and line.stepped:
        steps.settled(version, line.tokens)
    elif line.kind == "step_done":
        steps.told(version, line.t, line.tokens, of_step(line.loss, line.extra))
    elif line.kind == "step_figures":
        steps.logged(version, line.t, line.figures)


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run; empty if there are none. Blocks on the disk.

    A line that does not decode is left out; `damaged_lines` of the page's record counts them.
    """
    metrics = Metrics()
    watch = WorkerWatch()
    bounds: dict[str, int] = {}
    for line in read_whole_lines(path, Line, Counter()):
        metrics.first_t = metrics.first_t or line.t
        metrics.last_t = line.t
        if line.kind == "pressure":
            _take_pressure(line, metrics)
            metrics.marks += watch.see(line.t, line.workers or ())
            metrics.bounds += _changes(line, bounds)
        elif line.kind == "curriculum":
            metrics.curricula[line.env] = line.curriculum()
        elif line.kind == "health_finding":
            metrics.findings.add(f"{line.env}.{line.finding}")
        else:
            _take_step(line, metrics.steps)
    return metrics


def _take_pressure(line: Line, metrics: Metrics) -> None:
    states = line.worker_states
    ready, draining = states.get(WorkerState.READY, 0), states.get(WorkerState.DRAINING, 0)
    metrics.late_members = max(metrics.late_members, sum(line.late_members.values()))
    metrics.pressures.add(PressurePoint(line.t, line.rollout_pressure, ready, draining))
    metrics.ready.add(line.t, ready)
