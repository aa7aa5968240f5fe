"""The disk port: every system call of the journal, so tests can make each of them fail."""

import ctypes
import errno
import fcntl
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_WRITE: Final = 2
"""`SYNC_FILE_RANGE_WRITE`: start the write-out without waiting."""

_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


_sync_file_range: Final = getattr(ctypes.CDLL(None), "sync_file_range", None)

if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


_limit_lock: Final = threading.Lock()


def _opened(path: Path, flags: int) -> int:
    """Open a file, if need be with one of the descriptors between the soft and the hard limit.

    The broker keeps its soft limit below the hard one: clients may take all descriptors below it, and more clients
    are always waiting.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    with _limit_lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            return os.open(path, flags | os.O_CLOEXEC, 0o600)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Disk:
    """System calls of the journal. All methods block; a failure raises OSError."""

    def create(self, path: Path) -> int:
        """Open a new file for writing and return its descriptor."""
        return _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def reopen(self, path: Path) -> int:
        """Open an existing file for writing and return its descriptor."""
        return _opened(path, os.O_RDWR)

    def open(self, path: Path) -> int:
        """Open a file for reading and return its descriptor; a pipe of that name is not waited for."""
        return _opened(path, os.O_RDONLY | os.O_NONBLOCK)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        return os.pread(fd, nbytes, offset)

    def next_data(self, fd: int, offset: int) -> int:
        """Return the offset of the next bytes that were ever written; OSError(ENXIO) if there are none."""
        return os.lseek(fd, offset, os.SEEK_DATA)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Write at an offset and return the bytes written, which may be fewer."""
        return os.pwritev(fd, buffers, offset)

    def go_direct(self, fd: int, *, direct: bool) -> None:
        """Make writes bypass the page cache, or use it; OSError(EINVAL), here or at a write, where it cannot.

        Direct writes need addresses, offsets and sizes that are multiples of the disk's block size.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def links(self, path: Path) -> int:
        """Return how many names a file has; 0 if it is gone."""
        try:
            return path.stat().st_nlink
        except FileNotFoundError:
            return 0

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve room, so writes within it never run out; does nothing where the file system cannot."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def begin_writing_out(self, fd: int, offset: int, nbytes: int) -> None:
        """Start the write-out of a range that `fdatasync` will wait for."""
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, nbytes, _WRITE)

    def forget_cached(self, fd: int, offset: int, nbytes: int) -> None:
        """Drop the page cache of a range that is on disk."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def cut(self, path: Path, nbytes: int) -> None:
        """Truncate a file that is not being written."""
        os.truncate(path, nbytes)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove a file; no error if it is gone."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make created, renamed and removed names of a directory durable."""
        fd = _opened(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_TRANSIENT: Final = NO_ROOM | {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Somebody else can make room, memory or descriptors."""

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
"""Another user may have made the file: somebody can repair its owner or mode."""


def passes(error: OSError) -> bool:
    """Return whether an error is transient: the disk lacked room, or the process a descriptor or memory."""
    return error.errno in _TRANSIENT


def readable_later(error: OSError) -> bool:
    """Return whether a file that cannot be read may be sound: the error is transient, or access to it is denied."""
    return passes(error) or error.errno in _DENIED
