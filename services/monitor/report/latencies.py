"""Percentiles of the hops of groups, from the latency samples of the processes of a run. Pure.

Samples have the same buckets, so their sum is the histogram of all. Broker and workers both measure the rollout: where
the broker did, its figures count, and no group counts twice.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from rolloutmq.schemas.statistics.histogram import Histogram, HistogramBuilder
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import BROKER, Hop, LatencyRow, LatencySample

KEYS_LIMIT: Final = 2048
"""Most sums at once; rows of further environments are left out."""
SLOT_S: Final = 10.0
SLOTS: Final = 6
"""A window covers the present slot and those before it: 50 to 60 s."""
SHOWN: Final = (Hop.ROLLOUT, Hop.QUEUE, Hop.TRAIN)
"""Hops of a line of a view: the others are short or come later."""
GROUP_HOPS: Final = (Hop.ROLLOUT, Hop.SEND, Hop.QUEUE, Hop.TRAIN, Hop.COMMIT)
"""Hops of a group, in order; the other rows are about calls."""


class LatencyKey(NamedTuple):
    """What a sum is about."""

    env: str
    split: Split
    hop: Hop


class Percentiles(NamedTuple):
    """Number of groups, and durations of one hop."""

    groups: int
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, durations: Histogram, slowest_s: float) -> "Percentiles":
        """Return the percentiles of a histogram, none above its longest duration; 0 if that is not known."""
        return cls(
            durations.count, durations.percentile_s(50, slowest_s), durations.percentile_s(99, slowest_s)
        )


class SlowGroup(NamedTuple):
    """The slowest group of a sample."""

    group_id: str
    env: str
    hop: Hop
    seconds: float


class _Sum:
    """Durations of one key, and the longest of them; 0 if no sample told it."""

    def __init__(self) -> None:
        self.builder = HistogramBuilder()
        self.slowest_s = 0.0

    def add(self, durations: Histogram, slowest_s: float) -> None:
        self.builder.merge(durations)
        self.slowest_s = max(self.slowest_s, slowest_s)


class LatencySums:
    """Sums of latency samples by environment, split and hop."""

    def __init__(self) -> None:
        self._sums: dict[tuple[LatencyKey, bool], _Sum] = {}

    def add(self, sample: LatencySample) -> None:
        """Add the rows about hops of groups."""
        for row in sample.rows:
            if row.hop in GROUP_HOPS:
                self._add(row, is_broker=sample.name == BROKER)

    def _add(self, row: LatencyRow, *, is_broker: bool) -> None:
        key = LatencyKey(row.env, row.split, row.hop), is_broker
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) >= KEYS_LIMIT:
                return
            found = self._sums[key] = _Sum()
        found.add(row.durations, row.slowest_s)

    def percentiles(self) -> dict[LatencyKey, Percentiles]:
        """Return the percentiles of each key with durations, by environment, split and hop."""
        return merged([self])


def merged(parts: Iterable[LatencySums]) -> dict[LatencyKey, Percentiles]:
    """Return the percentiles of several sums together, by environment, split and hop."""
    totals: dict[tuple[LatencyKey, bool], _Sum] = {}
    for part in parts:
        for key, one in part._sums.items():
            totals.setdefault(key, _Sum()).add(one.builder.histogram(), one.slowest_s)
    summed = {key: Percentiles.of(one.builder.histogram(), one.slowest_s) for key, one in totals.items()}
    found = {key: one for (key, is_broker), one in summed.items() if not is_broker}
    found |= {key: one for (key, is_broker), one in summed.items() if is_broker and one.groups}
    order = {hop: place for place, hop in enumerate(GROUP_HOPS)}
    keys = sorted(found, key=lambda key: (key.env, key.split.value, order[key.hop]))
    return {key: found[key] for key in keys if found[key].groups}


class LatencyWindow:
    """Percentiles of about the last minute, and its slowest groups. The caller passes times of one steady clock."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, LatencySums]] = deque()
        self._slowest: dict[tuple[LatencyKey, int], SlowGroup] = {}
        self._known: tuple[float, dict[LatencyKey, Percentiles]] = (-1.0, {})

    def add(self, sample: LatencySample, now: float) -> None:
        """Take a sample received at `now`."""
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, LatencySums()))
            self._forget(number)
        self._slots[-1][1].add(sample)
        for row in sample.rows:
            if row.hop in GROUP_HOPS and row.slowest_id:
                self._note(row, number)

    def _note(self, row: LatencyRow, number: int) -> None:
        key = LatencyKey(row.env, row.split, row.hop), number
        known = self._slowest.get(key)
        if known is None and len(self._slowest) >= KEYS_LIMIT:
            return
        if known is None or known.seconds < row.slowest_s:
            self._slowest[key] = SlowGroup(row.slowest_id, row.env, row.hop, row.slowest_s)

    def _forget(self, number: int) -> None:
        while self._slots and self._slots[0][0] <= number - SLOTS:
            self._slots.popleft()
        self._slowest = {key: one for key, one in self._slowest.items() if key[1] > number - SLOTS}

    def percentiles(self, now: float) -> Mapping[LatencyKey, Percentiles]:
        """Return the percentiles of the window, by environment, split and hop. Recomputed once a second."""
        at, known = self._known
        if at < 0.0 or not 0.0 <= now - at < 1.0:
            self._forget(int(now // SLOT_S))
            known = merged(sums for _, sums in self._slots)
            self._known = now, known
        return known

    def slowest(self, now: float) -> list[SlowGroup]:
        """Return the slowest groups of the window, the slowest first, each once."""
        self._forget(int(now // SLOT_S))
        found: dict[str, SlowGroup] = {}
        for one in sorted(self._slowest.values(), key=lambda one: -one.seconds):
            found.setdefault(one.group_id, one)
        return list(found.values())


def plain(found: Mapping[LatencyKey, Percentiles]) -> list[dict[str, Any]]:
    """Return percentiles as JSON objects."""
    return [
        {"env": key.env, "split": key.split.name.lower(), "hop": key.hop.value, **one._asdict()}
        for key, one in found.items()
    ]
