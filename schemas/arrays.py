"""Fast conversion of lists of Python ints, floats and bools to arrays: a few nanoseconds a number.

`np.array(list)` spends its time on the type of each object. Here msgspec checks that all numbers have the type of the
first. Then `struct` writes the ints, `bytes` the bools, and msgpack (a tag and eight bytes each) the floats. For
anything else (mixed types, numpy scalars, other objects) the result is None and the caller uses numpy, so the two
never disagree.
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

FEW_NUMBERS: Final = 64
"""Fewer numbers are left to numpy, and rows that are shorter on average are joined first: below it the calls cost more
than the numbers."""

_Ints: Final = list[list[int]]
_Floats: Final = list[list[float]]
_Bools: Final = list[list[bool]]
_FLOAT: Final = np.dtype([("tag", "u1"), ("value", ">f8")])
_FLOAT_TAG: Final = 0xCB
"""Tag of a 64-bit float in msgpack."""
_encode: Final = msgspec.msgpack.Encoder().encode


def plain_numbers(rows: Sequence[Any], total: int) -> NDArray[Any] | None:
    """Return the numbers of the rows as one flat array `[total]` of i32, i64, f64 or bool.

    Args:
        rows: Lists or tuples, if the result is not None.
        total: Number of elements in all rows.

    Returns:
        None unless the rows are lists or tuples, and all their numbers are ints that fit 64 bits, all floats, or all
        bools.
    """
    if total < FEW_NUMBERS or not {list, tuple}.issuperset(map(type, rows)):
        return None
    if total < FEW_NUMBERS * len(rows):
        rows = [list(chain.from_iterable(rows))]
    kind: Any = next((type(row[0]) for row in rows if row), None)
    try:
        # msgspec checks strictly: a bool is no int, and numpy scalars match nothing.
        if kind is int:
            msgspec.convert(rows, _Ints)
            return _ints(rows, total)
        if kind is bool:
            msgspec.convert(rows, _Bools)
            return np.frombuffer(bytearray().join(map(bytes, rows)), np.bool_)
        if kind is float:
            msgspec.convert(rows, _Floats)
            return _floats(rows, total)
    except (struct.error, TypeError, ValueError, OverflowError):
        pass
    return None


def _ints(rows: Sequence[Sequence[int]], total: int) -> NDArray[Any]:
    if _are_small(rows[0][:FEW_NUMBERS]) and len(elements := _elements(rows)) == total:
        return np.frombuffer(elements, np.int8).astype("<i4")
    try:
        return _packed(rows, "i")
    except struct.error:
        return _packed(rows, "q")


def _are_small(row: Sequence[int]) -> bool:
    """Return whether each int is one byte of msgpack, which equals its int8, as in masks of 0 and 1."""
    return len(_encode(row)) == _head(len(row)) + len(row)


def _packed(rows: Sequence[Sequence[int]], code: str) -> NDArray[Any]:
    packed = [struct.pack(f"<{len(row)}{code}", *row) for row in rows]
    return np.frombuffer(bytearray().join(packed), f"<{code}")


def _floats(rows: Sequence[Sequence[float]], total: int) -> NDArray[Any] | None:
    """Return None if an int is among them: msgspec accepts ints as floats, also where numpy does not."""
    elements = _elements(rows)
    if len(elements) != total * _FLOAT.itemsize:
        return None
    floats = np.frombuffer(elements, _FLOAT)
    # If the first tag is a float's, the second element begins where its tag is expected, and so on.
    return floats["value"].astype("<f8") if (floats["tag"] == _FLOAT_TAG).all() else None


def _elements(rows: Sequence[Sequence[Any]]) -> bytes:
    """Return the elements of all rows as msgpack, without the array headers."""
    return b"".join([_encode(row)[_head(len(row)) :] for row in rows])


def _head(count: int) -> int:
    """Return the size of the header of a msgpack array."""
    return 1 if count < 1 << 4 else 3 if count < 1 << 16 else 5
