"""The direct writer: appends groups to a segment in whole disk blocks and, where they are synced, past the page cache.

Copying a group into the page cache costs more than all other work of the journal for it. A group that begins at a
block boundary of an arena, and whose frame begins at one in the file, is therefore read from the arena by the disk
itself. Its head, its rest behind the last whole block, and small groups are copied into blocks in between. All other
groups go through the page cache, with everything written in the same call, and so do calls with small groups alone.

A flush ends with a filler, so no block is ever written twice. Where the file has room, a block of zeros follows:
the file may be reused, and the zeros separate its records from leftovers.
"""

import errno
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.shm.arena_allocator import PAGED_BYTES
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.records import (
    ALIGNMENT_BYTES,
    BLOCK_BYTES,
    filler,
    gap_before,
    head_of,
)
from rolloutmq.services.broker.journal.write.record_writer import (
    BUFFERS_LIMIT,
    WRITE_BYTES,
    DiskRetry,
    RecordWriter,
)

_STAGE_BYTES: Final = 1 << 20
_RESERVED: Final = 4 * BLOCK_BYTES
"""Room for the end of a flush."""
_ZEROS: Final = bytes(BLOCK_BYTES)


class StagingBuffer:
    """Memory in which blocks are assembled, reused after each flush. For one file at a time."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, _STAGE_BYTES))
        self.start = self.end = 0
        """Range assembled since the last `take`."""

    def has(self, nbytes: int) -> bool:
        """Return whether there is room for `nbytes`, and for the end of a flush behind them."""
        return self.end + nbytes <= _STAGE_BYTES - _RESERVED

    def put(self, data: bytes | memoryview, nbytes: int, limit: int = _STAGE_BYTES - _RESERVED) -> bool:
        """Assemble `nbytes` of data; False if they would end beyond `limit`."""
        start = self.end
        end = start + nbytes
        if end > limit:
            return False
        self.memory[start:end] = data
        self.end = end
        return True

    def take(self) -> memoryview:
        """Return the bytes assembled since the last call."""
        piece = self.memory[self.start : self.end]
        self.start = self.end
        return piece

    def clear(self) -> None:
        self.start = self.end = 0


class DirectWriter(RecordWriter):
    """Appends groups to a segment, which may reuse an old file.

    Attributes:
        end: Where the last record ends.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        nonce: bytes,
        patience: DiskRetry,
        stage: StagingBuffer,
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
        """The next write has data in blocks of memory; it has data for the page cache."""
        self._cached_from: int | None = None
        """From here on the page cache may hold data written since the last sync."""

    def allocate(self, nbytes: int) -> None:
        super().allocate(nbytes)
        self._limit = nbytes

    def limit(self, nbytes: int) -> None:
        """Return the reserved room behind `nbytes`."""
        self._disk.truncate(self._fd, nbytes)

    def add_raw(self, data: bytes) -> None:
        self._put(data)
        self.end = self.offset

    def add_group(
        self, kind: int, meta: bytes, frames: Sequence[Any], crc: int, *, in_blocks: bool = False
    ) -> int:
        """Append a record and return its offset.

        Args:
            kind, meta, frames: Content of the record.
            crc: Checksum of the frames.
            in_blocks: There is one frame, and it begins at a block boundary of memory.
        """
        offset = self.offset
        views = [memoryview(frame).cast("B") for frame in frames]
        sizes = [view.nbytes for view in views]
        if sum(sizes) < PAGED_BYTES:
            self._put(head_of(self._nonce, offset, kind, meta, sizes, crc))
            for view in views:
                self._put(view)
        elif in_blocks:
            (view,) = views
            gap = gap_before(offset, len(meta), 1)
            self._put(head_of(self._nonce, offset, kind, meta, sizes, crc, gap) + _ZEROS[:gap])
            whole = sizes[0] - sizes[0] % BLOCK_BYTES
            self._in_blocks = True
            self._queue_in_place(view[:whole])
            self._put(view[whole:])
        else:
            self._put(head_of(self._nonce, offset, kind, meta, sizes, crc))
            self._cached = True
            for view in views:
                self._queue_in_place(view)
        end = self.offset
        if rest := -end % ALIGNMENT_BYTES:
            self._put(_ZEROS[:rest])
        self.end = self.offset
        if self.end - self._written >= WRITE_BYTES or not self._stage.has(2 * PAGED_BYTES):
            self.flush()
            if self._cached_from is not None:
                self._hasten()
        elif len(self._buffers) > BUFFERS_LIMIT // 2:
            self.flush()
        return offset

    def _put(self, data: bytes | memoryview) -> None:
        """Queue bytes through the staging buffer, or from their place if there is no room in it."""
        nbytes = len(data)
        if self._stage.put(data, nbytes):
            self.offset += nbytes
        else:
            self._cached = True
            self._queue_in_place(data)

    def _queue_in_place(self, data: bytes | memoryview) -> None:
        """Queue bytes to be written from their place."""
        self._take_piece()
        self._buffers.append(data)
        self.offset += len(data)

    def _take_piece(self) -> None:
        piece = self._stage.take()
        if piece:
            self._buffers.append(piece)

    def flush(self, *, cache: bool = False) -> None:
        """Write the added groups; waits while the disk is full.

        Args:
            cache: Use the page cache in any case, since the groups will be read again soon.
        """
        if self.offset == self._written:
            return
        tail = filler(self._nonce, self.offset)
        self._stage.put(tail, len(tail), _STAGE_BYTES)
        self.offset += len(tail)
        if self.offset + BLOCK_BYTES <= self._limit:
            self._stage.put(_ZEROS, BLOCK_BYTES, _STAGE_BYTES)
        self._take_piece()
        self._set_direct(direct=self._may_go_direct and self._in_blocks and not (self._cached or cache))
        buffers, self._buffers = self._buffers, []
        self._write(buffers)
        self._written = self.offset
        self._in_blocks = self._cached = False
        self._stage.clear()

    def forget_cached(self) -> None:
        """Drop the page cache of synced data."""
        if self._cached_from is not None:
            self._disk.forget_cached(self._fd, self._cached_from, self._written - self._cached_from)
            self._cached_from = None

    def cut(self, nbytes: int | None = None) -> None:
        super().cut(self.end if nbytes is None else nbytes)

    def _pwritev(self, buffers: list[Any]) -> int:
        try:
            return super()._pwritev(buffers)
        except OSError as error:
            # Some file systems refuse direct writes only now, or at the offset where a short write ended.
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._may_go_direct = False
        self._set_direct(direct=False)
        return super()._pwritev(buffers)

    def _set_direct(self, *, direct: bool) -> None:
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
