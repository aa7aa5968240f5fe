"""All metrics of a run: events in, families out. Pure.

The page is bounded by the bounds of its labels. Each event costs little: sums are written out once a page.
"""

from collections import Counter
from dataclasses import dataclass, fields
from typing import Final

from rolloutmq.schemas.wire.control import Pressure, ScaleDecision, StepDone
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.schemas.wire.hardware import GpuStanding
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.latency import LatencySample
from rolloutmq.schemas.wire.telemetry import (
    CurriculumProgress,
    EngineDecision,
    EngineSample,
    Event,
    GpuAbsence,
    GpuSample,
    HostSample,
    ProcessSample,
)
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.telemetry.export.prometheus.bounds import Bounds
from rolloutmq.services.telemetry.export.prometheus.families import Families
from rolloutmq.services.telemetry.export.prometheus.latencies import LatencyMetrics
from rolloutmq.services.telemetry.export.prometheus.machines import MachineMetrics
from rolloutmq.services.telemetry.export.prometheus.queues import QueueMetrics, tell_merged
from rolloutmq.services.telemetry.export.prometheus.training import TrainingMetrics

STALE_S: Final = 30.0
"""Silence after which a sample is no longer told, with intervals up to a tenth of it."""


@dataclass(frozen=True, slots=True)
class SelfCounts:
    """What telemetry counts of itself.

    Attributes:
        malformed: Events that failed to decode.
        lost: Events that could not be recorded.
        points: Points handed to each sink.
        dropped: Points that each sink did not take.
    """

    malformed: int = 0
    lost: int = 0
    points: tuple[tuple[str, int], ...] = ()
    dropped: tuple[tuple[str, int], ...] = ()


class RunMetrics:
    """Metrics of one run.

    Args:
        run: Name of the run.
        interval_s: Interval of the samples.
    """

    def __init__(self, run: str, interval_s: float) -> None:
        stale_s = max(STALE_S, 10 * interval_s)
        self._bounds = Bounds()
        self._queues = QueueMetrics(self._bounds, run)
        self._machines = MachineMetrics(self._bounds, stale_s)
        self._training = TrainingMetrics(self._bounds)
        self._latencies = LatencyMetrics(self._bounds, stale_s)
        self._heard: Counter[str] = Counter()

    def feed(self, event: Event, now: float) -> None:
        """Take an event, at a monotonic time in seconds."""
        self._heard[str(event.__struct_config__.tag)] += 1
        match event:
            case Pressure():
                self._queues.feed(event, now)
            case HostSample() | GpuSample() | GpuAbsence() | ProcessSample() | EngineSample() | GpuStanding():
                self._machines.feed(event, now)
            case LatencySample():
                self._latencies.feed(event, now)
            case (
                BatchSettled()
                | StepDone()
                | StepFigures()
                | EvaluationDone()
                | CurriculumProgress()
                | HealthFinding()
                | ScaleDecision()
                | EngineDecision()
            ):
                self._training.feed(event, now)

    def families(self, now: float, counts: SelfCounts) -> Families:
        """Return the samples of one page."""
        families = Families()
        for part in (self._queues, self._machines, self._training, self._latencies):
            part.tell(families, now)
        for kind, count in self._heard.items():
            families.add("telemetry_events_total", count, kind)
        families.add("telemetry_malformed_events_total", counts.malformed)
        families.add("telemetry_lost_events_total", counts.lost)
        for sink, count in counts.points:
            families.add("export_points_total", count, sink)
        for sink, count in counts.dropped:
            families.add("export_dropped_points_total", count, sink)
        for label in fields(Bounds):
            tell_merged(families, label.name, getattr(self._bounds, label.name))
        return families
