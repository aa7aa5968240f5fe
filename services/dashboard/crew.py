"""A page of the list of workers: sorted, filtered, and cut. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from rolloutmq.services.monitor.status.worker_view import WorkerRow, by_number, trouble_text

ROWS_LIMIT: Final = 1000
"""Most rows of one reply."""
_NUMBERS: Final = (
    *("age_s", "in_hand", "produced", "abandoned", "blocked_s", "silent_s", "restarts", "crashes", "pid"),
)
_TEXTS: Final[Mapping[str, Callable[[WorkerRow], Any]]] = {
    "worker": lambda row: by_number(row.worker),
    "env": lambda row: row.env,
    "state": lambda row: row.counts_as,
}
SORTS: Final = (*_TEXTS, *_NUMBERS)
"""Columns by which the list can be sorted."""


def page_of(
    crew: Sequence[WorkerRow], *, sort: str, descending: bool, wanted: str, offset: int, limit: int
) -> dict[str, Any]:
    """Return some rows of the list.

    Args:
        crew: All workers.
        sort: One of `SORTS`. Unknown values come last.
        descending: The largest first.
        wanted: Part of the name, environment, state or reason, in any case; empty for all.
        offset: First row.
        limit: Most rows, up to `ROWS_LIMIT`.
    """
    part = wanted.casefold()
    found = [row for row in crew if not part or part in _searched(row)]
    found.sort(key=lambda row: by_number(row.worker))
    if (key := _TEXTS.get(sort)) is not None:
        found.sort(key=key, reverse=descending)
    else:
        found = _by_value(found, sort, descending=descending)
    shown = found[offset : offset + min(limit, ROWS_LIMIT)]
    return {
        "total": len(crew),
        "matching": len(found),
        "offset": offset,
        "rows": [_fields(row) for row in shown],
    }


def _by_value(rows: list[WorkerRow], sort: str, *, descending: bool) -> list[WorkerRow]:
    known = [row for row in rows if getattr(row, sort) is not None]
    known.sort(key=lambda row: float(getattr(row, sort)), reverse=descending)
    return known + [row for row in rows if getattr(row, sort) is None]


def _searched(row: WorkerRow) -> str:
    return "\n".join((row.worker, row.env, row.counts_as, row.reason)).casefold()


def _fields(row: WorkerRow) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(row)
    return {
        **plain,
        "state": row.counts_as,
        "unwell": row.is_unwell,
        "trouble": trouble_text(row) if row.is_unwell else "",
    }
