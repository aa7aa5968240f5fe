"""The body of a group: where its blocks lie. Pure.

Little-endian: a directory with one row of three u64 (frame, offset, length) for each block, then the blocks at offsets
that are multiples of 64. A large block may lie alone in a frame of its own.
"""

import mmap
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

ALIGNMENT_BYTES: Final = 64
"""Offsets of blocks: a cache line, and enough for any vector instruction."""
ROW: Final = 24
"""Bytes of a row of the directory."""

Block = Any
"""An array or a memoryview, of one piece in memory."""
_GAPS: Final = tuple(bytes(size) for size in range(ALIGNMENT_BYTES))


class Places(NamedTuple):
    """Where each block of a group lies."""

    directory: bytes
    body: list[tuple[int, Block]]
    """Offset of each block that lies in the body."""
    big: list[Block]
    """Blocks with frames of their own."""
    nbytes: int
    """Size of all frames together."""


def place(blocks: Sequence[Block], alone_above: int) -> Places:
    """Find a place for each block; those above that many bytes get a frame of their own."""
    rows: list[int] = []
    body: list[tuple[int, Block]] = []
    big: list[Block] = []
    end = len(blocks) * ROW
    apart = 0
    for block in blocks:
        nbytes = block.nbytes
        if nbytes > alone_above:
            big.append(block)
            rows += (len(big), 0, nbytes)
            apart += nbytes
        else:
            end += -end % ALIGNMENT_BYTES
            body.append((end, block))
            rows += (0, end, nbytes)
            end += nbytes
    return Places(struct.pack(f"<{len(rows)}Q", *rows), body, big, end + apart)


def lay(places: Places, memory: mmap.mmap, start: int) -> memoryview:
    """Write a body, and return where it lies."""
    end = start + len(places.directory)
    memory[start:end] = places.directory
    for offset, block in places.body:
        at = start + offset
        if at > end:
            memory[end:at] = _GAPS[at - end]
        end = at + block.nbytes
        memory[at:end] = block  # Assigned like this, it is copied whatever its elements are.
    return memoryview(memory)[start:end]


def joined(places: Places) -> memoryview:
    """Return a body in memory of its own."""
    parts: list[Block] = [places.directory]
    end = len(places.directory)
    for offset, block in places.body:
        parts += (_GAPS[offset - end], block)
        end = offset + block.nbytes
    return memoryview(b"".join(parts))
