"""Latencies as Prometheus histograms: the samples of all processes, added up since telemetry began. Pure.

Hops of groups are those that the broker measures. A worker measures its rollouts once more, which are sums by worker.

The buckets of a sample are finer by far than those of the page. A duration within 2 % of a bound may count on either
side of it. The slowest group of a sample is the exemplar of its bucket: `rolloutmq explain` goes on with its id. Only
OpenMetrics has exemplars.

Counters begin at zero with each life of telemetry, and `rate` handles that: kept sums would be older than the last
page, and a counter that falls a little counts again as a whole.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from sys import float_info
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client.samples import Exemplar

from rolloutmq.schemas.statistics.histogram import BUCKETS, HistogramBuilder
from rolloutmq.schemas.wire.latency import BROKER, Hop, LatencyRow, LatencySample
from rolloutmq.services.telemetry.export.label_bound import OTHER
from rolloutmq.services.telemetry.export.prometheus.bounds import Bounds
from rolloutmq.services.telemetry.export.prometheus.families import Families
from rolloutmq.services.telemetry.export.prometheus.latest import Latest

BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    *(10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0),
)
"""Upper bounds of the buckets, in seconds."""
EXEMPLAR_LABEL: Final = "group_id"
EXEMPLAR_CHARS: Final = 128 - len(EXEMPLAR_LABEL)
"""Longest id of an exemplar: OpenMetrics has 128 characters for name and value, and a part of an id finds nothing."""
LATEST_AT: Final = 1e11
"""Latest time of an exemplar, in seconds since the epoch: the clock of a peer may say anything."""
SERIES: Final = 512
"""Histograms of one page; further combinations of labels add up in `_other`."""

_TEXTS: Final = (*map(str, BOUNDS_S), "+Inf")
_PLACES: Final = np.searchsorted(
    [HistogramBuilder().add(bound).histogram().first for bound in BOUNDS_S], np.arange(BUCKETS)
)
"""Bucket of the page by that of a sample."""
_STATUSES: Final = frozenset({"", "1xx", "2xx", "3xx", "4xx", "5xx"})


@dataclass(slots=True)
class _Series:
    """Sums of one combination of labels."""

    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(_TEXTS)))
    total_s: float = 0.0
    tokens: int = 0
    clock_error_s: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)
    """The slowest group of the last sample with one in that bucket."""

    def add(self, row: LatencyRow) -> None:
        durations = row.durations
        if durations.counts:
            places = _PLACES[durations.first : durations.first + len(durations.counts)]
            self.counts += np.bincount(places, durations.counts, len(_TEXTS))
        self.total_s = min(self.total_s + durations.total_s, float_info.max)
        self.tokens += row.tokens
        self.clock_error_s = row.clock_error_s

    def show(self, row: LatencyRow, at: float) -> None:
        """Take the slowest group of a sample that was published at `at`, seconds since the epoch."""
        if 0 < len(row.slowest_id) <= EXEMPLAR_CHARS and 0.0 < at < LATEST_AT:
            place = bisect_left(BOUNDS_S, row.slowest_s)
            self.exemplars[place] = Exemplar({EXEMPLAR_LABEL: row.slowest_id}, row.slowest_s, at)

    @property
    def buckets(self) -> list[tuple[str, float, Exemplar | None]]:
        sums = accumulate(self.counts.tolist())
        return [
            (text, count, self.exemplars.get(place))
            for place, (text, count) in enumerate(zip(_TEXTS, sums, strict=True))
        ]


Key = tuple[str, ...]
"""Name of the histogram and values of its labels."""


class LatencyMetrics:
    """Metrics of `LatencySample`.

    Args:
        bounds: Bounds of the labels.
        stale_s: Silence after which the GPUs of a process are no longer told.
    """

    def __init__(self, bounds: Bounds, stale_s: float) -> None:
        self._bounds = bounds
        self._series: dict[Key, _Series] = {}
        self._gpus = Latest[LatencySample](bounds.process, stale_s)
        self._dropped: dict[str, int] = {}
        self._rollouts: dict[tuple[str, str], tuple[int, float]] = {}

    def feed(self, sample: LatencySample, now: float) -> None:
        """Add a sample."""
        process = self._bounds.process.label(sample.name, now)
        if sample.gpus:
            self._gpus.put(sample.name, sample, now)
        if sample.dropped_rows:
            self._dropped[process] = self._dropped.get(process, 0) + sample.dropped_rows
        for row in sample.rows:
            if row.hop in {Hop.CALL, Hop.HTTP} or sample.name == BROKER:
                series = self._at(self._key(row, process, now))
                series.add(row)
                if row.hop not in {Hop.CALL, Hop.HTTP}:
                    series.show(row, sample.at)
            elif row.hop is Hop.ROLLOUT:
                self._roll_out(row, sample.name, now)

    def tell(self, families: Families, now: float) -> None:
        """Add the metrics."""
        for name, sample in self._gpus.items(now):
            for gpu in sample.gpus:
                if self._bounds.gpu.label(gpu, now) != OTHER:
                    families.add("process_gpu_info", 1, name, gpu, sample.host)
        for process, rows in self._dropped.items():
            if self._bounds.process.holds(process):
                families.add("latency_dropped_rows_total", rows, process)
        for (worker, env), (count, seconds) in list(self._rollouts.items()):
            if self._bounds.worker.holds(worker):
                families.add("worker_finished_rollouts_total", count, worker, env)
                families.add("worker_rollout_seconds_total", seconds, worker, env)
            else:
                del self._rollouts[worker, env]
        for key, series in list(self._series.items()):
            if self._is_known(key):
                _tell(families, key, series)
            else:
                del self._series[key]

    def _roll_out(self, row: LatencyRow, name: str, now: float) -> None:
        worker = self._bounds.worker.label(name, now)
        key = (OTHER, OTHER) if worker == OTHER else (worker, self._env(row, now))
        count, seconds = self._rollouts.get(key, (0, 0.0))
        total_s = min(seconds + row.durations.total_s, float_info.max)
        self._rollouts[key] = count + row.durations.count, total_s

    def _env(self, row: LatencyRow, now: float) -> str:
        """Return the label of an environment. A process without room for it sends no name."""
        return self._bounds.env.label(row.env, now) if row.env else OTHER

    def _at(self, key: Key) -> _Series:
        if key not in self._series and len(self._series) >= SERIES:
            key = _rest_of(key)
        return self._series.setdefault(key, _Series())

    def _key(self, row: LatencyRow, process: str, now: float) -> Key:
        status = row.status if row.status in _STATUSES else OTHER
        if row.hop is Hop.HTTP:
            return row.hop, process, self._bounds.route.label(row.route, now), status
        env = self._env(row, now)
        if row.hop is Hop.CALL:
            return row.hop, env, self._bounds.engine.label(row.engine, now), status
        return row.hop, env, row.split.name.lower()

    def _is_known(self, key: Key) -> bool:
        bound = self._bounds.process if key[0] == Hop.HTTP else self._bounds.env
        return bound.holds(key[1])


def _rest_of(key: Key) -> Key:
    """Return the key of what has no series of its own: the status class and the split stay."""
    return (key[0], *(OTHER for _ in key[1:-1]), key[-1])


def _tell(families: Families, key: Key, series: _Series) -> None:
    hop, *labels = key
    if hop == Hop.HTTP:
        families.histogram("http_request_duration_seconds", series.buckets, series.total_s, *labels)
    elif hop == Hop.CALL:
        families.histogram("call_duration_seconds", series.buckets, series.total_s, *labels)
        families.add("call_tokens_total", series.tokens, *labels)
    else:
        families.histogram("hop_duration_seconds", series.buckets, series.total_s, hop, *labels)
        families.add("hop_tokens_total", series.tokens, hop, *labels)
        families.add("hop_clock_error_seconds", series.clock_error_s, hop, *labels)
