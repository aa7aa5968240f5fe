"""Memory that the processes of one host share, so that what a group consists of is not sent at all.

A producer lays its groups into an arena of its own: a file in memory without a name, as large as all that the broker
would ever hold of it, of which only the pages in use take memory. The broker, and through it the trainers, open it by
the descriptor of a process that has it, and read. The kernel frees it with the last process that has it mapped, so
there is nothing to sweep, and what a killed producer had sent is still there.

A reader trusts nothing: the file must be the one that was named, of this user, and sealed against shrinking, or a read
could end in SIGBUS; what is in it is checked like any frame. The arena is never waited for: where there is none, or no
room in it, groups travel as frames.
"""

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rolloutmq.bus.slots import Slots
from rolloutmq.schemas.envelope import ArenaRef
from rolloutmq.schemas.sharing import SegmentGoneError

TRIM_S: Final = 5.0
"""Pages that were not in use for that long are given back."""
UNUSED_S: Final = 30.0
"""A reader closes an arena that no batch named for that long: it may be the last that keeps its memory."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Arena:
    """An arena of this process. One thread.

    Attributes:
        ref: By which others open it.
        slots: Which parts of it are in use.
        memory: All of it; a part stays mapped as long as anybody has a view of it.
    """

    def __init__(self, nbytes: int) -> None:
        """Make an arena of that size, which takes memory only as it is used.

        Raises:
            OSError: The system does not give one.
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
        self.slots = Slots(nbytes)
        self._trim_at = 0.0

    def trim(self, now: float) -> None:
        """Give back, now and then, the memory of what is not in use any more."""
        if now < self._trim_at:
            return
        self._trim_at = now + TRIM_S
        unused = self.slots.trim()
        if unused is not None:
            self.memory.madvise(mmap.MADV_REMOVE, unused[0], unused[1] - unused[0])

    def close(self) -> None:
        """Let nobody else open it; whoever has it keeps it, and so do views. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Mapped:
    """An arena of any process of this host, for reading.

    Attributes:
        ref: By which others open it from this process.
        view: Its bytes. They are mapped as long as anybody has a part of the view.
    """

    def __init__(self, ref: ArenaRef) -> None:
        """Open and map an arena.

        Raises:
            SegmentGoneError: It is not there, or not what it should be.
        """
        path = f"/proc/{ref.pid}/fd/{ref.fd}"
        try:
            # Looked at before it is opened: to open a device may do something, and a pipe may wait.
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
        """Close the descriptor; the memory goes with the last view. May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self.view = memoryview(b"")


def _require(path: str, info: os.stat_result, ref: ArenaRef) -> None:
    if not stat.S_ISREG(info.st_mode) or info.st_ino != ref.ino:
        raise SegmentGoneError(path, "it is another file")
    if info.st_uid != os.geteuid():
        raise SegmentGoneError(path, "it is not a file of this user")
    if not 0 < info.st_size == ref.nbytes:
        raise SegmentGoneError(path, "it has another size")


def _require_sealed(path: str, fd: int) -> None:
    # Huge pages run out at any time, which is a SIGBUS too.
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not sealed or os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise SegmentGoneError(path, "it could become shorter")


class Arenas:
    """The arenas that a trainer reads from: opened when a batch names them, closed when none did for long."""

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
            # As long as it is mapped, no other file has its number.
            if ref.ino not in self._views:
                mapped = Mapped(ref)
                self._views[ref.ino] = mapped.view
                mapped.close()
            self._used_at[ref.ino] = now
            found.append(self._views[ref.ino])
        return found

    def sweep(self) -> None:
        """Close what no batch has named for long."""
        moment = time.monotonic() - UNUSED_S
        for ino in [ino for ino, at in self._used_at.items() if at <= moment]:
            del self._used_at[ino], self._views[ino]

    def close(self) -> None:
        """Close all of them."""
        self._views.clear()
        self._used_at.clear()
