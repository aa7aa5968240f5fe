"""Series out of `metrics.jsonl`, read in one pass; only what a summary or a picture shows is kept.

What the broker said of the workers is turned into marks as it is read: a worker was drained when it said so, and was
killed when another process took its name, or when it fell silent, without having been drained.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.schemas.control import WorkerState
from rolloutmq.schemas.envelope import Split
from rolloutmq.services.monitor.bounds import BoundChange
from rolloutmq.services.monitor.lines import read_lines

SILENT_S: Final = 3.0
"""A worker speaks once a second; after this much silence it is taken for dead."""


class Line(msgspec.Struct, frozen=True):
    """What every line has, and the fields of the kinds that are read."""

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


class LaneLine(msgspec.Struct, frozen=True):
    """One queue in a pressure."""

    env: str
    split: Split = Split.TRAIN
    max_staleness: int | None = None


class WorkerLine(msgspec.Struct, frozen=True):
    """One worker in a pressure."""

    worker: str
    state: WorkerState
    pid: int
    silent_s: float = 0.0
    draining: bool = False


class MarkKind(StrEnum):
    """What happened to a worker."""

    DRAINED = "drained"
    KILLED = "killed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a worker, at a wall-clock time."""

    t: float
    kind: MarkKind
    worker: str


@dataclass(frozen=True, slots=True)
class PressurePoint:
    """One pressure: queued batches, and workers by what they do."""

    t: float
    pressure: float
    ready: int
    draining: int


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One published step."""

    t: float
    step: int
    reward: float
    staleness_max: int
    tokens: int


@dataclass(slots=True)
class Metrics:
    """Series of a run, in the order of their arrival. Times are wall clock."""

    pressures: list[PressurePoint] = field(default_factory=list)
    steps: list[StepPoint] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    bounds: list[BoundChange] = field(default_factory=list)
    """What bounds of staleness the broker had for its environments, with those that changed."""
    first_t: float = 0.0
    last_t: float = 0.0
    late_members: int = 0
    """Sequences that groups were closed without; the most that one life of the broker has counted."""

    @property
    def span_s(self) -> float:
        """Seconds from the first line to the last."""
        return self.last_t - self.first_t

    def ready_counts(self, wanted: int = 1, until: float | None = None) -> Sequence[int]:
        """Return how many workers were ready, from the first time that so many were, up to `until`.

        If there never were so many, from the first time that any was.
        """
        end = len(self.pressures)
        if until is not None:
            end = bisect_right(self.pressures, until, key=lambda point: point.t)
        counts = [point.ready for point in self.pressures[:end]]
        for enough in (max(1, wanted), 1):
            start = next((index for index, count in enumerate(counts) if count >= enough), None)
            if start is not None:
                return counts[start:]
        return []


@dataclass(slots=True)
class WorkerWatch:
    """What was last known of each worker; gives a mark when something happened to it."""

    _pids: dict[str, int] = field(default_factory=dict)
    _over: dict[str, MarkKind] = field(default_factory=dict)

    def see(self, t: float, workers: Iterable[WorkerLine]) -> list[Mark]:
        """Take one report. A worker that is not in it is unknown, not gone: the broker may be new."""
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
    """Return the bounds that are other than before, and note them."""
    told = {
        x.env: x.max_staleness for x in line.lanes if x.split is Split.TRAIN and x.max_staleness is not None
    }
    found = [BoundChange(line.t, env, bound) for env, bound in told.items() if bounds.get(env) != bound]
    bounds |= told
    return found


def read_metrics(path: Path) -> Metrics:
    """Read the record of a run; empty if there is none.

    Raises:
        DamagedFileError: A line in the middle does not decode.
    """
    metrics = Metrics()
    watch = WorkerWatch()
    taken: set[tuple[int, int]] = set()
    bounds: dict[str, int] = {}
    for line in read_lines(path, Line):
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
        elif line.kind == "step_done" and (line.incarnation, line.step) not in taken:
            taken.add((line.incarnation, line.step))
            metrics.steps.append(StepPoint(line.t, line.step, line.reward, line.staleness_max, line.tokens))
    return metrics
