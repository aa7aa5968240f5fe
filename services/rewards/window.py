"""The window of the latest ratings: in memory, or in a file that all workers of an environment on a host share.

The file is a ring of rows, one for each rated answer, behind a head that says how many rows were committed:

    header   magic, version, raters, rows, window, digest of the raters' names, epoch, CRC     written once
    heads    two records of generation, committed rows, outliers, CRC; written in turn
    rows     number, ratings, CRC

An append holds `flock`, writes its rows, then one head. The ring is longer than the window by `SLACK_ROWS`, so rows
without their head overwrite none of the window, and an append of more rows commits in parts. A process killed at any
byte thus leaves the window as it was before its append, or after a part of it; the kernel releases the lock.

A file of other raters, or one whose checksums fail (after a power cut, since nothing syncs it), is started anew, and
the caller is told so; a damaged one is kept beside it as `NAME.damaged`. A file of another version is refused.
"""

import fcntl
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.files import private_fd, write_private
from rolloutmq.schemas.errors import RecordVersionError

VERSION: Final = 1
SLACK_ROWS: Final = 256
"""Rows beyond the window, for those that are being written."""
_MAGIC: Final = b"RMQ-RATE"
_HEADER: Final = struct.Struct("<8sIIII16sQ")
_HEAD: Final = struct.Struct("<QQQ")
_CRC: Final = struct.Struct("<I")
_HEADS_AT: Final = 64
_HEAD_BYTES: Final = 32
_ROWS_AT: Final = 128

Floats = NDArray[np.float64]


class WindowState(NamedTuple):
    """State of a window after an append.

    Attributes:
        ratings: `[answers][raters]`, oldest first, NaN for a missing rating.
        outliers: Bit mask of the raters that count as outliers.
        seen: Rated answers since the window began, those that left it included.
        restarted: Reason why the window began anew with this append; empty if it did not.
    """

    ratings: Floats
    outliers: int
    seen: int
    restarted: str = ""


Decide = Callable[[Floats, int], int]
"""Returns the outliers, from the window `[answers][raters]` and the outliers so far."""


class Window(Protocol):
    """The latest ratings of an ensemble."""

    def append(self, rows: Floats, decide: Decide) -> WindowState | None:
        """Append ratings `[answers][raters]`, decide about the outliers, and return the state.

        None if another process holds the file: nothing happened, try again. Blocks on the disk, never on a lock.

        Raises:
            RecordVersionError: Another version of RolloutMQ wrote the file.
            OSError: The file cannot be read or written.
        """
        ...


class MemoryWindow:
    """A window of one process. `size` is the number of answers it keeps."""

    def __init__(self, raters: int, size: int) -> None:
        self._size = size
        self._state = WindowState(np.empty((0, raters)), 0, 0)

    def append(self, rows: Floats, decide: Decide) -> WindowState:
        """Append ratings; see `Window.append`."""
        kept = np.concatenate([self._state.ratings, rows])[-self._size :]
        seen = self._state.seen + len(rows)
        self._state = WindowState(kept, decide(kept, self._state.outliers), seen)
        return self._state


@dataclass(frozen=True, slots=True)
class _Head:
    generation: int
    seen: int
    outliers: int


class SharedWindow:
    """A window in a file. Each append opens the file, so that forked processes may share the object.

    Args:
        path: The file, in a private directory that exists.
        names: Names of the raters, in the order of the columns.
        size: Answers it keeps.
    """

    def __init__(self, path: Path, names: Sequence[str], size: int) -> None:
        self._path = path
        self._raters = len(names)
        self._size = size
        self._rows = size + SLACK_ROWS
        self._digest = blake2b("\0".join(names).encode(), digest_size=16).digest()
        self._row = np.dtype([("number", "<u8"), ("ratings", "<f8", (self._raters,)), ("crc", "<u4")])
        self._epoch = 0
        self._known = np.empty((0, self._raters))
        self._known_seen = 0

    def append(self, rows: Floats, decide: Decide) -> WindowState | None:
        """Append ratings; see `Window.append`."""
        fd = private_fd(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._appended(fd, np.asarray(rows, np.float64), decide)
        except BlockingIOError:
            return None
        finally:
            os.close(fd)

    def _appended(self, fd: int, rows: Floats, decide: Decide) -> WindowState:
        head, restarted = self._opened(fd)
        for at in range(0, max(1, len(rows)), SLACK_ROWS):
            head = self._commit(fd, head, rows[at : at + SLACK_ROWS], decide)
        return WindowState(self._known, head.outliers, head.seen, restarted)

    def _opened(self, fd: int) -> tuple[_Head, str]:
        """Return the head of the file, after bringing the known rows up to it; begin the file anew if it must be."""
        header = os.pread(fd, _HEADER.size + _CRC.size, 0)
        head = self._head(fd)
        if not any(header) or (not _is_sound(header) and head is not None and not head.generation):
            return self._begun(fd), ""  # new, or its creator was killed: nothing was ever committed
        if header[: len(_MAGIC)] == _MAGIC and len(header) == _HEADER.size + _CRC.size:
            self._require_version(header)
        if not _is_sound(header) or head is None or os.fstat(fd).st_size < _ROWS_AT:
            return self._begun_again(fd, "its checksums fail")
        _, _, *shape, epoch = _HEADER.unpack_from(header)
        if tuple(shape) != self._shape:
            return self._begun(fd), "it was of other raters, or of another size"
        if epoch != self._epoch:
            self._epoch, self._known, self._known_seen = epoch, self._known[:0], 0
        if not self._caught_up(fd, head):
            return self._begun_again(fd, "its checksums fail")
        return head, ""

    def _require_version(self, header: bytes) -> None:
        version = _HEADER.unpack_from(header)[1]
        if version not in {0, VERSION}:  # 0 is a header of which only the beginning was written
            remedy = "remove the file, or run the RolloutMQ that wrote it"
            raise RecordVersionError(str(self._path), version, VERSION, remedy)

    @property
    def _shape(self) -> tuple[int, int, int, bytes]:
        return self._raters, self._rows, self._size, self._digest

    def _begun_again(self, fd: int, problem: str) -> tuple[_Head, str]:
        self._keep_damaged(fd)
        return self._begun(fd), problem

    def _begun(self, fd: int) -> _Head:
        """Begin the file anew. The header is last, so that an interrupted beginning is none."""
        self._epoch, self._known, self._known_seen = secrets.randbits(64), self._known[:0], 0
        os.ftruncate(fd, 0)
        os.ftruncate(fd, self._file_bytes)
        head = _Head(0, 0, 0)
        self._write_head(fd, head)
        _write(fd, _summed(_HEADER.pack(_MAGIC, VERSION, *self._shape, self._epoch)), 0)
        return head

    def _commit(self, fd: int, head: _Head, rows: Floats, decide: Decide) -> _Head:
        table = np.zeros(len(rows), self._row)
        table["number"] = np.arange(head.seen, head.seen + len(rows))
        table["ratings"] = rows
        table["crc"] = self._sums(table)
        place = head.seen % self._rows
        first = table[: self._rows - place]
        _write(fd, first.tobytes(), self._at(place))
        _write(fd, table[len(first) :].tobytes(), self._at(0))
        known = np.concatenate([self._known, rows])[-self._size :]
        found = _Head(head.generation + 1, head.seen + len(rows), decide(known, head.outliers))
        self._write_head(fd, found)
        self._known, self._known_seen = known, found.seen
        return found

    def _sums(self, table: NDArray[np.void]) -> list[int]:
        data, step = table.tobytes(), self._row.itemsize
        return [google_crc32c.value(data[at : at + step - _CRC.size]) for at in range(0, len(data), step)]

    def _write_head(self, fd: int, head: _Head) -> None:
        place = _HEADS_AT + head.generation % 2 * _HEAD_BYTES
        _write(fd, _summed(_HEAD.pack(head.generation, head.seen, head.outliers)), place)

    def _head(self, fd: int) -> _Head | None:
        """Return the newest head; None if neither is sound. One may be torn."""
        found = []
        for place in (_HEADS_AT, _HEADS_AT + _HEAD_BYTES):
            data = os.pread(fd, _HEAD.size + _CRC.size, place)
            if len(data) == _HEAD.size + _CRC.size and _is_sound(data):
                found.append(_Head(*_HEAD.unpack_from(data)))
        return max(found, key=lambda head: head.generation, default=None)

    def _caught_up(self, fd: int, head: _Head) -> bool:
        """Read the rows that others appended; return whether all are sound."""
        missing = min(head.seen - self._known_seen, self._size, head.seen)
        if missing < 0:
            return False
        numbers = np.arange(head.seen - missing, head.seen)
        data = b"".join(self._stretches(fd, head.seen - missing, missing))
        table = np.frombuffer(data[: len(data) // self._row.itemsize * self._row.itemsize], self._row)
        if (
            len(table) != missing
            or (table["number"] != numbers).any()
            or table["crc"].tolist() != self._sums(table)
        ):
            return False
        self._known = np.concatenate([self._known, table["ratings"]])[-self._size :]
        self._known_seen = head.seen
        return True

    def _stretches(self, fd: int, first: int, count: int) -> list[bytes]:
        place = first % self._rows
        before_end = min(count, self._rows - place)
        sizes = ((place, before_end), (0, count - before_end))
        return [os.pread(fd, rows * self._row.itemsize, self._at(at)) for at, rows in sizes if rows]

    def _at(self, row: int) -> int:
        return _ROWS_AT + row * self._row.itemsize

    @property
    def _file_bytes(self) -> int:
        return self._at(self._rows)

    def _keep_damaged(self, fd: int) -> None:
        """Copy the file, for a person who wants to know what it was; a full disk does not stop the rollouts."""
        with suppress(OSError):
            copy = self._path.with_name(f"{self._path.name}.damaged")
            write_private(copy, os.pread(fd, os.fstat(fd).st_size, 0))


def _write(fd: int, data: bytes, at: int) -> None:
    """Write all bytes at a place; a file system may take a part at a time."""
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _summed(data: bytes) -> bytes:
    return data + _CRC.pack(google_crc32c.value(data))


def _is_sound(data: bytes) -> bool:
    return data == _summed(data[: -_CRC.size])
