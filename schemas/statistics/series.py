"""Series of bounded size: a table of time buckets whose width doubles whenever it has too many rows. Pure.

A row is there only for a bucket with a value, so a pause costs nothing. Each row knows the version of its last change:
a reader that has seen version v gets the rows that changed since, which are the last ones, or all after a doubling.
"""

from collections.abc import Mapping
from enum import Enum
from math import isfinite
from types import MappingProxyType
from typing import Any, Final, NamedTuple

ROWS_LIMIT: Final = 1024
"""Most rows of a series."""
ROWS_OF_NAME: Final = 8 * ROWS_LIMIT
"""Most rows of all series of a name together: with many keys each has fewer."""
LONGEST_T: Final = 1e11
"""Latest time, in seconds since the epoch: a damaged line may have any."""


class Fold(Enum):
    """Value of a bucket, from the values in it."""

    MEAN = "mean"
    LOW = "low"
    HIGH = "high"
    LAST = "last"
    SUM = "sum"


class _Cell:
    """Values of one column in one bucket."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, fold: Fold, value: float, count: int = 1) -> None:
        """Take a value; the mean of `count` values where the fold is a mean."""
        if not self.count or fold is Fold.LAST:
            self.value = value
        elif fold is Fold.MEAN:
            self.value += (value - self.value) * count / (self.count + count)
        elif fold is Fold.SUM:
            self.value += value
        else:
            self.value = min(self.value, value) if fold is Fold.LOW else max(self.value, value)
        self.count += count


class _Row:
    __slots__ = ("bucket", "cells", "t", "version")

    def __init__(self, bucket: int, columns: int) -> None:
        self.bucket = bucket
        self.cells = [_Cell() for _ in range(columns)]
        self.t = _Cell()
        self.version = 0


class Change(NamedTuple):
    """Rows that changed: cut what is known at row `since`, then append the columns."""

    width_s: float
    since: int
    columns: dict[str, list[float | None]]


class Series:
    """One table. Times are seconds since the epoch, and usually grow; an earlier one counts in the last bucket.

    Args:
        columns: Fold of each column, by name.
        width_s: Width of a bucket at first, in seconds.
        limit: Most rows.
    """

    def __init__(self, columns: Mapping[str, Fold], width_s: float = 1.0, limit: int = ROWS_LIMIT) -> None:
        self._columns = dict(columns)
        self.limit = limit
        self._rows: list[_Row] = []
        self._whole_since = 0
        self.width_s = width_s

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, t: float, values: Mapping[str, float | None], version: int) -> None:
        """Add values at a time; None, and what is not finite, is unknown. `version` must not fall."""
        if not 0 <= t < LONGEST_T:
            return
        bucket = int(t / self.width_s)
        if not self._rows or self._rows[-1].bucket < bucket:
            self._rows.append(_Row(bucket, len(self._columns)))
        row = self._rows[-1]
        row.version = version
        row.t.add(Fold.MEAN, max(t, row.t.value) if row.t.count else t)
        for cell, (name, fold) in zip(row.cells, self._columns.items(), strict=True):
            value = values.get(name)
            if value is not None and isfinite(value):
                cell.add(fold, value)
        while len(self._rows) > self.limit:
            self._widen(version)

    def cut(self, column: str, least: float) -> None:
        """Remove the last rows in which the value of a column is at least `least`; for readers of the whole series."""
        at = list(self._columns).index(column)
        while self._rows and self._rows[-1].cells[at].value >= least:
            del self._rows[-1]

    def since(self, version: int) -> Change | None:
        """Return what changed after a version; None if nothing did."""
        if version < self._whole_since:
            return self._from(0)
        first = len(self._rows)
        while first and self._rows[first - 1].version > version:
            first -= 1
        return self._from(first) if first < len(self._rows) else None

    def _from(self, first: int) -> Change:
        rows = self._rows[first:]
        columns: dict[str, list[float | None]] = {"t": [round(row.t.value, 3) for row in rows]}
        for at, name in enumerate(self._columns):
            columns[name] = [_shown(row.cells[at]) for row in rows]
        return Change(self.width_s, first, columns)

    def _widen(self, version: int) -> None:
        """Double the width, and join the rows that fall into one bucket."""
        self.width_s *= 2
        self._whole_since = version
        joined: list[_Row] = []
        for row in self._rows:
            row.bucket = int(row.t.value / self.width_s)
            if joined and joined[-1].bucket >= row.bucket:
                self._join(joined[-1], row)
            else:
                joined.append(row)
        self._rows = joined

    def _join(self, into: _Row, row: _Row) -> None:
        into.version = max(into.version, row.version)
        into.t.add(Fold.MEAN, row.t.value, row.t.count)
        for kept, cell, fold in zip(into.cells, row.cells, self._columns.values(), strict=True):
            if cell.count:
                kept.add(fold, cell.value, cell.count)


def _shown(cell: _Cell) -> float | None:
    return float(f"{cell.value:.6g}") if cell.count else None


class SeriesBook:
    """Series by name and key, with a bounded number of keys and of rows.

    Args:
        names: Columns of the series of each name.
        keys: Most keys of a name; values of further keys are dropped.
        more: The same for some names.
    """

    def __init__(
        self,
        names: Mapping[str, Mapping[str, Fold]],
        keys: int = 64,
        more: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._names = names
        self._keys = {name: more.get(name, keys) for name in names}
        self._counts = dict.fromkeys(names, 0)
        self._series: dict[tuple[str, str], Series] = {}
        self.version = 0

    def add(self, name: str, key: str, t: float, values: Mapping[str, float | None]) -> None:
        """Add values to a series, see `Series.add`."""
        found = self._series.get((name, key))
        if found is None:
            if self._counts[name] >= self._keys[name]:
                return
            self._counts[name] += 1
            found = self._series[name, key] = Series(self._names[name])
            self._share_rows(name)
        self.version += 1
        found.add(t, values, self.version)

    def _share_rows(self, name: str) -> None:
        limit = min(ROWS_LIMIT, ROWS_OF_NAME // self._counts[name])
        for (other, _), series in self._series.items():
            if other == name:
                series.limit = limit

    def since(self, version: int) -> list[dict[str, Any]]:
        """Return the series that changed after a version, as JSON objects."""
        changes = []
        for (name, key), series in self._series.items():
            if (change := series.since(version)) is not None:
                changes.append(
                    {
                        "name": name,
                        "key": key,
                        "width_s": change.width_s,
                        "from": change.since,
                        "columns": change.columns,
                    }
                )
        return changes
