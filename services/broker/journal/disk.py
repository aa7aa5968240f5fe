"""The port to the disk: every call of the journal to the operating system, so that tests can make each of them fail."""

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
"""`SYNC_FILE_RANGE_WRITE`: begin to write out, wait for nothing."""
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})

_sync_file_range: Final = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


_limit_lock: Final = threading.Lock()


def _opened(path: Path, flags: int) -> int:
    """Open a file, if need be with one of the descriptors between the soft and the hard limit.

    The broker keeps its soft limit below the hard one: the clients may take all that there are, and there is always
    somebody who waits for the next.
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
    """What the journal asks of the operating system. All methods block; those that fail raise OSError."""

    def create(self, path: Path) -> int:
        """Open a new file for writing and return its descriptor."""
        return _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def reopen(self, path: Path) -> int:
        """Open a file that is there for writing and return its descriptor."""
        return _opened(path, os.O_RDWR)

    def open(self, path: Path) -> int:
        """Open a file for reading and return its descriptor."""
        return _opened(path, os.O_RDONLY)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        return os.pread(fd, nbytes, offset)

    def next_data(self, fd: int, offset: int) -> int:
        """Return where the next bytes that were ever written begin; OSError(ENXIO) if none were."""
        return os.lseek(fd, offset, os.SEEK_DATA)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Write at an offset and return how many bytes it took, which may be fewer."""
        return os.pwritev(fd, buffers, offset)

    def go_direct(self, fd: int, *, direct: bool) -> None:
        """Have writes go past the system's cache, or through it; OSError(EINVAL), here or there, where they cannot.

        Past it, what is written, where, and how much of it must be multiples of the blocks of the disk.
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
        """Reserve room, so that writes up to there do not run out of it; does nothing where that cannot be done."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def begin_writing_out(self, fd: int, offset: int, nbytes: int) -> None:
        """Let the system begin with a stretch that `fdatasync` will wait for."""
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, nbytes, _WRITE)

    def forget_cached(self, fd: int, offset: int, nbytes: int) -> None:
        """Let the system reuse the memory that caches a stretch which is on disk."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def cut(self, path: Path, nbytes: int) -> None:
        """Shorten a file that nobody writes."""
        os.truncate(path, nbytes)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone already is as well."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make what was created, renamed or removed in a directory last."""
        fd = _opened(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
