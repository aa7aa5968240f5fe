"""The families of one page: values by metric and labels, as a collector of `prometheus_client`. Pure.

Values of the same labels add up, so that names under `_other` do.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from rolloutmq.services.telemetry.export.label_bound import OTHER, text_of
from rolloutmq.services.telemetry.export.prometheus.catalogue import CATALOGUE, PREFIX, Kind, Spec

Labels = tuple[str, ...]
Buckets = Sequence[tuple[str, float, Exemplar | None]]
"""Upper bounds as text, up to `+Inf`, with the durations up to each, and a duration in that bucket."""


class Families(Collector):
    """Collects the samples of one page. Names are those of the catalogue, without prefix."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, tuple[Buckets, float]]] = {}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a value; None is left out."""
        if value is None:
            return
        values = self._values.setdefault(PREFIX + name, {})
        values[labels] = values.get(labels, 0.0) + value

    def most(self, name: str, value: float, *labels: str) -> None:
        """Keep the largest value."""
        values = self._values.setdefault(PREFIX + name, {})
        values[labels] = max(values.get(labels, value), value)

    def own(self, name: str, value: float | None, *labels: str) -> None:
        """Set a value that means nothing over several names: `OTHER` has none."""
        if OTHER not in labels:
            self.add(name, value, *labels)

    def histogram(self, name: str, buckets: Buckets, total: float, *labels: str) -> None:
        """Set a histogram."""
        self._histograms.setdefault(PREFIX + name, {})[labels] = buckets, total

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that has a sample, in the order of the catalogue."""
        for spec in CATALOGUE.values():
            if spec.kind is Kind.HISTOGRAM and (found := self._histograms.get(spec.name)):
                yield _histogram(spec, found)
            elif values := self._values.get(spec.name):
                yield _single(spec, values)


def _single(spec: Spec, values: dict[Labels, float]) -> Metric:
    of_kind = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
    family = of_kind(spec.name, spec.says, labels=spec.labels)
    for labels, value in values.items():
        family.add_metric([*map(text_of, labels)], value)
    return family


def _histogram(spec: Spec, found: dict[Labels, tuple[Buckets, float]]) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.says, labels=spec.labels)
    for labels, (buckets, total) in found.items():
        shown = [
            (text, count) if exemplar is None else (text, count, exemplar)
            for text, count, exemplar in buckets
        ]
        family.add_metric([*map(text_of, labels)], shown, total)
    return family
