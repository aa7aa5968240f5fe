"""Latency samples of a large fleet, merged until there is room for their lines: each worker sends one a second.

A second has room for `LINES_PER_S` lines. Beyond it the samples of a process are added to its sample that waits, and
whoever has waited longest is written next: of a thousand workers each has a line every 16 s. Nothing is left out, and
every percentile of the run is the same; only the time of a rollout within the run is less exact. A recorder that is
killed loses what waits. Pure.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from rolloutmq.schemas.wire.latency import BROKER, ROWS_LIMIT, LatencyRow, LatencySample

LINES_PER_S: Final = 64
"""Lines of latency samples between two flushes. The broker's are written at once, beside them."""
NAMES_LIMIT: Final = 4096
"""Most processes whose samples wait apart; those of further ones are added up under `OTHERS`."""
OTHERS: Final = "(others)"
SAMPLE_BYTES: Final = 40 << 10
"""Size from which a sample is written at once: a line of 64 KiB would lose its rows."""
_ROW_BYTES: Final = 320
_BUCKET_BYTES: Final = 4
_CHAR_BYTES: Final = 6
_Row = tuple[str, str, int, str, str, str]


class Due(NamedTuple):
    """A sample to write: its topic, and the wall clock of its last arrival."""

    topic: bytes
    sample: LatencySample
    at: float


class _Waiting:
    """The samples of one process that wait, as one."""

    def __init__(self, topic: bytes, first: LatencySample, now: float, name: str) -> None:
        self._topic, self._last, self._at, self._name = topic, first, now, name
        self._since_s = 0.0
        self._dropped = 0
        self.rows: dict[_Row, LatencyRow] = {}
        self.nbytes = 0
        self.add(first, now)

    def add(self, sample: LatencySample, now: float) -> None:
        self._last, self._at = sample, now
        self._since_s += sample.since_s
        self._dropped = max(self._dropped, sample.dropped_rows)
        for row in sample.rows:
            key = (row.hop.value, row.env, row.split.value, row.route, row.status, row.engine)
            before = self.rows.get(key)
            self.rows[key] = row if before is None else _joined(before, row)
            self.nbytes += _size_of(self.rows[key]) - (0 if before is None else _size_of(before))

    def due(self) -> Due:
        """Return all of them as one."""
        is_one = self._name == self._last.name
        merged = msgspec.structs.replace(
            self._last,
            name=self._name,
            host=self._last.host if is_one else "",
            gpus=self._last.gpus if is_one else (),
            since_s=self._since_s,
            rows=tuple(self.rows.values()),
            dropped_rows=self._dropped,
        )
        return Due(self._topic, merged, self._at)


class SampleMerger:
    """Samples in, at most so many out between two flushes."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._room = LINES_PER_S

    def __len__(self) -> int:
        """Return the number of processes whose samples wait."""
        return len(self._waiting)

    def take(self, topic: bytes, sample: LatencySample, now: float) -> Due | None:
        """Take a sample that arrived at wall clock `now`; return one to write at once, if there is one."""
        if sample.name == BROKER:
            return Due(topic, sample, now)
        if self._room and sample.name not in self._waiting:
            self._room -= 1
            return Due(topic, sample, now)
        name = sample.name
        if name not in self._waiting and len(self._waiting) >= NAMES_LIMIT:
            name = OTHERS
        found = self._waiting.get(name)
        if found is None:
            self._waiting[name] = _Waiting(topic, sample, now, name)
            return None
        is_full = found.nbytes + sum(map(_size_of, sample.rows)) > SAMPLE_BYTES
        if not is_full and len(found.rows) + len(sample.rows) <= ROWS_LIMIT:
            found.add(sample, now)
            return None
        del self._waiting[name]
        self._waiting[name] = _Waiting(topic, sample, now, name)
        return found.due()

    def flushed(self) -> Iterator[Due]:
        """Yield the samples that have waited longest, as many as a second has room for."""
        names = [name for name, _ in zip(self._waiting, range(LINES_PER_S), strict=False)]
        self._room = LINES_PER_S - len(names)
        for name in names:
            yield self._waiting.pop(name).due()

    def rest(self) -> Iterator[Due]:
        """Yield all samples that wait."""
        for name in list(self._waiting):
            yield self._waiting.pop(name).due()


def _joined(one: LatencyRow, other: LatencyRow) -> LatencyRow:
    slower = other if other.slowest_s >= one.slowest_s else one
    return msgspec.structs.replace(
        one,
        durations=one.durations.merged(other.durations),
        tokens=one.tokens + other.tokens,
        slowest_s=slower.slowest_s,
        slowest_id=slower.slowest_id,
        clock_error_s=max(one.clock_error_s, other.clock_error_s),
    )


def _size_of(row: LatencyRow) -> int:
    """Return about as many bytes as a row has in JSON, or more."""
    texts = len(row.env) + len(row.route) + len(row.engine) + len(row.slowest_id)
    return _ROW_BYTES + _BUCKET_BYTES * len(row.durations.counts) + _CHAR_BYTES * texts
