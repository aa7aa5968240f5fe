"""Lists of Python's own ints, floats and bools to arrays, at a few nanoseconds a number.

What takes the time of `np.array(list)` is to find out what the objects are, one by one. Here msgspec says whether all
are of the first one's type; then `struct` writes the ints, `bytes` the bools, and msgpack, where a float is a tag and
eight bytes, the floats. Anything else (numbers of several types, numpy's scalars, what is no number) is for numpy to
judge: the answer is None, and nothing is converted that numpy would refuse or convert to something else.
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

FEW_NUMBERS: Final = 64
"""Fewer than that are left to numpy, and rows that are shorter on the average joined first: the calls would cost more
than the numbers."""

_Ints: Final = list[list[int]]
_Floats: Final = list[list[float]]
_Bools: Final = list[list[bool]]
_FLOAT: Final = np.dtype([("tag", "u1"), ("value", ">f8")])
_FLOAT_TAG: Final = 0xCB
"""Of msgpack."""
_encode: Final = msgspec.msgpack.Encoder().encode


def plain_numbers(rows: Sequence[Any], total: int) -> NDArray[Any] | None:
    """Return the numbers of some rows one after another: i32, i64, f64 or bool.

    Args:
        rows: What may be lists of numbers.
        total: How many numbers they have together.

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
        # Whether a number is of the type is asked strictly: no bool is an int, and no scalar of numpy anything.
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
    """Whether each is one byte of msgpack, which is the int8 itself, as in masks of 0 and 1."""
    return len(_encode(row)) == _head(len(row)) + len(row)


def _packed(rows: Sequence[Sequence[int]], code: str) -> NDArray[Any]:
    packed = [struct.pack(f"<{len(row)}{code}", *row) for row in rows]
    return np.frombuffer(bytearray().join(packed), f"<{code}")


def _floats(rows: Sequence[Sequence[float]], total: int) -> NDArray[Any] | None:
    """Return None if there is an int among them: msgspec takes those for floats, also where numpy does not."""
    elements = _elements(rows)
    if len(elements) != total * _FLOAT.itemsize:
        return None
    floats = np.frombuffer(elements, _FLOAT)
    # If the first tag is that of a float, the second element begins where its tag is looked for, and so on.
    return floats["value"].astype("<f8") if (floats["tag"] == _FLOAT_TAG).all() else None


def _elements(rows: Sequence[Sequence[Any]]) -> bytes:
    """Return the elements of all rows as msgpack, without the heads of the rows."""
    return b"".join([_encode(row)[_head(len(row)) :] for row in rows])


def _head(count: int) -> int:
    """Return the bytes in front of the elements of an array of msgpack."""
    return 1 if count < 1 << 4 else 3 if count < 1 << 16 else 5
