"""Pages, and what a parser reads in them."""

from collections.abc import Iterable

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.telemetry.export.prometheus.run_metrics import RunMetrics, SelfCounts

Sample = tuple[str, tuple[tuple[str, str], ...]]


def metrics_of(events: Iterable[Event], now: float = 0.0) -> RunMetrics:
    metrics = RunMetrics("run", 1.0)
    for event in events:
        metrics.feed(event, now)
    return metrics


def text_of(metrics: RunMetrics, now: float = 0.0) -> str:
    counts = SelfCounts(1, 2, (("wandb", 3),), (("wandb", 4),))
    return generate_latest(metrics.families(now, counts)).decode()


def samples_of(text: str) -> dict[Sample, float]:
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name.removeprefix("rolloutmq_"), tuple(sorted(sample.labels.items())))
            assert key not in found, f"twice on one page: {key}"
            found[key] = sample.value
    return found


def read(metrics: RunMetrics, now: float = 0.0) -> dict[Sample, float]:
    return samples_of(text_of(metrics, now))


def key(name: str, /, **labels: str) -> Sample:
    return name, tuple(sorted(labels.items()))
