"""The trainer's own log of what it learned from: `trained.jsonl`, one `SettledBatch` a line.

A line is in the file before the broker is told, so a trainer that is killed between the two leaves a line without a
settlement, never a settlement without a line. Lines are appended by one write each and survive the death of the
process; half a line that the death of the machine left is cut off when the next trainer opens the file.
"""

import logging
import os
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.schemas.records import SettledBatch

logger = logging.getLogger(__name__)

_TAIL_BYTES: Final = 1 << 16


class Journal:
    """The file, open for appending. Writing does not wait for the disk. One writer at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._cut_torn_line(path)

    def write(self, line: SettledBatch) -> None:
        """Append one line. It is with the operating system when this returns."""
        data = memoryview(msgspec.json.encode(line) + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _cut_torn_line(self, path: Path) -> None:
        end = size = os.fstat(self._fd).st_size
        while end and (newline := self._last_newline(end)) < 0:
            end = max(0, end - _TAIL_BYTES)
        whole = newline + 1 if end else 0
        if whole < size:
            logger.warning("torn line cut file=%s bytes=%d", path, size - whole)
            os.ftruncate(self._fd, whole)

    def _last_newline(self, end: int) -> int:
        """Return where the last newline before `end` is if it is near, or -1."""
        start = max(0, end - _TAIL_BYTES)
        found = os.pread(self._fd, end - start, start).rfind(b"\n")
        return start + found if found >= 0 else -1
