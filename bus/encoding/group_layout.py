"""The layout of a group's body. Pure.

Little-endian: a directory with one row of three u64 (frame, offset, length) for each block, then the blocks at
multiples of 64. A large block may have its own frame.
"""

import mmap
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

ALIGNMENT_BYTES: Final = 64
"""Alignment of blocks: a cache line, and enough for any vector instruction."""
ROW: Final = 24
"""Bytes of one row of the directory."""

Block = Any
"""A contiguous array or memoryview."""
_GAPS: Final = tuple(bytes(size) for size in range(ALIGNMENT_BYTES))


class GroupLayout(NamedTuple):
    """Positions of the blocks of a group."""

    directory: bytes
    body: list[tuple[int, Block]]
    """Offset and block, for each block in the body."""
    big: list[Block]
    """Blocks with their own frames."""
    nbytes: int
    """Size of all frames, in bytes."""


def place(blocks: Sequence[Block], alone_above: int) -> GroupLayout:
    """Return the layout of the blocks; a block of more than `alone_above` bytes gets its own frame."""
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
    return GroupLayout(struct.pack(f"<{len(rows)}Q", *rows), body, big, end + apart)


def lay(places: GroupLayout, memory: mmap.mmap, start: int) -> memoryview:
    """Write a body into memory at `start`, and return a view of it."""
    end = start + len(places.directory)
    memory[start:end] = places.directory
    for offset, block in places.body:
        at = start + offset
        if at > end:
            memory[end:at] = _GAPS[at - end]
        end = at + block.nbytes
        memory[at:end] = block  # slice assignment copies a block of any element type
    return memoryview(memory)[start:end]


def joined(places: GroupLayout) -> memoryview:
    """Return a body in newly allocated memory."""
    parts: list[Block] = [places.directory]
    end = len(places.directory)
    for offset, block in places.body:
        parts += (_GAPS[offset - end], block)
        end = offset + block.nbytes
    return memoryview(b"".join(parts))
