"""`rolloutmq logs NAME -f`: the end of a process's log, and what is added to it.

A log is cut while its process goes on writing, see `services.logbook`. What was cut off lies in the archives, and a
follower goes on there, so that it shows every byte once. A file may also be cut short by somebody else, or replaced by
another of its name; what an old file held to its end is shown before the new one. All of it is noticed by looking a few
times a second, which works on any file system.
"""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.logbook import archive
from rolloutmq.services.monitor.exits import FAILED, INTERRUPTED, USAGE, complain, reader_may_leave

POLL_S: Final = 0.2
CHUNK_BYTES: Final = 1 << 16
Mark = tuple[int, int]
"""What an archive is known by, whatever its number is by now."""


class Follower:
    """The last lines of a file and whatever follows them. Use as a context manager."""

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb", buffering=0)
        self._older: list[BinaryIO] = []
        with _shared(self._file):
            self._newest = _mark(archive(path, 1))
            self._begin(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for file in (*self._older, self._file):
            file.close()

    def read(self) -> bytes:
        """Return the next part that is there, or nothing. Waits for a log that is being cut, and for nothing else."""
        with _shared(self._file):
            self._catch_up()
            while self._older:
                if data := self._older[0].read(CHUNK_BYTES):
                    return data
                self._older.pop(0).close()
            data = self._file.read(CHUNK_BYTES)
        if not data and self._is_other():
            data = self._file.read(CHUNK_BYTES)
        return data

    def _begin(self, lines: int) -> None:
        """Go to where the last lines begin, in an archive if the log itself has fewer."""
        file, number = self._file, 0
        while (start := tail_start(file, lines)) == 0 and archive(self._path, number + 1).exists():
            number += 1
            older = archive(self._path, number).open("rb", buffering=0)
            lines -= _line_count(file) - _is_torn(older)
            self._older.insert(0, older)
            if lines <= 0:
                start = older.seek(0, os.SEEK_END)
                break
            file = older
        for part in (*self._older, self._file):
            part.seek(0)
        (self._older or [self._file])[0].seek(start)

    def _catch_up(self) -> None:
        """Find what was read last, if the log was cut since: in an archive, or further ahead in the log."""
        newest = _mark(archive(self._path, 1))
        if newest == self._newest:
            return
        parts = list(self._cut_off())
        was_last = _mark(archive(self._path, len(parts) + 1))
        # If what was the newest has been removed since, so has what followed it: go on with the oldest there is.
        position = self._file.tell() if was_last == self._newest else 0
        for part in reversed(parts):
            size = part.seek(0, os.SEEK_END)
            part.seek(min(position, size))
            self._older.append(part)
            position = max(0, position - size)
        self._file.seek(position)
        self._newest = newest

    def _cut_off(self) -> Iterator[BinaryIO]:
        """Yield the archives that came since, newest first."""
        for number in count(1):
            path = archive(self._path, number)
            if (mark := _mark(path)) is None or mark == self._newest:
                return
            yield path.open("rb", buffering=0)

    def _is_other(self) -> bool:
        """Go to the start of a file that was cut, or of the one that has its place; say whether it was."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False  # Between being renamed and being made anew.
        here = os.fstat(self._file.fileno())
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            self._file.close()
            self._file = self._path.open("rb", buffering=0)
            return True
        if there.st_size < self._file.tell():
            self._file.seek(0)
            return True
        return False


def _mark(path: Path) -> Mark | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _line_count(file: BinaryIO) -> int:
    """Return how many lines a file has; a last one without newline counts as one."""
    file.seek(0)
    blocks = iter(lambda: file.read(CHUNK_BYTES), b"")
    return sum(block.count(b"\n") for block in blocks) + _is_torn(file)


def _is_torn(file: BinaryIO) -> bool:
    """Whether the last line has no newline: its rest is in the next file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    return file.read(1) not in {b"", b"\n"}


@contextmanager
def _shared(file: BinaryIO) -> Iterator[None]:
    """Have nobody cut the log meanwhile, where the file system knows locks."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


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
