"""A pool of read buffers, reused once nothing refers to them.

New memory costs as much as the copy itself: the kernel clears each page and takes it back when it is freed. A buffer is
reused only if the pool has the last reference to it, so a trainer's array is never overwritten.
"""

import sys
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES: Final = 32 << 10
"""Smaller copies use ordinary memory of the process."""
KEPT_BYTES: Final = 64 << 20
"""Size of the pool. Above it the pool drops its reference to the oldest buffer."""
LOOK: Final = 4
"""Buffers examined for a free, fitting one, the oldest first."""
_ROUND_BYTES: Final = 16 << 10


class BufferPool:
    """Buffers of one reader."""

    def __init__(self) -> None:
        self._kept: deque[NDArray[np.uint8]] = deque()
        self._kept_bytes = 0

    def copy(self, source: memoryview | NDArray[np.uint8]) -> bytes | NDArray[np.uint8]:
        """Return a read-only copy of some bytes, valid as long as it or a view of it is referenced.

        A small one is `bytes`.
        """
        nbytes = source.nbytes
        if nbytes < LEAST_BYTES:
            return source.tobytes()
        copied = self._buffer(nbytes)[:nbytes]
        copied[:] = source
        copied.flags.writeable = False
        return copied

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
"""Reference count of an unused buffer in the pool, as this interpreter counts."""
