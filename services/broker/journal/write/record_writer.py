"""The record writer: gathers records at the end of a file, writes them in few calls, and waits while the disk is
full.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from rolloutmq.services.broker.journal.disk import Disk, passes
from rolloutmq.services.broker.journal.format.records import encode_record

logger = logging.getLogger(__name__)


RETRY_S: Final = 0.25
"""How often a write is retried while the disk is full."""

WRITE_BYTES: Final = 2 << 20
"""Bytes of one write: the disk works on them while the next ones are copied."""

BUFFERS_LIMIT: Final = 1000
"""Most buffers of one call; the system allows 1024."""

_T = TypeVar("_T")


class DiskRetry:
    """Retries calls that fail for want of room.

    Attributes:
        full: It is waiting for room right now.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.full = False
        self.meanwhile: Callable[[], None] = lambda: None
        """Called before each pause; it may make room."""
        self._changed = changed
        self._until = float("inf")
        self._hurry = threading.Event()

    @classmethod
    def none(cls) -> "DiskRetry":
        """Return one that never waits."""
        patience = cls(lambda: None)
        patience.hurry(0.0)
        return patience

    def hurry(self, seconds: float) -> None:
        """Give up after that many seconds from now, also in a pending call. For any thread."""
        self._until = time.monotonic() + seconds
        self._hurry.set()

    def relax(self) -> None:
        """Wait without a limit again."""
        self._until = float("inf")
        self._hurry.clear()

    def persist(self, action: Callable[[], _T]) -> _T:
        """Return the result of the action once there is room; OSError if it fails otherwise."""
        try:
            while True:
                try:
                    return action()
                except InterruptedError:
                    continue
                except OSError as error:
                    if not passes(error) or time.monotonic() >= self._until:
                        raise
                    self._note(error)
                self.meanwhile()
                if self._hurry.wait(RETRY_S):
                    time.sleep(RETRY_S / 10)
        finally:
            if self.full:
                self.full = False
                self._changed()

    def _note(self, error: OSError) -> None:
        if not self.full:
            logger.warning("disk full, journal waits for room error=%s", error)
            self.full = True
            self._changed()


class RecordWriter:
    """Appends records to a new file. They are in the file after `flush`, and durable after `sync`.

    Attributes:
        offset: Offset of the next record.
        patience: Retries writes for which there is no room.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        nonce: bytes,
        patience: DiskRetry,
        *,
        for_sync: bool,
        fd: int | None = None,
    ) -> None:
        """Create the file, unless it is open as `fd`."""
        self.path = path
        self.offset = 0
        self.patience = patience
        self._for_sync = for_sync
        self._disk = disk
        self._fd = disk.create(path) if fd is None else fd
        self._nonce = nonce
        self._buffers: list[Any] = []
        self._waiting = 0
        self._written = 0
        self._begun = 0
        """Up to here the system has started the write-out."""

    def add_raw(self, data: bytes) -> None:
        """Append bytes without a record: the header of the file."""
        self._take([data], len(data))

    def add(self, kind: int, meta: bytes, frames: Sequence[Any]) -> int:
        """Append a record and return its offset."""
        offset = self.offset
        buffers = encode_record(self._nonce, offset, kind, meta, frames)
        self._take(buffers, sum(map(len, buffers)))
        return offset

    def _take(self, buffers: list[Any], nbytes: int) -> None:
        self._buffers += buffers
        self._waiting += nbytes
        self.offset += nbytes
        if self._waiting >= WRITE_BYTES or len(self._buffers) >= BUFFERS_LIMIT:
            self.flush()
            self._hasten()

    def _hasten(self) -> None:
        if self._for_sync:
            self._disk.begin_writing_out(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written

    def flush(self) -> None:
        """Write the added records; waits while the disk is full."""
        if self._buffers:
            buffers, self._buffers, self._waiting = self._buffers, [], 0
            for start in range(0, len(buffers), BUFFERS_LIMIT):
                self._write(buffers[start : start + BUFFERS_LIMIT])

    def _write(self, buffers: list[Any]) -> None:
        while buffers:
            count = self.patience.persist(partial(self._pwritev, buffers))
            if count <= 0:
                raise OSError(errno.EIO, f"{self.path}: the write returned 0 without an error")
            self._written += count
            if count == sum(map(len, buffers)):
                return
            buffers = _after(buffers, count)

    def _pwritev(self, buffers: list[Any]) -> int:
        return self._disk.pwritev(self._fd, buffers, self._written)

    def write_zeros(self, offset: int, nbytes: int) -> None:
        """Write zeros ahead of the end, so later records change only bytes and no metadata."""
        end = offset + nbytes
        while offset < end:
            zeros = bytes(end - offset)
            offset += DiskRetry.none().persist(partial(self._disk.pwritev, self._fd, [zeros], offset))

    def sync(self) -> None:
        """Make the flushed records durable."""
        self._disk.fdatasync(self._fd)

    def allocate(self, nbytes: int) -> None:
        self._disk.allocate(self._fd, nbytes)

    def cut(self, nbytes: int | None = None) -> None:
        """Truncate the file at an offset; by default behind the last record."""
        self._disk.truncate(self._fd, self.offset if nbytes is None else nbytes)

    def close(self) -> None:
        self._disk.close(self._fd)

    def abandon(self, nbytes: int | None) -> bool:
        """Close the file after a disk failure, truncated at `nbytes` if given; False if it could not be truncated."""
        cut = False
        with suppress(OSError):
            if nbytes is not None:
                self.cut(nbytes)
                cut = True
        with suppress(OSError):
            self.close()
        return cut


def _after(buffers: list[Any], count: int) -> list[Any]:
    """Return the buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        view = memoryview(buffer)
        if count < view.nbytes:
            return [view[count:], *buffers[index + 1 :]] if count else buffers[index:]
        count -= view.nbytes
    return []
