"""Arenas: shared memory for the groups of one producer, so their contents need no socket.

A producer writes its groups into its own arena: an anonymous memory file, as large as the most that the broker would
hold of it, of which only used pages take memory. The broker and the trainers open it through the descriptor of a
process that has it. The kernel frees it with its last mapping: nothing needs sweeping, and the sent groups of a killed
producer stay readable.

A reader checks that the file is the named one, belongs to this user and is sealed against shrinking, because a read
beyond its end raises SIGBUS. It verifies the contents like any frame. Nothing waits for an arena: without one, or
without room in it, groups are sent as frames.
"""

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rolloutmq.bus.shm.arena_allocator import ArenaAllocator
from rolloutmq.schemas.errors import SegmentGoneError
from rolloutmq.schemas.wire.envelope import ArenaRef

TRIM_S: Final = 5.0
"""Interval at which unused pages are given back to the system."""
UNUSED_S: Final = 30.0
"""A reader closes an arena not named by any batch for this long; it may hold the last reference to the memory."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Arena:
    """An arena of this process, for one thread.

    Attributes:
        ref: Reference by which other processes open it.
        slots: Allocator of its slots.
        memory: The whole mapping; it lasts as long as a view of it exists.
    """

    def __init__(self, nbytes: int) -> None:
        """Create an arena of that size; only used pages take memory.

        Raises:
            OSError: The system has no memory or descriptor for it.
        """
        nbytes -= nbytes % mmap.PAGESIZE
        self._fd = os.memfd_create("rolloutmq-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap.mmap(self._fd, nbytes)
            self.ref = ArenaRef(os.getpid(), self._fd, os.fstat(self._fd).st_ino, nbytes)
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, ValueError):
                raise OSError(str(error)) from None
            raise
        self.slots = ArenaAllocator(nbytes)
        self._trim_at = 0.0

    def trim(self, now: float) -> None:
        """Give unused memory back to the system, at most every `TRIM_S`."""
        if now < self._trim_at:
            return
        self._trim_at = now + TRIM_S
        unused = self.slots.trim()
        if unused is not None:
            self.memory.madvise(mmap.MADV_REMOVE, unused[0], unused[1] - unused[0])

    def close(self) -> None:
        """Close the descriptor, so no other process can open the arena. Mappings and views stay. Repeatable."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class MappedArena:
    """A read-only mapping of an arena of any process on this host.

    Attributes:
        ref: Reference by which other processes open it through this process.
        view: Its bytes, mapped as long as a part of the view exists.
    """

    def __init__(self, ref: ArenaRef) -> None:
        """Open and map an arena.

        Raises:
            SegmentGoneError: It does not exist, or `ref` describes another arena.
        """
        path = f"/proc/{ref.pid}/fd/{ref.fd}"
        try:
            # Checked before it is opened: opening a device may have effects, and opening a pipe may block.
            _require(path, Path(path).stat(), ref)
            self.fd = os.open(path, _OPEN)
        except OSError as error:
            raise SegmentGoneError(path, error.strerror or str(error)) from None
        try:
            _require(path, os.fstat(self.fd), ref)
            _require_sealed(path, self.fd)
            self.view = memoryview(mmap.mmap(self.fd, ref.nbytes, prot=mmap.PROT_READ))
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.fd)
            raise SegmentGoneError(path, str(error)) from None
        except BaseException:
            os.close(self.fd)
            raise
        self.ref = ArenaRef(os.getpid(), self.fd, ref.ino, ref.nbytes)

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the last view. May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self.view = memoryview(b"")


def _require(path: str, info: os.stat_result, ref: ArenaRef) -> None:
    if not stat.S_ISREG(info.st_mode) or info.st_ino != ref.ino:
        raise SegmentGoneError(path, "it is another file")
    if info.st_uid != os.geteuid():
        raise SegmentGoneError(path, f"it belongs to another user, {info.st_uid}")
    if not 0 < info.st_size == ref.nbytes:
        raise SegmentGoneError(path, f"its size is {info.st_size} bytes instead of {ref.nbytes}")


def _require_sealed(path: str, fd: int) -> None:
    # Huge pages can run out at any time, which raises SIGBUS too.
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not sealed or os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise SegmentGoneError(path, "it is not sealed, so it could become shorter")


class MappedArenas:
    """The mapped arenas of a trainer: opened when a batch names one, closed when none has for `UNUSED_S`."""

    def __init__(self) -> None:
        self._views: dict[int, memoryview] = {}
        self._used_at: dict[int, float] = {}

    def open(self, refs: Iterable[ArenaRef]) -> list[memoryview]:
        """Return the bytes of each arena.

        Raises:
            SegmentGoneError: One of them cannot be read.
        """
        now = time.monotonic()
        found = []
        for ref in refs:
            # While it is mapped, no other file can have its inode number.
            if ref.ino not in self._views:
                mapped = MappedArena(ref)
                self._views[ref.ino] = mapped.view
                mapped.close()
            self._used_at[ref.ino] = now
            found.append(self._views[ref.ino])
        return found

    def sweep(self) -> None:
        """Close the arenas not named by any batch for `UNUSED_S`."""
        moment = time.monotonic() - UNUSED_S
        for ino in [ino for ino, at in self._used_at.items() if at <= moment]:
            del self._used_at[ino], self._views[ino]

    def close(self) -> None:
        """Close all of them."""
        self._views.clear()
        self._used_at.clear()
