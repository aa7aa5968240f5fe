"""The end of a segment: written in whole blocks of the disk and, what is to be synced, past the system's cache.

To copy a group into the cache costs more than all else that the journal does for it. A group that lies in an arena
where a block begins, and whose frame begins at one in the file, is taken from there by the disk itself; what goes
before it, what is left of it behind its last whole block, and small groups are copied into blocks in between. One that
lies anywhere else goes through the cache, with all that is written in the same call, and so do small groups alone.

What is flushed ends with a filler, so that no block is ever written twice, and, where the file has room for it, with a
block of zeros: the file may be one that is written over, and those tell its records from what it had before.
"""

import errno
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.slots import PAGED_BYTES
from rolloutmq.services.broker.journal.appender import BUFFERS_LIMIT, WRITE_BYTES, Appender, Patience
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.segment import (
    ALIGNMENT_BYTES,
    BLOCK_BYTES,
    filler,
    gap_before,
    head_of,
)

_STAGE_BYTES: Final = 1 << 20
_RESERVED: Final = 4 * BLOCK_BYTES
"""For what ends a flush."""
_ZEROS: Final = memoryview(bytes(BLOCK_BYTES))


class Stage:
    """Memory for blocks that are put together, used again after each flush. For one file at a time."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, _STAGE_BYTES))
        self.start = self.end = 0
        """What was put here since the last piece was taken."""

    def has(self, nbytes: int) -> bool:
        """Whether there is room for so much, and for the end of a flush behind it."""
        return self.end + nbytes <= _STAGE_BYTES - _RESERVED

    def put(self, data: bytes | memoryview) -> None:
        end = self.end + len(data)
        self.memory[self.end : end] = data
        self.end = end

    def take(self) -> memoryview:
        """Return what was put here since the last time."""
        piece = self.memory[self.start : self.end]
        self.start = self.end
        return piece

    def clear(self) -> None:
        self.start = self.end = 0


class BlockAppender(Appender):
    """Appends groups to a segment, which may be one that is written over.

    Attributes:
        end: Where the last record ends.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        nonce: bytes,
        patience: Patience,
        stage: Stage,
        *,
        for_sync: bool,
        fd: int | None = None,
    ) -> None:
        super().__init__(disk, path, nonce, patience, for_sync=for_sync, fd=fd)
        self.end = 0
        self._stage = stage
        self._limit = 0
        self._may_go_direct = for_sync
        self._direct = False
        self._in_blocks = self._cached = False
        """Something in the next write lies in blocks; something must go through the cache."""
        self._cached_from: int | None = None
        """From here on the cache may have something that was written since the last sync."""

    def allocate(self, nbytes: int) -> None:
        super().allocate(nbytes)
        self._limit = nbytes

    def add_raw(self, data: bytes) -> None:
        self._put(data)
        self.end = self.offset

    def add_group(
        self, kind: int, meta: bytes, frames: Sequence[Any], crc: int, *, in_blocks: bool = False
    ) -> int:
        """Append a record and return its offset.

        Args:
            kind, meta, frames: What it says.
            crc: Checksum of the frames.
            in_blocks: There is one frame, and it begins where a block of memory does.
        """
        offset = self.offset
        views = [memoryview(frame).cast("B") for frame in frames]
        sizes = [view.nbytes for view in views]
        small = sum(sizes) < PAGED_BYTES
        gap = 0 if small or not in_blocks else gap_before(offset, len(meta), 1)
        self._put(head_of(self._nonce, offset, kind, meta, sizes, crc, gap))
        if gap:
            self._put(_ZEROS[:gap])
        for view in views:
            if small:
                self._put(view)
            elif in_blocks:
                self._in_blocks = True
                whole = view.nbytes - view.nbytes % BLOCK_BYTES
                self._lay(view[:whole])
                self._put(view[whole:])
            else:
                self._cached = True
                self._lay(view)
        if rest := -self.offset % ALIGNMENT_BYTES:
            self._put(_ZEROS[:rest])
        self.end = self.offset
        if self._unwritten >= WRITE_BYTES or not self._stage.has(2 * PAGED_BYTES):
            self.flush()
            if self._cached_from is not None:
                self._hasten()
        elif len(self._buffers) > BUFFERS_LIMIT // 2:
            self.flush()
        return offset

    @property
    def _unwritten(self) -> int:
        return self.offset - self._written

    def _put(self, data: bytes | memoryview) -> None:
        """Have something written from the stage, or from where it is if there is no room."""
        if self._stage.has(len(data)):
            self._stage.put(data)
            self.offset += len(data)
        else:
            self._cached = True
            self._lay(data)

    def _lay(self, data: bytes | memoryview) -> None:
        """Have something written from where it is."""
        self._take_piece()
        self._buffers.append(data)
        self.offset += len(data)

    def _take_piece(self) -> None:
        piece = self._stage.take()
        if piece:
            self._buffers.append(piece)

    def flush(self, *, cache: bool = False) -> None:
        """Write all that was added; waits while there is no room.

        Args:
            cache: Through the system's cache in any case, since it will be read again soon.
        """
        if not self._unwritten:
            return
        tail = filler(self._nonce, self.offset)
        self._stage.put(tail)
        self.offset += len(tail)
        if self.offset + BLOCK_BYTES <= self._limit:
            self._stage.put(_ZEROS)
        self._take_piece()
        self._go(direct=self._may_go_direct and self._in_blocks and not (self._cached or cache))
        buffers, self._buffers = self._buffers, []
        self._write(buffers)
        self._written = self.offset
        self._in_blocks = self._cached = False
        self._stage.clear()

    def forget_cached(self) -> None:
        """Let go of the cache of what was written through it and synced."""
        if self._cached_from is not None:
            self._disk.forget_cached(self._fd, self._cached_from, self._written - self._cached_from)
            self._cached_from = None

    def cut(self, nbytes: int | None = None) -> None:
        super().cut(self.end if nbytes is None else nbytes)

    def _pwritev(self, buffers: list[Any]) -> int:
        try:
            return super()._pwritev(buffers)
        except OSError as error:
            # A file system may say only now that it does not go past its cache, or not from where a short write ended.
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._may_go_direct = False
        self._go(direct=False)
        return super()._pwritev(buffers)

    def _go(self, *, direct: bool) -> None:
        if direct != self._direct:
            try:
                self._disk.go_direct(self._fd, direct=direct)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._may_go_direct = False
            else:
                self._direct = direct
        if not self._direct and self._cached_from is None:
            self._cached_from = self._begun = self._written
