"""Log rotation: bounds the log of a process while it writes, and reads the end of one.

    NAME.log              newest output: about `nbytes`, plus the output between two checks
    NAME.log.1, .2, ...   earlier output, newest first, `nbytes` each; beyond `files` the oldest is removed

Renaming the log would bound nothing. A process and its children hold the file, not the name, and keep writing to the
renamed one until they reopen their log. The code of an environment, a C library and a grandchild never do. So the
oldest part is copied away and then cut off in place: logs are opened with O_APPEND, so that the next write lands at the
end wherever it is. No process has to cooperate, and it works for adopted ones too.

The cut is FALLOC_FL_COLLAPSE_RANGE, which removes blocks from the start of a file atomically during concurrent writes:
no byte is lost, and archives plus log equal the output. Where the file system lacks it (tmpfs), the file is copied and
truncated, and a line written in the microseconds between is lost. A rotation killed half-way may duplicate a part, but
never lose one.

Readers and the one rotator of a log lock it (flock), so that nobody reads a half-cut log.
"""

import asyncio
import ctypes
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from rolloutmq.bus.files import open_regular, private_file

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Interval of the size check; a process that prints 100 MB/s overshoots by that much and is cut back."""
AGAIN_S: Final = 60.0
"""Pause after a failed cut, for example on a full disk."""
COPY_BYTES: Final = 1 << 20
TAIL_BYTES: Final = 4096
"""Bytes read from the end of a log for its last lines."""
_RECORD: Final = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [A-Z]+ rolloutmq[\w.]* ")
"""Start of a record in the format of `bus.lifecycle.LogHandler`."""
_COLLAPSE_RANGE: Final = 0x08
_fallocate: Final = getattr(ctypes.CDLL(None), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class LogLimits:
    """Maximum size of a log, and number of archives. Fields as in `RunSection`."""

    nbytes: int
    files: int


def archive(log: Path, number: int) -> Path:
    """Return the path of an archive; 1 is the newest."""
    return log.with_name(f"{log.name}.{number}")


def rotate(log: Path, limits: LogLimits) -> int:
    """Cut a log beyond its limit; return the number of new archives. Blocks for the copy.

    Raises:
        OSError: It cannot be read, copied or cut.
    """
    if log.stat().st_size <= limits.nbytes:
        return 0
    with private_file(log, "rb+", buffering=0) as file, _alone(file, 2 * limits.nbytes) as alone:
        return _shorten(log, file, limits) if alone else 0


def last_lines(log: Path, count: int, nbytes: int = TAIL_BYTES) -> list[str]:
    """Return the last non-empty lines of a log, oldest first, from at most the last `nbytes` bytes."""
    text = b""
    for part in (log, archive(log, 1)):
        with suppress(FileNotFoundError), open_regular(part) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (nbytes - len(text))))
            text = file.read(nbytes - len(text)) + text
        if len(text) >= nbytes:
            break
    lines = [line.rstrip() for line in text.decode(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]


def last_message(log: Path) -> str:
    """Return the last non-empty line of a log without time, level and logger, or an empty string."""
    return _RECORD.sub("", next(iter(last_lines(log, 1)), "").strip())


def remove(log: Path) -> None:
    """Remove an unused log with its archives."""
    log.unlink(missing_ok=True)
    number = 1
    while archive(log, number).exists():
        archive(log, number).unlink(missing_ok=True)
        number += 1


class Rotation:
    """Rotates the logs of a run, or of some of its processes. `run` runs it.

    Args:
        limits: Limits of each log.
        logs: Returns the logs at each check, in the loop.
    """

    def __init__(self, limits: LogLimits, logs: Callable[[], Iterable[Path]]) -> None:
        self._limits = limits
        self._logs = logs
        self._failed: dict[Path, float] = {}

    async def run(self) -> None:
        """Check once a second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look, list(self._logs()))

    def look(self, logs: Iterable[Path]) -> None:
        """Cut the logs beyond their limit. A log that cannot be cut keeps growing, and is retried later. Blocks."""
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
    # Collapsing may remove any blocks but the last.
    while os.fstat(file.fileno()).st_size - copied > part:
        _put_aside(log, file, copied, part, limits.files)
        parts += 1
        if copied or not _collapse(file, part):
            copied += part
    if copied:
        _empty(log, file, copied)
    return parts


def _put_aside(log: Path, file: BinaryIO, offset: int, nbytes: int, files: int) -> None:
    """Copy a part of the log into the newest archive; shift the others by one."""
    written = log.with_name(f"{log.name}.tmp")
    try:
        with private_file(written, "wb") as target:
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
    """Remove the first bytes of a file atomically; False if unsupported."""
    return _fallocate is not None and _fallocate(file.fileno(), _COLLAPSE_RANGE, 0, nbytes) == 0


def _empty(log: Path, file: BinaryIO, copied: int) -> None:
    """Append the rest to the newest archive, then truncate the log."""
    with private_file(archive(log, 1), "ab", buffering=0) as target:
        while rest := os.pread(file.fileno(), COPY_BYTES, copied):
            copied += target.write(rest)
        os.ftruncate(file.fileno(), 0)


@contextmanager
def _alone(file: BinaryIO, patience_bytes: int) -> Iterator[bool]:
    """Exclude readers; False if one is active, unless the log is that large: a stopped one must not fill the disk."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield os.fstat(file.fileno()).st_size > patience_bytes
    else:
        yield True  # closing the file releases the lock
