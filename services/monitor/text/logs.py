"""`rolloutmq logs NAME -f`: the end of a process's log, and what follows.

The launcher rotates a log while its process writes to it, see `services.process.logbook`. A follower continues in the
archives, so that it shows every byte once, control characters as escapes. A log may also be truncated or replaced by
another program; then the follower shows the rest of the old file before the new one. It polls a few times a second,
which works on any file system.
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

from rolloutmq.bus.files import open_regular
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import printable_lines
from rolloutmq.services.monitor.text.exit_codes import FAILED, INTERRUPTED, USAGE, complain, reader_may_leave
from rolloutmq.services.process.logbook import archive

POLL_S: Final = 0.2
CHUNK_BYTES: Final = 1 << 16
Mark = tuple[int, int]
"""Identity of an archive, independent of its current number."""


class Follower:
    """The last lines of a file and everything appended later. Use it as a context manager."""

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._file: BinaryIO = open_regular(path, buffering=0)
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
        """Return the next available bytes, or nothing. Waits only for a log under rotation."""
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
        """Seek to the start of the last lines, in an archive if the log itself has fewer."""
        file, number = self._file, 0
        while (start := tail_start(file, lines)) == 0 and archive(self._path, number + 1).exists():
            number += 1
            older = open_regular(archive(self._path, number), buffering=0)
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
        """Find the last read position after a rotation: in an archive, or further ahead in the log."""
        newest = _mark(archive(self._path, 1))
        if newest == self._newest:
            return
        parts = list(self._cut_off())
        was_last = _mark(archive(self._path, len(parts) + 1))
        # If that newest archive was removed since, so was what followed it: continue with the oldest one.
        position = self._file.tell() if was_last == self._newest else 0
        for part in reversed(parts):
            size = part.seek(0, os.SEEK_END)
            part.seek(min(position, size))
            self._older.append(part)
            position = max(0, position - size)
        self._file.seek(position)
        self._newest = newest

    def _cut_off(self) -> Iterator[BinaryIO]:
        """Yield the archives made since, newest first."""
        for number in count(1):
            path = archive(self._path, number)
            if (mark := _mark(path)) is None or mark == self._newest:
                return
            yield open_regular(path, buffering=0)

    def _is_other(self) -> bool:
        """Seek to the start of a truncated or replaced file; return whether it was one."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False  # Between rename and re-creation.
        here = os.fstat(self._file.fileno())
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            self._file.close()
            self._file = open_regular(self._path, buffering=0)
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
    """Return the number of lines in a file; a last one without newline counts."""
    file.seek(0)
    blocks = iter(lambda: file.read(CHUNK_BYTES), b"")
    return sum(block.count(b"\n") for block in blocks) + _is_torn(file)


def _is_torn(file: BinaryIO) -> bool:
    """Return whether the last line has no newline, so that it continues in the next file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    return file.read(1) not in {b"", b"\n"}


@contextmanager
def _shared(file: BinaryIO) -> Iterator[None]:
    """Keep others from rotating the log within the block, where the file system has locks."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def tail_start(file: BinaryIO, lines: int) -> int:
    """Return the offset of the last `lines` lines; a last one without newline counts."""
    size = start = file.seek(0, os.SEEK_END)
    found = 0
    while start > 0:
        begin = max(0, start - CHUNK_BYTES)
        file.seek(begin)
        block = file.read(start - begin)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            # A newline at the very end closes the last line and starts none.
            found += begin + at + 1 < size
            if found >= lines:
                return begin + at + 1
        start = begin
    return 0 if lines > 0 else size


def logs(where: Path, name: str, *, follow: bool = False, lines: int = 100) -> int:
    """Print the last lines of a log, and follow it if `follow`; return the exit code. Blocks."""
    layout = RunLayout(where)
    if not where.is_dir():
        return complain(f"{where}: no run directory; start a run with `rolloutmq up CONFIG`", USAGE)
    names = sorted(path.stem for path in layout.logs.glob("*.log"))
    if name not in names:
        return complain(
            f"{name}: no such log in {where}; it has: {', '.join(names) or 'no logs yet'}", FAILED
        )
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
            # Text works for streams other than files, too; a character split by a chunk is rare and harmless.
            sys.stdout.write(printable_lines(part.decode(errors="replace")))
            sys.stdout.flush()
        elif follow:
            time.sleep(POLL_S)
        else:
            return
