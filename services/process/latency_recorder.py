"""Latency recorder of one process: durations in, a `LatencySample` out. Pure: the clock is passed in.

A duration costs an append to a list. Lists become histograms in blocks, by one vectorised pass over each, at a sample
or when `BLOCK` durations wait. Rows are bounded: beyond `ROWS_LIMIT` the durations of further keys count in one row of
their hop without names, so the sums of a hop stay exact. Not safe for threads.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.statistics.histogram import LONGEST_S, HistogramBuilder
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import ROWS_LIMIT, Hop, LatencyRow, LatencySample

BLOCK: Final = 4096
"""Durations of a key that wait at most."""
SAMPLE_BYTES: Final = 40 << 10
"""Most JSON of the rows of one message: the broker forwards and the record keeps 64 KiB."""
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


class LatencyRecorder:
    """Durations of one process since its last sample.

    Args:
        name: Process, as in `LatencySample.name`.
        now: Wall-clock seconds, from which the first sample counts; see `begin`.
        host: Name of its host.
        gpus: UUIDs of its GPUs.
        id_of: Returns the id of a source, for the slowest one of a row. Called once for each block.
    """

    def __init__(
        self,
        name: str,
        now: float,
        *,
        host: str = "",
        gpus: tuple[str, ...] = (),
        id_of: Callable[[Any], str] = str,
    ) -> None:
        self._name = name
        self._host = host
        self._gpus = gpus
        self._id_of = id_of
        self._rows: dict[LatencyKey, _Row] = {}
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
        """Count one duration. `source` is what `id_of` names; the empty text is nothing."""
        self.extend(key, (seconds,), (source,), tokens=tokens)

    def extend(
        self,
        key: LatencyKey,
        durations_s: Sequence[float],
        sources: Sequence[Any],
        *,
        tokens: int = 0,
        clock_error_s: float = 0.0,
    ) -> None:
        """Count durations in seconds, each with its source: one negative counts as 0, one not finite not at all."""
        row = self._rows.get(key) or self._opened(key)
        row.durations_s += durations_s
        row.sources += sources
        row.tokens += tokens
        if clock_error_s > row.clock_error_s:
            row.clock_error_s = clock_error_s
        if len(row.durations_s) >= BLOCK:
            row.fold(self._id_of)

    def repeat(self, key: LatencyKey, seconds: float, times: int, source: Any, *, tokens: int = 0) -> None:
        """Count one duration so many times."""
        row = self._rows.get(key) or self._opened(key)
        row.repeated.append((seconds, times, source))
        row.tokens += tokens
        if len(row.repeated) >= BLOCK:
            row.fold(self._id_of)

    def _opened(self, key: LatencyKey) -> "_Row":
        if len(self._rows) >= ROWS_LIMIT - OTHERS:
            if len(self._dropped) < DROPPED_LIMIT:
                self._dropped.add(key)
            key = LatencyKey(key.hop, split=key.split)
        return self._rows.setdefault(key, _Row())

    def samples(self, now: float) -> list[LatencySample]:
        """Return what was measured since the last call, at wall clock `now`; no sample if that is nothing.

        Rows too large for one message follow in further ones, which cover no seconds of their own.
        """
        if not self._rows:
            return []
        rows = [
            row for key, one in self._rows.items() if (row := one.told(key, self._id_of)).durations.counts
        ]
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


class _Row:
    """Durations of one key: those that wait, and the histogram of the others."""

    __slots__ = ("_builder", "_slowest", "clock_error_s", "durations_s", "repeated", "sources", "tokens")

    def __init__(self) -> None:
        self.durations_s: list[float] = []
        self.sources: list[Any] = []
        """Of each duration."""
        self.repeated: list[tuple[float, int, Any]] = []
        """Durations that count several times, each with one of its sources."""
        self.tokens = 0
        self.clock_error_s = 0.0
        self._builder = HistogramBuilder()
        self._slowest = -1.0, ""

    def fold(self, id_of: Callable[[Any], str]) -> None:
        """Move the durations that wait into the histogram."""
        builder = self._builder
        if self.durations_s:
            values = np.array(self.durations_s)
            builder.add(values)
            self._note_slowest(values, self.sources, id_of)
            self.durations_s, self.sources = [], []
        if self.repeated:
            seconds, times, sources = zip(*self.repeated, strict=True)
            values = np.array(seconds)
            builder.add(values, times)
            self._note_slowest(values, sources, id_of)
            self.repeated = []

    def _note_slowest(
        self, values: NDArray[np.float64], sources: Sequence[Any], id_of: Callable[[Any], str]
    ) -> None:
        highest = values.max()
        if not np.isfinite(highest):
            values = np.where(np.isfinite(values), values, -1.0)
            highest = values.max()
        if highest > self._slowest[0]:
            source = sources[int(values.argmax())]
            self._slowest = float(highest), "" if source == "" else id_of(source)

    def told(self, key: LatencyKey, id_of: Callable[[Any], str]) -> LatencyRow:
        """Return the row."""
        self.fold(id_of)
        slowest_s, slowest_id = self._slowest
        return LatencyRow(
            hop=key.hop,
            durations=self._builder.histogram(),
            env=key.env[:256],
            split=key.split,
            route=key.route[:256],
            status=key.status,
            engine=key.engine[:256],
            tokens=self.tokens,
            slowest_s=min(max(slowest_s, 0.0), LONGEST_S),
            slowest_id=slowest_id[:512],
            clock_error_s=self.clock_error_s,
        )


def _parts(rows: Iterable[LatencyRow]) -> Iterable[tuple[LatencyRow, ...]]:
    """Yield the rows in parts that fit one message each."""
    part: list[LatencyRow] = []
    size = 0
    for row in rows:
        nbytes = len(msgspec.json.encode(row))
        if part and size + nbytes > SAMPLE_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(row)
        size += nbytes
    if part:
        yield tuple(part)
