"""The layout of a group's body. Pure.

Little-endian: a directory with one row of three u64 (frame, offset, length) for each block, then the blocks at
multiples of 64. A large block may have its own frame.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

ALIGNMENT_BYTES: Final = 64
"""Alignment of blocks: a cache line, and enough for any vector instruction."""
ROW: Final = 24
"""Bytes of one row of the directory."""
LAYOUTS_KEPT: Final = 256
"""Cached layouts: groups of equal shape have blocks of equal sizes."""

Block = Any
"""A contiguous array, or bytes."""
_GAPS: Final = tuple(bytes(size) for size in range(ALIGNMENT_BYTES))


class GroupLayout(NamedTuple):
    """Positions of the blocks of a group. They depend on the sizes of the blocks only."""

    before: tuple[bytes, ...]
    """What precedes each block of the body: the directory and a gap, later a gap."""
    big: tuple[int, ...]
    """Indices of the blocks with their own frames."""
    body_bytes: int
    """Size of the body, in bytes."""
    nbytes: int
    """Size of all frames, in bytes."""

    def body(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the pieces of the body in their order."""
        if self.big:
            big = set(self.big)
            blocks = [block for index, block in enumerate(blocks) if index not in big]
        if not blocks:
            return list(self.before)
        pieces: list[Block] = [None] * (2 * len(blocks))
        pieces[::2] = self.before
        pieces[1::2] = blocks
        return pieces


@lru_cache(maxsize=LAYOUTS_KEPT)
def place(sizes: tuple[int, ...], alone_above: int) -> GroupLayout:
    """Return the layout of blocks of these sizes; one of more than `alone_above` bytes gets its own frame."""
    rows: list[int] = []
    gaps: list[bytes] = []
    big: list[int] = []
    end = len(sizes) * ROW
    apart = 0
    for index, nbytes in enumerate(sizes):
        if nbytes > alone_above:
            big.append(index)
            rows += (len(big), 0, nbytes)
            apart += nbytes
        else:
            gap = -end % ALIGNMENT_BYTES
            gaps.append(_GAPS[gap])
            rows += (0, end + gap, nbytes)
            end += gap + nbytes
    directory = struct.pack(f"<{len(rows)}Q", *rows)
    before = (directory + gaps[0], *gaps[1:]) if gaps else (directory,)
    return GroupLayout(before, tuple(big), end, end + apart)
