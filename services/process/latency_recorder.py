"""Latency recorder of one process: durations in, a `LatencySample` out. Pure: the clock is passed in.

A duration costs an append to a list. Lists become histograms in blocks, by one vectorised pass over each, at a sample
or when `BLOCK` durations wait. Rows are bounded: beyond `ROWS_LIMIT` the durations of further keys count in one row of
their hop without names, so the sums of a hop stay exact. Not safe for threads.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from math import isfinite
from struct import pack
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.statistics.histogram import LONGEST_S, HistogramBuilder
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import ROWS_LIMIT, Hop, LatencyRow, LatencySample

BLOCK: Final = 2048
"""Durations of a row that wait at most."""
SAMPLE_BYTES: Final = 40 << 10
"""Most JSON of the rows of one message: the broker forwards and the record keeps 64 KiB."""
ROW_BYTES: Final = 320
"""Most JSON of a row without its texts and counts."""
ESCAPED: Final = 6
"""Most bytes of one character of a text in JSON, and of one bucket's count without its digits."""
DROPPED_LIMIT: Final = 16 * ROWS_LIMIT
"""Keys beyond the limit that are told apart, to count them."""
OTHERS: Final = len(Hop) * len(Split)
"""Rows kept for what has no row of its own."""


class LatencyKey(NamedTuple):
    """What a row is about; see `LatencyRow`."""

    hop: Hop
    env: str = ""
    split: Split = Split.TRAIN
    route: str = ""
    status: str = ""
    engine: str = ""


class RowRecorder:
    """Durations of one row since the last sample. Those not finite do not count, and a negative one counts as 0."""

    __slots__ = (
        "_builder",
        "_durations_s",
        "_id_of",
        "_repeated",
        "clock_error_s",
        "slowest_s",
        "source",
        "tokens",
    )

    def __init__(self, id_of: Callable[[Any], str]) -> None:
        self._id_of = id_of
        self._durations_s: list[float] = []
        self._repeated: list[tuple[float, int]] = []
        self._builder = HistogramBuilder()
        self.tokens = 0
        self.clock_error_s = 0.0
        self.slowest_s = -1.0
        self.source = ""

    def add(self, seconds: float, tokens: int, source: Any) -> None:
        """Count one duration; the id of its source names it if it is the longest."""
        self._durations_s.append(seconds)
        self.tokens += tokens
        if seconds > self.slowest_s and isfinite(seconds):
            self.slowest_s, self.source = seconds, self._id_of(source)
        if len(self._durations_s) >= BLOCK:
            self._fold()

    def extend(
        self, durations_s: Sequence[float], tokens: int, sources: Sequence[Any], times: int = 1
    ) -> None:
        """Count durations, each with its source and so many times; the tokens are those of all."""
        if times == 1:
            self._durations_s += durations_s
        else:
            self._repeated += zip(durations_s, repeat(times))
        self.tokens += tokens
        highest = max(durations_s, default=-1.0)
        if not isfinite(highest):  # a maximum with NaN depends on the order
            highest = max(filter(isfinite, durations_s), default=-1.0)
        if highest > self.slowest_s:
            self.slowest_s, self.source = highest, self._id_of(sources[durations_s.index(highest)])
        if max(len(self._durations_s), len(self._repeated)) >= BLOCK:
            self._fold()

    def repeat(self, seconds: float, times: int, tokens: int, source: Any) -> None:
        """Count one duration so many times."""
        self._repeated.append((seconds, times))
        self.tokens += tokens
        if seconds > self.slowest_s and isfinite(seconds):
            self.slowest_s, self.source = seconds, self._id_of(source)
        if len(self._repeated) >= BLOCK:
            self._fold()

    def _fold(self) -> None:
        """Move the durations that wait into the histogram."""
        if self._durations_s:
            self._builder.add(_array(self._durations_s))
            self._durations_s = []
        if self._repeated:
            seconds, times = zip(*self._repeated, strict=True)
            self._builder.add(_array(seconds), _array(times))
            self._repeated = []

    def row(self, key: LatencyKey) -> LatencyRow:
        """Return what was counted."""
        self._fold()
        return LatencyRow(
            hop=key.hop,
            durations=self._builder.histogram(),
            env=key.env[:256],
            split=key.split,
            route=key.route[:256],
            status=key.status,
            engine=key.engine[:256],
            tokens=self.tokens,
            slowest_s=min(max(self.slowest_s, 0.0), LONGEST_S),
            slowest_id=self.source[:512],
            clock_error_s=self.clock_error_s,
        )


class LatencyRecorder:
    """Durations of one process since its last sample.

    Args:
        name: Process, as in `LatencySample.name`.
        now: Wall-clock seconds, from which the first sample counts; see `begin`.
        host: Name of its host.
        gpus: UUIDs of its GPUs.
        id_of: Returns the id of a source, for the slowest one of a row.
        enabled: Whether it records anything.
    """

    def __init__(
        self,
        name: str,
        now: float,
        *,
        host: str = "",
        gpus: tuple[str, ...] = (),
        id_of: Callable[[Any], str] = str,
        enabled: bool = True,
    ) -> None:
        self._name = name
        self._host = host
        self._gpus = gpus
        self._id_of = id_of
        self.enabled = enabled
        self._rows: dict[LatencyKey, RowRecorder] = {}
        self._dropped: set[LatencyKey] = set()
        self._number = 0
        self._since = now

    def __bool__(self) -> bool:
        """Whether anything was measured since the last sample."""
        return bool(self._rows)

    def begin(self, now: float) -> None:
        """Count the seconds of the next sample from here on."""
        self._since = now

    def add(self, key: LatencyKey, seconds: float, *, tokens: int = 0, source: Any = "") -> None:
        """Count one duration."""
        if self.enabled:
            self.row(key).add(seconds, tokens, source)

    def row(self, key: LatencyKey) -> RowRecorder:
        """Return the row of a key, which counts until the next sample."""
        if (row := self._rows.get(key)) is not None:
            return row
        if len(self._rows) >= ROWS_LIMIT - OTHERS:
            if len(self._dropped) < DROPPED_LIMIT:
                self._dropped.add(key)
            key = LatencyKey(key.hop, split=key.split)
        return self._rows.setdefault(key, RowRecorder(self._id_of))

    def samples(self, now: float) -> list[LatencySample]:
        """Return what was measured since the last call, at wall clock `now`; no sample if that is nothing.

        Rows too large for one message follow in further ones, which cover no seconds of their own.
        """
        if not self._rows:
            return []
        rows = [row for key, one in self._rows.items() if (row := one.row(key)).durations.counts]
        dropped, since_s = len(self._dropped), max(0.0, now - self._since)
        self._rows, self._dropped, self._since = {}, set(), now
        found = []
        for part in _parts(rows):
            self._number += 1
            found.append(
                LatencySample(
                    name=self._name,
                    number=self._number,
                    at=now,
                    since_s=since_s,
                    host=self._host,
                    gpus=self._gpus,
                    rows=part,
                    dropped_rows=dropped,
                )
            )
            since_s, dropped = 0.0, 0
        return found


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    """Return values as an array: for a list of floats, `struct` takes a third of the time of numpy."""
    return np.frombuffer(pack(f"{len(values)}d", *values))


def _parts(rows: Iterable[LatencyRow]) -> Iterable[tuple[LatencyRow, ...]]:
    """Yield the rows in parts that fit one message each."""
    part: list[LatencyRow] = []
    size = 0
    for row in rows:
        nbytes = _most_bytes(row)
        if part and size + nbytes > SAMPLE_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(row)
        size += nbytes
    if part:
        yield tuple(part)


def _most_bytes(row: LatencyRow) -> int:
    """Return a bound of the bytes of a row in JSON."""
    texts = len(row.env) + len(row.route) + len(row.engine) + len(row.slowest_id)
    counts = row.durations.counts
    return ROW_BYTES + ESCAPED * texts + len(counts) * (1 + len(str(max(counts))))
