"""Points for experiment trackers: figures by name at a step. Pure.

Batches, evaluations and figures of the trainer are a point each, at the step that they name. State that has no step of
its own is sampled every `SAMPLE_S`, at the step of the newest policy: rates, waits, workers, and percentiles of the
latencies since the sample before.

Both sides of a batch report its step. Reward, staleness and groups are those of the broker, whoever trains; loss and
times are those of the trainer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rolloutmq.schemas.statistics.histogram import Histogram
from rolloutmq.schemas.wire.control import Pressure, StepDone
from rolloutmq.schemas.wire.envelope import Count, Seconds
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone
from rolloutmq.schemas.wire.latency import BROKER, Hop, LatencySample
from rolloutmq.schemas.wire.telemetry import CurriculumProgress, Event
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.telemetry.export.label_bound import OTHER, LabelBound

SAMPLE_S: Final = 10.0
"""Time between two samples of what has no step."""
ENVIRONMENTS: Final = 50
"""Environments with figures of their own; of the others there are none, but for the sums over all."""
FIGURES: Final = 200
"""Figures of a trainer and reasons of waits, by name."""
PERCENTS: Final = (50, 95, 99)
VALUES_LIMIT: Final = 2000
"""Most values of a point."""


class Point(msgspec.Struct, frozen=True):
    """Figures at one step. One that is not finite is None.

    Attributes:
        step: Optimizer step.
        at: Wall clock.
        values: Figures by name, such as `train/reward`.
    """

    step: Count
    at: Seconds
    values: Annotated[dict[str, float | None], Meta(max_length=VALUES_LIMIT)]


class Points:
    """Events in, points out.

    Args:
        sample_s: Time between two samples of what has no step.
    """

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self._sample_s = sample_s
        self._sample_at: float | None = None
        self._step = 0
        self._pressure: Pressure | None = None
        self._waits: dict[str, float] = {}
        self._latencies: dict[tuple[str, ...], tuple[Histogram, float]] = {}
        self._envs = LabelBound(ENVIRONMENTS)
        self._names = LabelBound(FIGURES)
        self._tell: dict[type, Callable[[Any, float], Iterator[Point]]] = {
            BatchSettled: self._settled,
            StepDone: self._stepped,
            StepFigures: self._figures,
            EvaluationDone: self._evaluated,
            CurriculumProgress: self._progressed,
        }

    def feed(self, event: Event, now: float, at: float) -> Iterator[Point]:
        """Take an event, and yield the points of it.

        Args:
            event: The event.
            now: Monotonic time.
            at: Wall clock.
        """
        if isinstance(event, Pressure):
            self._pressure, self._step = event, event.step
        elif isinstance(event, LatencySample):
            self._measured(event, now)
        elif (tell := self._tell.get(type(event))) is not None:
            yield from tell(event, now)
        if self._sample_at is None:
            self._sample_at = now
        elif now - self._sample_at >= self._sample_s:
            self._sample_at = now
            yield from self._sampled(at, now)

    def _settled(self, event: BatchSettled, now: float) -> Iterator[Point]:
        self._step = max(self._step, event.step)
        values = {
            "train/reward": event.reward,
            "train/tokens": event.tokens,
            "train/sequences": event.sequences,
            "train/groups_trained": event.trained,
            "train/groups_filtered": event.filtered,
            "train/groups_rejected": event.rejected,
            "train/staleness_max": event.staleness_max,
            "train/staleness_mean": event.staleness_mean,
        }
        for scores in event.scores:
            values |= self._of_env(f"reward/{scores.env}", scores.env, scores.mean, now)
        yield _point(event.step, event.at, values)

    def _stepped(self, event: StepDone, now: float) -> Iterator[Point]:
        values = {"train/loss": event.loss, "time/pull_s": event.pull_s, "time/step_s": event.step_s}
        yield _point(event.step, event.at, values | self._known(event.extra, now))

    def _figures(self, event: StepFigures, now: float) -> Iterator[Point]:
        values = event.figures | dict.fromkeys(event.not_finite, float("nan"))
        yield _point(event.step, event.at, self._known(values, now))

    def _known(self, figures: Mapping[str, float], now: float) -> dict[str, float]:
        """Return figures by their names in the tracker, without those beyond the limit."""
        named = {f"figures/{name}": value for name, value in figures.items()}
        return {name: value for name, value in named.items() if self._names.label(name, now) != OTHER}

    def _evaluated(self, event: EvaluationDone, now: float) -> Iterator[Point]:
        values = dict(_scores("evaluation", event.all))
        for env, scores in event.environments.items():
            if self._envs.label(env, now) != OTHER:
                values |= _scores(f"evaluation/{env}", scores)
        yield _point(event.version.step, event.at, values | {"evaluation/seconds": event.seconds})

    def _progressed(self, event: CurriculumProgress, now: float) -> Iterator[Point]:
        env = event.env
        values: dict[str, float] = {}
        for name, value in (("level", event.level), ("success", event.success), ("flat", event.flat_share)):
            if value is not None:
                values |= self._of_env(f"curriculum/{env}/{name}", env, value, now)
        yield _point(self._step, event.at, values)

    def _measured(self, sample: LatencySample, now: float) -> None:
        for row in sample.rows:
            if row.hop is Hop.ROLLOUT and sample.name != BROKER:  # the broker tells the same rollouts
                continue
            keys: list[tuple[str, ...]] = [(row.hop,)]
            if row.hop is not Hop.HTTP and row.env and self._envs.label(row.env, now) != OTHER:
                keys.append((row.hop, row.env))
            for key in keys:
                durations, slowest_s = self._latencies.get(key, (Histogram(), 0.0))
                self._latencies[key] = durations.merged(row.durations), max(slowest_s, row.slowest_s)

    def _sampled(self, at: float, now: float) -> Iterator[Point]:
        values: dict[str, float] = {}
        for key, (histogram, slowest_s) in self._latencies.items():
            if histogram.counts:
                values |= {
                    f"latency/{'/'.join(key)}/p{percent}_s": histogram.percentile_s(percent, slowest_s)
                    for percent in PERCENTS
                }
        self._latencies.clear()
        if self._pressure is not None:
            values |= self._of_pressure(self._pressure, now)
            self._pressure = None
        yield _point(self._step, at, values)

    def _of_pressure(self, pressure: Pressure, now: float) -> dict[str, float]:
        values: dict[str, float] = {
            "queue/rollout_pressure": pressure.rollout_pressure,
            "queue/groups": pressure.queued_groups,
            "queue/bytes": pressure.queued_bytes,
            "rate/produced_per_s": pressure.produced_per_s,
            "rate/consumed_per_s": pressure.consumed_per_s,
        }
        for state, count in Counter(worker.counts_as for worker in pressure.workers).items():
            values[f"workers/{state}"] = count
        waits = {"wait/trainer_starved_s": pressure.starved_s}
        for side, by_reason in (
            ("trainer", pressure.trainer_waits_s),
            ("producer", pressure.producer_waits_s),
        ):
            for why, seconds in by_reason.items():
                if self._names.label(name := f"wait/{side}/{why}_s", now) != OTHER:
                    waits[name] = seconds
        for name, seconds in waits.items():
            # Of a restarted broker the sum begins anew.
            values[name] = seconds - before if (before := self._waits.get(name, 0.0)) <= seconds else seconds
        self._waits = waits
        return values

    def _of_env(self, name: str, env: str, value: float, now: float) -> dict[str, float]:
        return {} if self._envs.label(env, now) == OTHER else {name: value}


def _scores(head: str, scores: EnvironmentScores) -> Iterable[tuple[str, float]]:
    for name in ("greedy", "mean", "pass_1", "pass_k"):
        if (value := getattr(scores, name)) is not None:
            yield f"{head}/{name}", value


def _point(step: int, at: float, values: dict[str, float]) -> Point:
    bounded = list(values.items())[:VALUES_LIMIT]
    return Point(step, at, dict(bounded))
