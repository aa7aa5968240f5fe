"""Series read from `metrics.jsonl` in one pass, with the values of the summary and the report.

Staleness bounds come from the configuration until the broker reports the bound in force. The bound of a run is the
largest of its training environments.

Worker reports become marks while they are read. A worker was drained if it reported so. It was killed if another
process took its name, or if it fell silent without draining.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import SILENT_S, WorkerState
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.monitor.report.steps import Series, StepPoint, StepRecord
from rolloutmq.services.monitor.text.figures import of_step
from rolloutmq.services.monitor.text.jsonl import read_whole_lines


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
    reward: float = 0.0
    staleness_max: int = 0
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
    """One pressure message: queued batches, and workers by state."""

    t: float
    pressure: float
    ready: int
    draining: int


@dataclass(slots=True)
class Metrics:
    """Series of a run in order of arrival. Times are wall clock."""

    pressures: list[PressurePoint] = field(default_factory=list)
    steps: list[StepPoint] = field(default_factory=list)
    figures: Series = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
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
    damaged_lines: int = 0
    """Lines that do not decode, left out."""

    @property
    def span_s(self) -> float:
        """Return the seconds from the first line to the last."""
        return self.last_t - self.first_t

    def ready_counts(self, wanted: int = 1, until: float | None = None, since: float = 0.0) -> Sequence[int]:
        """Return the counts of ready workers up to `until`, from the first time that `wanted` workers were ready.

        If that many never were, start at the first time that any worker was ready; always after `since`.
        """
        begin, end = 0, len(self.pressures)
        if since:
            begin = bisect_left(self.pressures, since, key=lambda point: point.t)
        if until is not None:
            end = bisect_right(self.pressures, until, key=lambda point: point.t)
        counts = [point.ready for point in self.pressures[begin:end]]
        for enough in (max(1, wanted), 1):
            start = next((index for index, count in enumerate(counts) if count >= enough), None)
            if start is not None:
                return counts[start:]
        return []


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
    point = StepPoint(line.t, line.step, line.reward, line.staleness_max, line.tokens)
    if line.kind == "batch_settled" and line.stepped:
        steps.settled(version, point)
    elif line.kind == "step_done":
        steps.told(version, point, of_step(line.loss, line.extra))
    elif line.kind == "step_figures":
        steps.logged(version, line.t, line.figures)


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run; empty if there are none. Damaged lines are counted and left out."""
    metrics = Metrics()
    watch = WorkerWatch()
    steps = StepRecord()
    bounds: dict[str, int] = {}
    damaged: Counter[str] = Counter()
    for line in read_whole_lines(path, Line, damaged):
        metrics.first_t = metrics.first_t or line.t
        metrics.last_t = line.t
        if line.kind == "pressure":
            states = line.worker_states
            metrics.late_members = max(metrics.late_members, sum(line.late_members.values()))
            metrics.pressures.append(
                PressurePoint(
                    line.t,
                    line.rollout_pressure,
                    states.get(WorkerState.READY, 0),
                    states.get(WorkerState.DRAINING, 0),
                )
            )
            metrics.marks += watch.see(line.t, line.workers or ())
            metrics.bounds += _changes(line, bounds)
        elif line.kind == "curriculum":
            metrics.curricula[line.env] = line.curriculum()
        elif line.kind == "health_finding":
            metrics.findings.add(f"{line.env}.{line.finding}")
        else:
            _take_step(line, steps)
    metrics.steps, metrics.figures = steps.points(), steps.figures()
    metrics.damaged_lines = damaged.total()
    return metrics
