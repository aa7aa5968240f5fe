"""The log of a process: bounded while the process goes on writing, and read from its end.

    NAME.log              what was written last: about `nbytes`, and what comes between two looks
    NAME.log.1, .2, ...   what was before, newest first, `nbytes` each; beyond `files` the oldest goes

To rename the log would bound nothing. A process, and all that it started, holds the file and not the name, and goes on
writing into the renamed one until it is asked to open its log again, which the code of an environment, a library in C
and a grandchild never do. So the oldest part is copied away and then cut off in place: logs are opened with O_APPEND,
so that the next write lands at the end, wherever that is now. Nobody is asked, and it does not matter who started the
process: it works for adopted ones too.

The cut is FALLOC_FL_COLLAPSE_RANGE, which takes blocks from the beginning of a file in one step, whatever is written at
that moment: no byte is lost, the archives and the log put together are what was printed. Where the file system has no
such thing (tmpfs), the file is copied to its end and emptied, and a line that is written in the microseconds between
goes. A rotation that is killed in the middle may leave a part twice, never not at all.

Readers and the one rotator of a log lock it (flock), so that nobody sees a log half cut.
"""

import asyncio
import ctypes
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""How often sizes are looked at; a process that prints 100 MB/s overshoots by that much and is cut back."""
AGAIN_S: Final = 60.0
"""How long a log is left alone that could not be cut, because the disk is full for example."""
COPY_BYTES: Final = 1 << 20
TAIL_BYTES: Final = 4096
"""As much of the end of a log is read for its last lines."""
_COLLAPSE_RANGE: Final = 0x08
_fallocate: Final = getattr(ctypes.CDLL(None), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class LogLimits:
    """Where a log is cut, and how many parts are kept beside it. See `RunSection`, whose fields these are."""

    nbytes: int
    files: int


def archive(log: Path, number: int) -> Path:
    """Return the file of a part that was cut off; 1 is the newest."""
    return log.with_name(f"{log.name}.{number}")


def rotate(log: Path, limits: LogLimits) -> int:
    """Cut a log that is too long; returns how many parts were put aside. Blocks for as long as the copy takes.

    Raises:
        OSError: It cannot be read, copied or cut.
    """
    if log.stat().st_size <= limits.nbytes:
        return 0
    with log.open("rb+", buffering=0) as file, _alone(file, 2 * limits.nbytes) as alone:
        return _shorten(log, file, limits) if alone else 0


def last_lines(log: Path, count: int, nbytes: int = TAIL_BYTES) -> list[str]:
    """Return the last lines of a log that say anything, oldest first; of the last `nbytes` bytes at most."""
    text = b""
    for part in (log, archive(log, 1)):
        with suppress(FileNotFoundError), part.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (nbytes - len(text))))
            text = file.read(nbytes - len(text)) + text
        if len(text) >= nbytes:
            break
    lines = [line.rstrip() for line in text.decode(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]


def last_line(log: Path) -> str:
    """Return the last line of a log that says anything, or an empty text."""
    return next(iter(last_lines(log, 1)), "").strip()


def remove(log: Path) -> None:
    """Remove a log that nobody writes any more, with its archives."""
    log.unlink(missing_ok=True)
    number = 1
    while archive(log, number).exists():
        archive(log, number).unlink(missing_ok=True)
        number += 1


class Rotation:
    """Looks after the logs of a run, or of some of its processes. `run` is its life.

    Args:
        limits: Of each log.
        logs: Names them, each time anew, in the loop.
    """

    def __init__(self, limits: LogLimits, logs: Callable[[], Iterable[Path]]) -> None:
        self._limits = limits
        self._logs = logs
        self._failed: dict[Path, float] = {}

    async def run(self) -> None:
        """Look once a second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look, list(self._logs()))

    def look(self, logs: Iterable[Path]) -> None:
        """Cut what is too long now. A log that cannot be cut goes on growing, and is left alone for a while. Blocks."""
        for log in logs:
            if self._failed.get(log, 0.0) > time.monotonic():
                continue
            self._failed.pop(log, None)
            try:
                rotate(log, self._limits)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("log not cut path=%s error=%s", log, error)
                self._failed[log] = time.monotonic() + AGAIN_S


def _shorten(log: Path, file: BinaryIO, limits: LogLimits) -> int:
    block = os.fstat(file.fileno()).st_blksize
    part = max(block, limits.nbytes // block * block)
    parts = copied = 0
    # Blocks may be taken from anywhere but the very end.
    while os.fstat(file.fileno()).st_size - copied > part:
        _put_aside(log, file, copied, part, limits.files)
        parts += 1
        if copied or not _collapse(file, part):
            copied += part
    if copied:
        _empty(log, file, copied)
    return parts


def _put_aside(log: Path, file: BinaryIO, offset: int, nbytes: int, files: int) -> None:
    """Copy a part of the log into the newest archive; the others move on by one."""
    written = log.with_name(f"{log.name}.tmp")
    try:
        with written.open("wb") as target:
            for start in range(offset, offset + nbytes, COPY_BYTES):
                target.write(os.pread(file.fileno(), min(COPY_BYTES, offset + nbytes - start), start))
    except OSError:
        written.unlink(missing_ok=True)
        raise
    for number in range(files, 1, -1):
        with suppress(FileNotFoundError):
            archive(log, number - 1).replace(archive(log, number))
    written.replace(archive(log, 1))


def _collapse(file: BinaryIO, nbytes: int) -> bool:
    """Take the first bytes from a file in one step; False where that is not possible."""
    return _fallocate is not None and _fallocate(file.fileno(), _COLLAPSE_RANGE, 0, nbytes) == 0


def _empty(log: Path, file: BinaryIO, copied: int) -> None:
    """Add what is not copied yet to the newest archive, then empty the log."""
    with archive(log, 1).open("ab", buffering=0) as target:
        while rest := os.pread(file.fileno(), COPY_BYTES, copied):
            copied += target.write(rest)
        os.ftruncate(file.fileno(), 0)


@contextmanager
def _alone(file: BinaryIO, patience_bytes: int) -> Iterator[bool]:
    """Keep readers away; False if one is there, unless the log is that large: a stopped one must not fill the disk."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield os.fstat(file.fileno()).st_size > patience_bytes
    else:
        yield True  # closing the file gives the lock back
