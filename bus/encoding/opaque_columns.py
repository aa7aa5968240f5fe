"""Opaque columns: msgpack of any value, with a limit that is checked before decoding. Pure.

One byte of msgpack can become a list or map of 80 bytes in memory, so the size of a block does not bound the cost of
decoding it. The number of values does, and it can be counted without decoding: the first byte of each value gives its
length, and the elements of a list or map follow it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.schemas.errors import InvalidGroupError, LimitExceededError

VALUES_LIMIT: Final = 1 << 20
"""Most values in all opaque columns of a group: about 100 MB of Python objects."""
DEPTH_LIMIT: Final = 64
"""Most levels of lists and maps in a column: every reader decodes so many, however deep its own calls are."""
UNCOUNTED_BYTES: Final = 1 << 16
"""Blocks with fewer bytes in total are not counted: they cannot hold enough values."""


class EncodedColumn(NamedTuple):
    """The value of an opaque column, already encoded and counted, for example in a thread."""

    data: bytes

    @property
    def value(self) -> Any:
        """The decoded value."""
        return msgspec.msgpack.decode(self.data)


def _sizes() -> list[int]:
    """Return the size of a value by its first byte; the negative width of the length where a length follows."""
    sizes = [1] * 256
    for length in range(32):
        sizes[0xA0 + length] = 1 + length
    sizes[0xC4:0xC7] = sizes[0xC7:0xCA] = sizes[0xD9:0xDC] = [-1, -2, -4]
    sizes[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]
    sizes[0xD4:0xD9] = [3, 4, 6, 10, 18]
    sizes[0xDC:0xE0] = [3, 5, 3, 5]
    return sizes


_SIZES: Final = _sizes()
_EXTENSIONS: Final = range(0xC7, 0xCA)
_CONTAINERS: Final = (dict, list, tuple)


def encode_opaque(name: str, value: Any) -> bytes:
    """Encode the value of a column; InvalidGroupError if msgpack cannot represent it, or if it is nested too deeply."""
    try:
        block = msgspec.msgpack.encode(value)
    except RecursionError:
        raise _too_deep(name) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidGroupError(name, f"must be a msgpack value: {error}") from None
    if not _is_flat(value):
        raise _too_deep(name)
    return block


def _too_deep(name: str) -> InvalidGroupError:
    return InvalidGroupError(name, f"must be nested at most {DEPTH_LIMIT} levels deep")


def _is_flat(value: Any) -> bool:
    """Return whether lists and maps are nested within the limit."""
    level = [value]
    for _ in range(DEPTH_LIMIT):
        level = [
            inner
            for outer in level
            if isinstance(outer, _CONTAINERS)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _CONTAINERS)
        ]
        if not level:
            return True
    return False


def require_few(blocks: Mapping[str, bytes]) -> None:
    """Raise InvalidGroupError, naming the largest column, if all columns have more values than `VALUES_LIMIT`."""
    try:
        check_values(blocks.values())
    except LimitExceededError as error:
        raise InvalidGroupError(max(blocks, key=lambda name: len(blocks[name])), str(error)) from None


def check_values(blocks: Iterable[bytes | memoryview]) -> None:
    """Raise LimitExceededError if all blocks have more values than `VALUES_LIMIT`."""
    counted = [memoryview(block) for block in blocks]
    if sum(block.nbytes for block in counted) <= UNCOUNTED_BYTES:
        return
    count = 0
    for block in counted:
        count = _count(block, count)


def _count(data: memoryview, count: int) -> int:
    """Add the number of values to `count`; stop at the limit. Malformed msgpack gives an arbitrary count."""
    at, end = 0, data.nbytes
    while at < end:
        count += 1
        if count > VALUES_LIMIT:
            raise LimitExceededError("number of opaque values", count, VALUES_LIMIT)
        first = data[at]
        size = _SIZES[first]
        if size < 0:
            start = at + 1
            at = start - size + (first in _EXTENSIONS) + int.from_bytes(data[start : start - size], "big")
        else:
            at += size
    return count
