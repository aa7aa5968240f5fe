"""Latencies of a run, summed over the samples that its processes published. Pure.

The broker tells the hops of all groups; workers tell their rollouts and calls; servers tell their requests. A sum by
environment takes the broker's rollouts, one by worker, host or GPU those of the workers: each rollout counts once.

Rates count the time from the first to the last sample of a row, without times in which no process published.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple

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


def sum_latencies(lines: Iterable[LatencyLine | LatencySample], by: By) -> Sums:
    """Sum the samples of a run.

    Args:
        lines: Samples in the order of their arrival; other events are skipped.
        by: What the rows are summed by.
    """
    found: dict[SumKey, _Collected] = {}
    clock = _Clock()
    dropped = 0
    for line in lines:
        if isinstance(line, LatencyLine) and line.kind != "latency_sample":
            continue
        until_s = clock.passed(line.at, line.since_s)
        dropped = max(dropped, line.dropped_rows)
        for row in line.rows:
            for label in _labels(line, row, by):
                key = SumKey(label or OTHERS, row.hop, row.split, row.status)
                if key not in found and len(found) >= ROWS_LIMIT:
                    key = SumKey(OTHERS, row.hop, row.split, row.status)
                if (one := found.get(key)) is None:
                    one = found[key] = _Collected(until_s - max(0.0, line.since_s))
                one.add(row, until_s)
    return Sums({key: one.sum() for key, one in sorted(found.items(), key=_place)}, dropped)


def _labels(line: LatencyLine | LatencySample, row: LatencyRow, by: By) -> Iterator[str]:
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
        self._builder = HistogramBuilder()
        self._since_s = max(0.0, since_s)
        self._until_s = self._since_s
        self._tokens = 0
        self._slowest = 0.0, ""
        self._clock_error_s = 0.0

    def add(self, row: LatencyRow, until_s: float) -> None:
        self._builder.merge(row.durations)
        self._until_s = max(self._until_s, until_s)
        self._tokens += row.tokens
        self._slowest = max(self._slowest, (row.slowest_s, row.slowest_id))
        self._clock_error_s = max(self._clock_error_s, row.clock_error_s)

    def sum(self) -> Sum:
        seconds = self._until_s - self._since_s
        return Sum(self._builder.histogram(), seconds, self._tokens, *self._slowest, self._clock_error_s)


def _place(entry: tuple[SumKey, object]) -> tuple[bool, str, Split, int, str]:
    key = entry[0]
    return key.label == OTHERS, key.label, key.split, list(Hop).index(key.hop), key.status
