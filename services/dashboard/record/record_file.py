"""`metrics.jsonl`, read as it grows: each whole line once, in parts of bounded size.

A file that shrank, or that another one replaced, is read from its beginning. `fetch` blocks on the disk and may run in
a thread; `apply` takes what it read, in the thread of the state.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from rolloutmq.bus.files import open_regular

PART_BYTES: Final = 1 << 18
"""Bytes read at once: they are decoded in some milliseconds."""
LINE_LIMIT_BYTES: Final = 1 << 18
"""Longest line; the writer's limit is a quarter of it. A longer one is damage and is skipped."""


class Part(NamedTuple):
    """Bytes of the file.

    Attributes:
        identity: Device and inode; None without a file.
        size: Size of the file when it was read.
        since: Where the bytes begin.
        data: The bytes.
        problem: Why the file cannot be read; empty if it can, or if it is missing.
    """

    identity: tuple[int, int] | None = None
    size: int = 0
    since: int = 0
    data: bytes = b""
    problem: str = ""


class RecordFile:
    """Position in one file.

    Args:
        path: The file. It may be missing, and come later.
        take: Called with each whole line, without its newline.
        begin: Called when another file than before is read, or the same one again.
    """

    def __init__(self, path: Path, take: Callable[[bytes], None], begin: Callable[[], None]) -> None:
        self._path = path
        self._take = take
        self._begin = begin
        self._known: tuple[int, int] | None = None
        self._rest = b""
        self._skips = False
        self.offset = 0
        """Bytes read so far."""
        self.size = 0
        """Bytes of the file when it was read last."""
        self.long_lines = 0
        """Lines that were longer than the limit."""
        self.problem = ""
        """Why the file cannot be read; empty if it can, or if it is missing."""

    def fetch(self) -> Part:
        """Read the next bytes. Blocks on the disk; raises nothing of the file system."""
        try:
            with open_regular(self._path, 0) as file:
                found = os.fstat(file.fileno())
                identity = found.st_dev, found.st_ino
                is_same = identity == self._known and found.st_size >= self.offset
                since = self.offset if is_same else 0
                file.seek(since)
                return Part(identity, found.st_size, since, file.read(PART_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return Part()
        except OSError as error:
            return Part(self._known, self.size, self.offset, b"", f"{self._path.name}: {error.strerror}")

    def apply(self, part: Part) -> bool:
        """Take the bytes read; return whether the end of the file is reached."""
        self.problem = part.problem
        if part.identity != self._known or part.since < self.offset:
            self._forget(part.identity)
        self.size = part.size
        self.offset = part.since + len(part.data)
        self._split(part.data)
        return self.offset >= self.size or not part.data

    def _split(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._skips or len(line) > LINE_LIMIT_BYTES:
                self._skips = False
                self.long_lines += 1
            elif line:
                self._take(line)
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._rest, self._skips = b"", True

    def _forget(self, identity: tuple[int, int] | None) -> None:
        if self._known is not None:
            self._begin()
        self._known, self._rest, self._skips = identity, b"", False
        self.offset = self.long_lines = 0
