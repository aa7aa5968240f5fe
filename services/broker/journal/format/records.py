"""Records and segments: files of checksummed records. `saved.rmq` is one too.

    file    magic 8, nonce 8, CRC32C of magic, nonce and version 4, version u32, then records, each at a multiple of 8
    record  magic 4, version u16, kind u16, meta length u32, frames u32, payload length u64,
            gap before the frames u32, CRC32C of the bytes before the gap u32, CRC32C of the frames u32,
            CRC32C of the header u32, then the payload: frame lengths u64 each, meta, gap, frames;
            zeros up to the next multiple of 8
    filler  a record of kind 0 without content: it ends at a block boundary of the disk

All numbers are little-endian. A header's checksum also covers the file's nonce and the record's offset: bytes that
look like a record, in a group's body or left over at another offset, are none. The checksum of the frames is the one
the producer computed, so no byte is read once more to be written.

A reader returns a written record or nothing: a damaged stretch is skipped and reported as `Damage`. A
damaged stretch at the end of a segment that was still being written is its torn tail, and no fault; in a sealed
segment it is damage too. A segment may reuse the file of an obsolete one: leftovers lie behind `END_BYTES` of zeros.

The beginning of a file is the same in every version of the format, so each reader can distinguish a file of
another version from a damaged one: the version counts only with its checksum. Versions 1 and 2 wrote zero there, with
a checksum of magic and nonce alone. A record with another version than its file is damaged.

The functions on buffers are pure; the two on files are thin.
"""

import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.bus.files import force, private_file, read_regular
from rolloutmq.schemas.errors import RecordVersionError

FILE_MAGIC: Final = b"RMQSEG\r\n"
RECORD_MAGIC: Final = b"\xa7RMQ"
VERSION: Final = 4
ALIGNMENT_BYTES: Final = 8
BLOCK_BYTES: Final = 4096
"""Smallest direct write of a disk."""
END_BYTES: Final = 512
"""This many zeros at a possible record, and no record after them, are the end."""
FILLER: Final = 0
"""Kind of a record that only fills a block."""
NONCE_BYTES: Final = 8

_FILE: Final = struct.Struct("<8s8sII")
_HEADER: Final = struct.Struct("<4sHHIIQIII")
_CRC: Final = struct.Struct("<I")
_VERSION: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
_PLACE: Final = struct.Struct("<8sQ")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
FILE_HEADER_BYTES: Final = _FILE.size
_FIRST: Final = struct.Struct("<4sH")
"""Beginning of a record in every version: magic and version."""
BEGINNING_BYTES: Final = FILE_HEADER_BYTES + _FIRST.size
"""Enough of a file to identify its version."""
_OLDEST: Final = 1
_LAST_UNVERSIONED: Final = 2
"""Up to this version the beginning of a file had no version."""

Buffer = Any
"""Bytes, or any object with the buffer protocol: a memoryview, a frame of the socket library."""


class Record(NamedTuple):
    """One record as it was written; `meta` and `frames` are views of the segment."""

    offset: int
    span: int
    """Bytes from its beginning to the beginning of the next one."""
    kind: int
    meta: memoryview
    frames: tuple[memoryview, ...]


class FileHeader(NamedTuple):
    """Beginning of a file of records, in any version."""

    nonce: bytes
    version: int


class RecordHeader(NamedTuple):
    """Header of a record, in front of the payload."""

    kind: int
    meta_length: int
    frames: int
    nbytes: int
    """Bytes of the payload."""
    gap: int
    """Padding bytes before the frames."""
    crc: int
    """Checksum of the payload before the gap."""
    frames_crc: int

    @property
    def span(self) -> int:
        """Bytes from the beginning of the record to the beginning of the next one."""
        end = HEADER_BYTES + self.nbytes
        return end + -end % ALIGNMENT_BYTES


class Damage(NamedTuple):
    """A stretch of a segment that holds no record any more."""

    offset: int
    nbytes: int
    torn: bool
    """It is the end of a segment that was still being written, to be cut off."""


def file_header(nonce: bytes) -> bytes:
    """Return the beginning of a segment; the nonce is 8 random bytes of its own."""
    return _FILE.pack(FILE_MAGIC, nonce, _beginning_crc(nonce, VERSION), VERSION)


def encode_record(
    nonce: bytes, offset: int, kind: int, meta: bytes, frames: Sequence[Buffer]
) -> list[Buffer]:
    """Return one record as buffers to write in this order at `offset`, without copying the frames."""
    views = [frame if type(frame) is bytes else memoryview(frame).cast("B") for frame in frames]
    sizes = [len(view) for view in views]
    head = head_of(nonce, offset, kind, meta, sizes, checksum(views))
    nbytes = len(head) + sum(sizes)
    return [head, *views, bytes(-nbytes % ALIGNMENT_BYTES)]


def head_of(
    nonce: bytes, offset: int, kind: int, meta: bytes, sizes: Sequence[int], crc: int, gap: int = 0
) -> bytes:
    """Return the bytes of a record before its gap and its frames.

    Args:
        nonce, offset: File and place of the record.
        kind, meta: Kind and meta of the record.
        sizes: Bytes of each frame.
        crc: Checksum of all frames, in their order.
        gap: Padding bytes between the head and the frames.
    """
    count = len(sizes)
    first = (_SIZE.pack(sizes[0]) if count == 1 else struct.pack(f"<{count}Q", *sizes)) + meta
    nbytes = len(first) + gap + sum(sizes)
    header = _HEADER.pack(
        RECORD_MAGIC, VERSION, kind, len(meta), count, nbytes, gap, google_crc32c.value(first), crc
    )
    return b"".join((header, _CRC.pack(_header_crc(nonce, offset, header)), first))


def gap_before(offset: int, meta: int, frames: int) -> int:
    """Return the padding with which frames begin at a block boundary, from offset, bytes of meta, and number of
    frames.
    """
    return -(offset + HEADER_BYTES + frames * 8 + meta) % BLOCK_BYTES


def filler(nonce: bytes, offset: int) -> bytes:
    """Return a filler record up to the next block boundary; empty if the offset is one."""
    nbytes = -offset % BLOCK_BYTES
    if nbytes and nbytes < HEADER_BYTES:
        nbytes += BLOCK_BYTES
    return head_of(nonce, offset, FILLER, bytes(nbytes - HEADER_BYTES), (), 0) if nbytes else b""


def room_bytes(meta: int, frames: int, nbytes: int) -> int:
    """Return the most bytes a record may take in a segment, with the filler behind it."""
    return HEADER_BYTES + frames * 8 + meta + nbytes + 3 * BLOCK_BYTES


def scan(data: Buffer, *, sealed: bool) -> Iterator[Record | Damage]:
    """Read a segment from its beginning, in the order it was written.

    Args:
        data: The whole file.
        sealed: It was finished, so a missing end is damage and not a torn tail.
    """
    view = memoryview(data).cast("B").toreadonly()
    nonce = nonce_of(view)
    if nonce is None:
        yield Damage(0, view.nbytes, torn=not sealed and view.nbytes < _FILE.size)
        return
    offset = _FILE.size
    while offset < view.nbytes:
        record = _record_at(view, nonce, offset)
        if record is not None:
            offset += record.span
            if record.kind != FILLER:
                yield record
            continue
        following = _next_record(view, nonce, offset + 1)
        if following is None and is_end(view[offset:] if sealed else view[offset : offset + END_BYTES]):
            return
        end = view.nbytes if following is None else following
        yield Damage(offset, end - offset, torn=not sealed and following is None)
        offset = end


def write_segment(path: Path, records: Iterable[tuple[int, bytes, Sequence[Buffer]]]) -> int:
    """Write (kind, meta, frames) records as one sealed segment, and return how many there were.

    The file appears whole under its name, and on disk, or not at all.
    """
    nonce = os.urandom(NONCE_BYTES)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with private_file(unfinished, "wb") as file:
            file.write(file_header(nonce))
            for count, (kind, meta, frames) in enumerate(records, 1):  # noqa: B007
                file.writelines(encode_record(nonce, file.tell(), kind, meta, frames))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    force(path.parent)
    return count


def read_segment(path: Path) -> Iterator[Record | Damage]:
    """Scan a sealed segment; records are views that keep the whole file in memory.

    Raises:
        RecordVersionError: Another version wrote it.
    """
    data = read_regular(path)
    require_version(data, path)
    return scan(data, sealed=True)


def is_end(data: Buffer) -> bool:
    """Return whether the `END_BYTES` at a possible record, or all that are left, are zeros."""
    return not np.frombuffer(data, np.uint8).any()


def nonce_of(view: Buffer) -> bytes | None:
    """Return the nonce of a segment; None if it does not begin like one of this version."""
    begins = beginning_of(view)
    return begins.nonce if begins is not None and begins.version == VERSION else None


def beginning_of(view: Buffer) -> FileHeader | None:
    """Return the header of a file from its first `BEGINNING_BYTES`; None if it does not begin like a segment."""
    if len(view) < FILE_HEADER_BYTES:
        return None
    magic, nonce, crc, version = _FILE.unpack_from(view)
    if magic != FILE_MAGIC or crc != _beginning_crc(nonce, version):
        return None
    return FileHeader(nonce, version or _unversioned(view))


def require_version(view: Buffer, path: Path) -> None:
    """Raise RecordVersionError for a file of another version, from its first `BEGINNING_BYTES`.

    A file without a valid beginning is left to its reader: it is damaged, or has yet to be written.
    """
    begins = beginning_of(view)
    if begins is not None and begins.version != VERSION:
        raise RecordVersionError(str(path), begins.version, VERSION)


def header_at(data: bytes, nonce: bytes, offset: int) -> RecordHeader | None:
    """Return the header in the `HEADER_BYTES` at an offset; None if they are no header of this place."""
    if len(data) < HEADER_BYTES or not data.startswith(RECORD_MAGIC):
        return None
    header = data[: _HEADER.size]
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    _, version, *fields = _HEADER.unpack(header)
    if version != VERSION or crc != _header_crc(nonce, offset, header):
        return None
    return RecordHeader(*fields)


def take_apart(header: RecordHeader, payload: memoryview) -> tuple[memoryview, tuple[memoryview, ...]] | None:
    """Return the meta and the frames of a payload; None if a checksum fails."""
    end = header.frames * 8 + header.meta_length
    cursor = end + header.gap
    if payload.nbytes != header.nbytes or cursor > header.nbytes:
        return None
    if header.crc != checksum([payload[:end]]) or header.frames_crc != checksum([payload[cursor:]]):
        return None
    meta = payload[header.frames * 8 : end]
    frames = []
    for length in struct.unpack_from(f"<{header.frames}Q", payload):
        frames.append(payload[cursor : cursor + length])
        cursor += length
    return (meta, tuple(frames)) if cursor == header.nbytes else None


def _beginning_crc(nonce: bytes, version: int) -> int:
    return checksum([FILE_MAGIC, nonce, _VERSION.pack(version) if version else b""])


def _unversioned(view: Buffer) -> int:
    """Return the version of a file without one in its header; its first record has it."""
    if len(view) >= BEGINNING_BYTES:
        magic, version = _FIRST.unpack_from(view, FILE_HEADER_BYTES)
        if magic == RECORD_MAGIC and version == _OLDEST:
            return _OLDEST
    return _LAST_UNVERSIONED


def _header_crc(nonce: bytes, offset: int, header: bytes) -> int:
    crc: int = google_crc32c.value(_PLACE.pack(nonce, offset) + header)
    return crc


def _record_at(view: memoryview, nonce: bytes, offset: int) -> Record | None:
    """Return the record at an offset, or None if there is none."""
    start = offset + HEADER_BYTES
    if start > view.nbytes or offset % ALIGNMENT_BYTES:
        return None
    header = header_at(bytes(view[offset:start]), nonce, offset)
    if header is None:
        return None
    parts = take_apart(header, view[start : start + header.nbytes])
    if parts is None:
        return None
    return Record(offset, header.span, header.kind, *parts)


def _next_record(view: memoryview, nonce: bytes, offset: int) -> int | None:
    """Return the offset of the first whole record at or after an offset; a filler is none."""
    for match in re.finditer(re.escape(RECORD_MAGIC), view[offset:]):
        record = _record_at(view, nonce, offset + match.start())
        if record is not None and record.kind != FILLER:
            return record.offset
    return None
