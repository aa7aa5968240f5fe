"""The broker's logs for people and for the report: files of whole lines.

A line is in the file as a whole or not at all: a reader takes damage in between for an error. A short write, to a full
disk, is taken back. Half a line, left by a crash of the machine, is cut off when the next broker opens the file.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, Self

from rolloutmq.bus.files import private_file

logger = logging.getLogger(__name__)

_TAIL_BYTES: Final = 1 << 20


class LineLog:
    """One file, open for appending. Writing does not wait for the disk. One writer at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = file.seek(0, os.SEEK_END)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Open a log, and cut off a torn last line."""
        with private_file(path, "ab+", buffering=0) as file:
            log = cls(file)
            log._cut_torn_line(path)
            yield log

    def write(self, line: bytes, /) -> int:
        """Append a line with its newline.

        Raises:
            OSError: The disk has no room for it; nothing of it is in the file.
        """
        written = self._file.write(line) or 0
        if written < len(line):
            self._file.truncate(self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += written
        return written

    def _cut_torn_line(self, path: Path) -> None:
        size = end = self._end
        while end:
            start = max(0, end - _TAIL_BYTES)
            self._file.seek(start)
            newline = (self._file.read(end - start) or b"").rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        if end < size:
            logger.warning("torn line cut file=%s bytes=%d", path, size - end)
            self._file.truncate(end)
            self._end = end
