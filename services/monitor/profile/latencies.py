"""Latencies of a run, summed over the samples that its processes published. Pure.

The broker tells the hops of all groups; workers tell their rollouts and calls; servers tell their requests. A sum by
environment takes the broker's rollouts, one by worker, host or GPU those of the workers: each rollout counts once.

Rates count the time from the first to the last sample of a row, without times in which no process published.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import msgspec

from rolloutmq.schemas.statistics.histogram import Histogram, HistogramBuilder
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import BROKER, Hop, LatencyRow, LatencySample

OTHERS: Final = "(others)"
"""Label of what had no row of its own."""
ROWS_LIMIT: Final = 4096
"""Most rows of a sum; labels beyond it count as `OTHERS`."""


class By(StrEnum):
    """What rows are summed by."""

    ENV = "env"
    WORKER = "worker"
    HOST = "host"
    ENGINE = "engine"
    GPU = "gpu"
    ROUTE = "route"


class Sampled(Protocol):
    """What a sum reads of a sample: the message, or a line of the record."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def at(self) -> float: ...
    @property
    def since_s(self) -> float: ...
    @property
    def gpus(self) -> tuple[str, ...]: ...
    @property
    def rows(self) -> tuple[LatencyRow, ...]: ...
    @property
    def dropped_rows(self) -> int: ...


class LatencyLine(msgspec.Struct, frozen=True):
    """A latency sample in the record, or the beginning of another event."""

    kind: str = ""
    name: str = ""
    host: str = ""
    at: float = 0.0
    since_s: float = 0.0
    gpus: tuple[str, ...] = ()
    rows: tuple[LatencyRow, ...] = ()
    dropped_rows: int = 0
    trimmed: tuple[str, ...] = ()


class SumKey(NamedTuple):
    """What a sum is about: its label, such as the name of a worker, and the hop."""

    label: str
    hop: Hop
    split: Split = Split.TRAIN
    status: str = ""


class Sum(NamedTuple):
    """Latencies of one row.

    Attributes:
        durations: All of them.
        seconds: Time from the first to the last sample of it.
        tokens: Tokens of its groups or calls.
        slowest_s: Longest duration.
        slowest_id: Group of it, if it was one.
        clock_error_s: Bound of the error between the clocks of two hosts; 0 on one host.
    """

    durations: Histogram
    seconds: float
    tokens: int
    slowest_s: float
    slowest_id: str
    clock_error_s: float

    def percentile_s(self, percent: float) -> float:
        """Return a percentile, see `Histogram.percentile_s`; no more than the longest duration, if that is known."""
        return self.durations.percentile_s(percent, self.slowest_s)

    @property
    def per_s(self) -> float:
        """Groups, calls or requests a second; 0 if no time is known."""
        return self.durations.count / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Sums(NamedTuple):
    """Sums of a run, by label and hop; and rows that processes left out because there were too many."""

    rows: dict[SumKey, Sum]
    dropped: int = 0


class LatencyTotals:
    """Sums that grow with each sample.

    Args:
        by: What the rows are summed by.
        limit: Most rows; labels beyond it count as `OTHERS`.
    """

    def __init__(self, by: By, limit: int = ROWS_LIMIT) -> None:
        self._by = by
        self._limit = limit
        self._found: dict[SumKey, _Collected] = {}
        self._clock = _Clock()
        self.dropped = 0
        """Rows that a process left out because it had too many."""

    def add(self, sample: Sampled) -> None:
        """Add the rows of a sample; samples come in the order of their arrival."""
        until_s = self._clock.passed(sample.at, sample.since_s)
        self.dropped = max(self.dropped, sample.dropped_rows)
        for row in sample.rows:
            for label in _labels(sample, row, self._by):
                key = SumKey(label or OTHERS, row.hop, row.split, row.status)
                if key not in self._found and len(self._found) >= self._limit:
                    key = SumKey(OTHERS, row.hop, row.split, row.status)
                if (one := self._found.get(key)) is None:
                    one = self._found[key] = _Collected(until_s - max(0.0, sample.since_s))
                one.add(row, until_s)

    def keys(self) -> list[SumKey]:
        """Return the keys of all rows, by label, split and hop."""
        return [key for key, _ in sorted(self._found.items(), key=_place)]

    def percentile_s(self, key: SumKey, percent: float) -> float:
        """Return a percentile of a row, much faster than its `sum`, see `Histogram.percentile_s`."""
        return self._found[key].builder.percentile_s(percent)

    def sum(self, key: SumKey) -> Sum:
        """Return one row."""
        return self._found[key].sum()

    def sums(self) -> Sums:
        """Return all rows."""
        return Sums({key: self.sum(key) for key in self.keys()}, self.dropped)


def sum_latencies(lines: Iterable[LatencyLine | LatencySample], by: By) -> Sums:
    """Sum the samples of a run.

    Args:
        lines: Samples in the order of their arrival; other events are skipped.
        by: What the rows are summed by.
    """
    totals = LatencyTotals(by)
    for line in lines:
        if isinstance(line, LatencySample) or line.kind == "latency_sample":
            totals.add(line)
    return totals.sums()


def _labels(line: Sampled, row: LatencyRow, by: By) -> Iterator[str]:
    """Yield the labels under which a row counts."""
    of_broker = line.name == BROKER
    match by:
        case By.ENV if of_broker:
            yield row.env
        case By.WORKER if row.hop in {Hop.ROLLOUT, Hop.CALL} and not of_broker:
            yield line.name
        case By.HOST if not (of_broker and row.hop is Hop.ROLLOUT):
            yield line.host
        case By.ENGINE if row.hop is Hop.CALL:
            yield row.engine
        case By.ENGINE if row.hop is Hop.HTTP and line.name != "gateway":
            yield line.name
        case By.GPU:
            yield from line.gpus
        case By.ROUTE if row.hop is Hop.HTTP:
            yield f"{line.name} {row.route}"
        case _:
            pass


class _Clock:
    """Seconds in which any process published, as a growing sum: the time between two lives of a run is left out."""

    def __init__(self) -> None:
        self._end = float("-inf")
        self._covered_s = 0.0

    def passed(self, at: float, since_s: float) -> float:
        """Return the covered seconds up to the end of a sample."""
        self._covered_s += max(0.0, at - max(self._end, at - max(0.0, since_s)))
        self._end = max(self._end, at)
        return self._covered_s


class _Collected:
    """One sum as it grows."""

    def __init__(self, since_s: float) -> None:
        self.builder = HistogramBuilder()
        self._since_s = max(0.0, since_s)
        self._until_s = self._since_s
        self._tokens = 0
        self._slowest = 0.0, ""
        self._clock_error_s = 0.0

    def add(self, row: LatencyRow, until_s: float) -> None:
        self.builder.merge(row.durations)
        self._until_s = max(self._until_s, until_s)
        self._tokens += row.tokens
        self._slowest = max(self._slowest, (row.slowest_s, row.slowest_id))
        self._clock_error_s = max(self._clock_error_s, row.clock_error_s)

    def sum(self) -> Sum:
        seconds = self._until_s - self._since_s
        return Sum(self.builder.histogram(), seconds, self._tokens, *self._slowest, self._clock_error_s)


def _place(entry: tuple[SumKey, object]) -> tuple[bool, str, Split, int, str]:
    key = entry[0]
    return key.label == OTHERS, key.label, key.split, list(Hop).index(key.hop), key.status
