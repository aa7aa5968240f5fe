"""`rolloutmq logs NAME -f`: the end of a process's log, and what is added to it.

A file that is followed may be cut short, or replaced by another of its name. Both are noticed by looking a few times a
second, which works on any file system; what an old file held to its end is shown before the new one.
"""

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.monitor.exits import FAILED, INTERRUPTED, USAGE, complain, reader_may_leave

POLL_S: Final = 0.2
CHUNK_BYTES: Final = 1 << 16


class Follower:
    """The last lines of a file and whatever follows them. Use as a context manager."""

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._file = path.open("rb")
        self._file.seek(tail_start(self._file, lines))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self) -> bytes:
        """Return the next part that is there, or nothing. Never waits."""
        data = self._file.read(CHUNK_BYTES)
        if not data and self._is_other():
            data = self._file.read(CHUNK_BYTES)
        return data

    def _is_other(self) -> bool:
        """Go to the start of a file that was cut, or of the one that has its place; say whether it was."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False  # Between being renamed and being made anew.
        here = os.fstat(self._file.fileno())
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            self._file.close()
            self._file = self._path.open("rb")
            return True
        if there.st_size < self._file.tell():
            self._file.seek(0)
            return True
        return False


def tail_start(file: BinaryIO, lines: int) -> int:
    """Return where the last `lines` lines begin; a last one without newline counts as one."""
    size = start = file.seek(0, os.SEEK_END)
    found = 0
    while start > 0:
        begin = max(0, start - CHUNK_BYTES)
        file.seek(begin)
        block = file.read(start - begin)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            # A newline at the very end closes the last line and begins none.
            found += begin + at + 1 < size
            if found >= lines:
                return begin + at + 1
        start = begin
    return 0 if lines > 0 else size


def logs(where: Path, name: str, *, follow: bool = False, lines: int = 100) -> int:
    """Print the last lines of a log, then what is added if `follow`; returns the exit code. Blocks."""
    layout = RunLayout(where)
    if not where.is_dir():
        return complain(f"{where} is no run directory", USAGE)
    names = sorted(path.stem for path in layout.logs.glob("*.log"))
    if name not in names:
        return complain(f"no log of {name!r} in {where}; there are: {', '.join(names) or 'none yet'}", USAGE)
    try:
        with reader_may_leave(), Follower(layout.log(name), lines) as follower:
            _show(follower, follow)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return complain(f"{layout.log(name)}: {error.strerror}", FAILED)
    return 0


def _show(follower: Follower, follow: bool) -> None:
    while True:
        if part := follower.read():
            # Text, so that a stream that is no file will do; a character cut in two by a chunk is rare and harmless.
            sys.stdout.write(part.decode(errors="replace"))
            sys.stdout.flush()
        elif follow:
            time.sleep(POLL_S)
        else:
            return
