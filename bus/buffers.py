"""Memory that was read into before and that nobody refers to any more, for what is read next.

Fresh memory costs as much as the copy itself: the kernel clears each page of it and takes it back with the next free.
A buffer is used again only when this list has the last reference to it; an array that a trainer keeps is its own.
"""

import sys
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES: Final = 32 << 10
"""What is smaller comes from memory that the process has anyway."""
KEPT_BYTES: Final = 64 << 20
"""So much is remembered; of what is beyond, the oldest belongs to whoever still refers to it."""
LOOK: Final = 4
"""Buffers that are looked at for one that is free and fits, the oldest first."""
_ROUND_BYTES: Final = 16 << 10


class Buffers:
    """Buffers of one reader."""

    def __init__(self) -> None:
        self._kept: deque[NDArray[np.uint8]] = deque()
        self._kept_bytes = 0

    def copy(self, view: memoryview) -> memoryview:
        """Return a copy of some bytes, read-only, which lasts as long as anybody refers to it."""
        nbytes = view.nbytes
        if nbytes < LEAST_BYTES:
            return memoryview(bytes(view))
        copied = self._buffer(nbytes).data[:nbytes]
        copied[:] = view
        return copied.toreadonly()

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        kept = self._kept
        for _ in range(min(LOOK, len(kept))):
            kept.rotate(-1)
            if nbytes <= kept[-1].nbytes <= 2 * nbytes + _ROUND_BYTES and _references(kept) == _FREE:
                return kept[-1]
        made = np.empty(nbytes + -nbytes % _ROUND_BYTES, np.uint8)
        kept.append(made)
        self._kept_bytes += made.nbytes
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= kept.popleft().nbytes
        return made


def _references(kept: deque[NDArray[np.uint8]]) -> int:
    return sys.getrefcount(kept[-1])


_FREE: Final = _references(deque([np.empty(1, np.uint8)]))
"""References to a buffer that only the list has, as this interpreter counts them."""
