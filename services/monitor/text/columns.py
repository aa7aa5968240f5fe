"""Columns of a group in words: type and rows, and the first values."""

from typing import Final

from rolloutmq.schemas.group import Column
from rolloutmq.schemas.wire.envelope import Dtype

PREVIEW: Final = 8
"""Values that a preview shows."""
PREVIEW_CHARS: Final = 200
"""Characters of a preview of values without a number type."""


def shape(column: Column) -> str:
    """Return type and rows of a column, for example `i32 [4][12..31]`."""
    kind = column.dtype.name.lower()
    if column.dtype is Dtype.OPAQUE:
        return kind
    if not column.lengths:
        return f"{kind} [{column.values.size}]"
    spans = (f"[{level.min()}..{level.max()}]" for level in column.lengths if level.size)
    return f"{kind} [{column.lengths[0].size}]{''.join(spans)}"


def preview(column: Column) -> str:
    """Return the first values of a column."""
    if column.dtype is Dtype.OPAQUE:
        return repr(column.values)[:PREVIEW_CHARS]
    values = column.values[:PREVIEW].tolist()
    return " ".join(map(str, values)) + (" ..." if column.values.size > PREVIEW else "")
