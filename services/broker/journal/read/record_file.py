"""The record file: reads a file of the journal record by record, by offset or in sequence.

Nothing is mapped: a page the disk cannot read would end the process instead of raising an error.
"""

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.records import (
    ALIGNMENT_BYTES,
    BEGINNING_BYTES,
    END_BYTES,
    FILE_HEADER_BYTES,
    FILLER,
    HEADER_BYTES,
    RECORD_MAGIC,
    Damage,
    Record,
    RecordHeader,
    header_at,
    is_end,
    nonce_of,
    require_version,
    take_apart,
)

logger = logging.getLogger(__name__)

_WINDOW_BYTES: Final = 1 << 20


class RecordFile:
    """A file of records, open for reading; RecordVersionError if another version wrote it.

    Attributes:
        nonce: The nonce of its records; None if the header of the file is damaged.
        size: Bytes of the file.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self.path = path
        self._disk = disk
        self._unreadable = 0
        """Number of failed reads."""
        self._fd = disk.open(path)
        try:
            self.size = disk.size(self._fd)
            beginning = self._read(BEGINNING_BYTES, 0)
            require_version(beginning, path)
            self.nonce = nonce_of(beginning)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._disk.close(self._fd)

    def record(self, offset: int) -> Record | None:
        """Return the record at an offset, checked; None if there is none."""
        header = self.header(offset)
        return None if header is None else self._record(header, offset)

    def _record(self, header: RecordHeader, offset: int) -> Record | None:
        parts = take_apart(header, memoryview(self._read(header.nbytes, offset + HEADER_BYTES)))
        return None if parts is None else Record(offset, header.span, header.kind, *parts)

    def header(self, offset: int) -> RecordHeader | None:
        """Return the header at an offset; None if it is not one, or exceeds the file."""
        self.size = self._disk.size(self._fd)
        return self._header(self._read(HEADER_BYTES, offset), offset)

    def _header(self, data: bytes, offset: int) -> RecordHeader | None:
        if self.nonce is None or offset % ALIGNMENT_BYTES or offset < FILE_HEADER_BYTES:
            return None
        header = header_at(data, self.nonce, offset)
        if header is None or offset + HEADER_BYTES + header.nbytes > self.size:
            return None
        return header

    def stretch(self, offset: int) -> int:
        """Return how many bytes from an offset on are lost if the record there is damaged."""
        header = self.header(offset)
        end = self._following(offset + 1) if header is None else offset + header.span
        return (self.size if end is None else min(end, self.size)) - offset

    def scan(self, start: int) -> Iterator[Record | Damage]:
        """Yield records and damage from an offset on; damage up to the end of the file is `torn`."""
        offset = start
        while offset < self.size:
            header = self.header(offset)
            record = None if header is None else self._record(header, offset)
            if header is not None and record is not None:
                if record.kind != FILLER:
                    yield record
                offset += header.span
                continue
            if self.ends(offset):
                return
            nbytes = self.stretch(offset)
            end = offset + nbytes
            yield Damage(offset, nbytes, torn=self._following(end) is None)
            offset = end

    def ends(self, offset: int) -> bool:
        """Return whether the written data ends at an offset: zeros, and behind them no record of this file."""
        before = self._unreadable
        ended = is_end(self._read(END_BYTES, offset)) and self._following(offset) is None
        return ended and self._unreadable == before  # unreadable bytes may be a record

    def blank(self) -> bool:
        """Return whether the file has nothing but zeros."""
        offset = 0
        while (offset := self._next_data(offset)) < self.size:
            data = self._read(_WINDOW_BYTES, offset)
            if not data or not is_end(data):
                return False
            offset += len(data)
        return True

    def _next_data(self, offset: int) -> int:
        try:
            return self._disk.next_data(self._fd, offset)
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else offset

    def _following(self, offset: int) -> int | None:
        """Return the offset of the first record header at or after an offset; fillers are skipped."""
        while (offset := self._next_data(offset)) < self.size:
            data = self._read(_WINDOW_BYTES + HEADER_BYTES, offset)
            found = -1 if is_end(data) else data.find(RECORD_MAGIC)
            while 0 <= found < _WINDOW_BYTES:
                # Checked in place: leftovers of another segment may look like many headers.
                header = self._header(data[found : found + HEADER_BYTES], offset + found)
                if header is not None and header.kind != FILLER:
                    return offset + found
                found = data.find(RECORD_MAGIC, found + 1)
            offset += _WINDOW_BYTES
        return None

    def _read(self, nbytes: int, offset: int) -> bytes:
        """Read `nbytes`, or as many as the disk can read."""
        parts = [self._pread(nbytes, offset)]
        while parts[-1] and (left := nbytes - sum(map(len, parts))):
            parts.append(self._pread(left, offset + nbytes - left))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _pread(self, nbytes: int, offset: int) -> bytes:
        try:
            return self._disk.pread(self._fd, nbytes, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._unreadable += 1
            logger.error("read failed file=%s offset=%d bytes=%d", self.path, offset, nbytes)
            return b""
