"""Percentiles of the whole run by worker, host, engine or GPU: which of them is slow. Pure.

A reply has the slowest rows of each hop: of a thousand workers a person looks at these, or filters by name.
"""

from typing import Any, Final

from rolloutmq.services.monitor.profile.latencies import By, LatencyTotals, Sampled, Sum, SumKey

PARTS: Final = (By.WORKER, By.HOST, By.ENGINE, By.GPU)
"""What rows can be summed by; those by environment are sections of the state."""
KEYS_LIMIT: Final = 2048
"""Most rows of a part: each takes 11 kB. Further names share one row of their hop."""
ROWS_LIMIT: Final = 200
"""Most rows of a hop in one reply."""
NAME_CHARS: Final = 200
_PERCENTILES: Final = {"p50_s": 50.0, "p95_s": 95.0, "p99_s": 99.0, "p999_s": 99.9}


class LatencyParts:
    """Samples in, the slowest rows out."""

    def __init__(self) -> None:
        self._totals = {by: LatencyTotals(by, KEYS_LIMIT) for by in PARTS}

    def add(self, sample: Sampled) -> None:
        """Add a sample; samples come in the order of their arrival."""
        for totals in self._totals.values():
            totals.add(sample)

    def page(self, by: By, wanted: str, limit: int) -> dict[str, Any]:
        """Return the rows with the largest 99th percentile of each hop, as a JSON object.

        Args:
            by: One of `PARTS`.
            wanted: Part of the name, in any case; empty for all.
            limit: Most rows of a hop, up to `ROWS_LIMIT`.
        """
        totals, part = self._totals[by], wanted.casefold()
        keys = totals.keys()
        by_hop: dict[str, list[SumKey]] = {}
        for key in keys:
            if part in key.label.casefold():
                by_hop.setdefault(key.hop.value, []).append(key)
        shown = [
            key
            for found in by_hop.values()
            for key in sorted(found, key=lambda key: -totals.percentile_s(key, 99))[: min(limit, ROWS_LIMIT)]
        ]
        return {
            "by": by.value,
            "total": len(keys),
            "matching": sum(map(len, by_hop.values())),
            "rows": [_fields(key, totals.sum(key)) for key in shown],
        }


def _fields(key: SumKey, one: Sum) -> dict[str, Any]:
    return {
        "name": key.label[:NAME_CHARS],
        "hop": key.hop.value,
        "split": key.split.name.lower(),
        "status": key.status,
        "count": one.durations.count,
        **{name: _short(one.percentile_s(percent)) for name, percent in _PERCENTILES.items()},
        "per_s": _short(one.per_s),
        "tokens_per_s": _short(one.tokens_per_s),
        "slowest_s": _short(one.slowest_s),
        "slowest_id": one.slowest_id,
        "clock_error_s": _short(one.clock_error_s),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
