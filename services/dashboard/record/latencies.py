"""Percentiles of hops and calls: of the whole run, and of the last minute or two. Pure.

Histograms of all processes have the same buckets, so they add up exactly. A key is a hop of one environment and split,
engine, route and status class.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from rolloutmq.schemas.statistics.histogram import Histogram, HistogramBuilder
from rolloutmq.schemas.wire.latency import Hop, LatencyRow

KEYS_LIMIT: Final = 256
"""Most keys; rows of further ones are counted."""
RECENT_S: Final = 60.0
"""Length of a window. The recent figures are those of the present and the last one."""
_ORDER: Final = {hop: at for at, hop in enumerate(Hop)}


class Key(NamedTuple):
    """What one row of the percentiles is about."""

    hop: Hop
    env: str
    split: str
    engine: str
    route: str
    status: str


class _Total:
    """Sum of durations, and their tokens."""

    __slots__ = ("durations", "tokens")

    def __init__(self) -> None:
        self.durations = HistogramBuilder()
        self.tokens = 0

    def add(self, durations: Histogram, tokens: int) -> None:
        self.durations.merge(durations)
        self.tokens += tokens


class _Row:
    """Sums of one key."""

    def __init__(self) -> None:
        self.whole, self.last, self.present = _Total(), _Total(), _Total()
        self.slowest_s, self.slowest_id, self.clock_error_s = 0.0, "", 0.0

    def add(self, row: LatencyRow) -> None:
        self.whole.add(row.durations, row.tokens)
        self.present.add(row.durations, row.tokens)
        self.clock_error_s = max(self.clock_error_s, row.clock_error_s)
        if row.slowest_s >= self.slowest_s:
            self.slowest_s, self.slowest_id = row.slowest_s, row.slowest_id

    def turn(self, *, keep: bool) -> None:
        """Begin a window; `keep` the present one as the last."""
        self.last = self.present if keep else _Total()
        self.present = _Total()


class Latencies:
    """Samples in, percentiles out."""

    def __init__(self) -> None:
        self._rows: dict[Key, _Row] = {}
        self._began = self._at = self._first_at = 0.0
        self._is_paired = False
        self.dropped = 0

    def add(self, rows: Iterable[LatencyRow], t: float) -> None:
        """Add the rows of a sample that arrived at `t`, in seconds since the epoch."""
        if not self._first_at:
            self._first_at = self._began = t
        if t - self._began >= RECENT_S:
            self._is_paired = t - self._began < 2 * RECENT_S
            for known in self._rows.values():
                known.turn(keep=self._is_paired)
            self._began = self._began + RECENT_S if self._is_paired else t
        self._at = max(self._at, t)
        for row in rows:
            key = Key(row.hop, row.env, row.split.name.lower(), row.engine, row.route, row.status)
            found = self._rows.get(key)
            if found is None:
                if len(self._rows) >= KEYS_LIMIT:
                    self.dropped += 1
                    continue
                found = self._rows[key] = _Row()
            found.add(row)

    def rows(self) -> list[dict[str, Any]]:
        """Return a JSON object for each key, in the order of a group's way."""
        ordered = sorted(self._rows.items(), key=lambda item: (_ORDER[item[0].hop], *item[0][1:]))
        window_s = max(1.0, self._at - self._began + (RECENT_S if self._is_paired else 0.0))
        span_s = max(1.0, self._at - self._first_at)
        return [_fields(key, row, window_s, span_s) for key, row in ordered]


def _fields(key: Key, row: _Row, window_s: float, span_s: float) -> dict[str, Any]:
    whole = row.whole.durations.histogram()
    lately = row.last.durations.histogram().merged(row.present.durations.histogram())
    recent_tokens = row.last.tokens + row.present.tokens
    return {
        **key._asdict(),
        "count": whole.count,
        "mean_s": _short(whole.mean_s),
        **_percentiles(whole, "", row.slowest_s),
        "recent_count": lately.count,
        **_percentiles(lately, "recent_", row.slowest_s),
        "per_s": _short((lately.count / window_s) if lately.count else whole.count / span_s),
        "tokens_per_s": _short((recent_tokens / window_s) if lately.count else row.whole.tokens / span_s),
        "slowest_s": _short(row.slowest_s),
        "slowest_id": row.slowest_id,
        "clock_error_s": _short(row.clock_error_s),
    }


def _percentiles(durations: Histogram, prefix: str, slowest_s: float) -> dict[str, float | None]:
    names = {"p50_s": 50.0, "p95_s": 95.0, "p99_s": 99.0, "p999_s": 99.9}
    is_known = bool(durations.counts)
    return {
        prefix + name: _short(durations.percentile_s(percent, slowest_s)) if is_known else None
        for name, percent in names.items()
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
