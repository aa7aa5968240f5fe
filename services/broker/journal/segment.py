"""Segments: files of records that end up whole or are known to be damaged. `saved.rmq` is one.

    file    magic 8, nonce 8, CRC32C of both 4, zero 4, then records, each at a multiple of 8
    record  magic 4, version u16, kind u16, meta length u32, frames u32, payload length u64,
            gap before the frames u32, CRC32C of what is before the gap u32, CRC32C of the frames u32,
            CRC32C of the header u32, then the payload: frame lengths u64 each, meta, gap, frames;
            zeros up to the next multiple of 8
    filler  a record of kind 0, which says nothing: it ends where a block of the disk does

Little-endian. The checksum of a header also covers the file's nonce and the record's offset, so that bytes which look
like a record, in a group's body or left over at another place, are none. That of the frames is the one that a group
had when it was made, so that no byte of it is read once more to be written. What is read back is a record that was
written, or nothing: a damaged stretch is skipped and reported as `Damage`. A stretch that reaches the end of a segment
that was still being written is its torn tail, and nothing is wrong with that; in a sealed one it is damage too.
A segment is written over one that nothing needs any more: behind `END_BYTES` of zeros lies what is left of that.
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

from rolloutmq.bus.codec import checksum
from rolloutmq.bus.durability import force

FILE_MAGIC: Final = b"RMQSEG\r\n"
RECORD_MAGIC: Final = b"\xa7RMQ"
VERSION: Final = 2
ALIGNMENT_BYTES: Final = 8
BLOCK_BYTES: Final = 4096
"""A disk takes no less at once, unless through the system's cache."""
END_BYTES: Final = 512
"""So many zeros where a record could begin, and none after them, are the end."""
FILLER: Final = 0
"""Kind of a record that only fills a block."""
NONCE_BYTES: Final = 8

_FILE: Final = struct.Struct("<8s8sII")
_HEADER: Final = struct.Struct("<4sHHIIQIII")
_CRC: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
_PLACE: Final = struct.Struct("<8sQ")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
FILE_HEADER_BYTES: Final = _FILE.size

Buffer = Any
"""Bytes, or whatever has the buffer protocol: a memoryview, a frame of the socket library."""


class Record(NamedTuple):
    """One record as it was written; `meta` and `frames` are views of the segment."""

    offset: int
    span: int
    """Bytes from its beginning to where the next one begins."""
    kind: int
    meta: memoryview
    frames: tuple[memoryview, ...]


class Header(NamedTuple):
    """What is in front of a record's payload."""

    kind: int
    meta_length: int
    frames: int
    nbytes: int
    """Bytes of the payload."""
    gap: int
    """Bytes that say nothing, before the frames."""
    crc: int
    """Of what is before the gap."""
    frames_crc: int

    @property
    def span(self) -> int:
        """Bytes from the beginning of the record to where the next one begins."""
        end = HEADER_BYTES + self.nbytes
        return end + -end % ALIGNMENT_BYTES


class Damage(NamedTuple):
    """A stretch of a segment that holds no record any more."""

    offset: int
    nbytes: int
    torn: bool
    """It is the end of a segment that was still being written: cut it off."""


def file_header(nonce: bytes) -> bytes:
    """Begin a segment; the nonce is 8 random bytes of its own."""
    return _FILE.pack(FILE_MAGIC, nonce, checksum([FILE_MAGIC, nonce]), 0)


def encode_record(
    nonce: bytes, offset: int, kind: int, meta: bytes, frames: Sequence[Buffer]
) -> list[Buffer]:
    """Lay out one record as buffers to be written in this order at `offset`, without copying the frames."""
    views = [frame if type(frame) is bytes else memoryview(frame).cast("B") for frame in frames]
    sizes = [len(view) for view in views]
    head = head_of(nonce, offset, kind, meta, sizes, checksum(views))
    nbytes = len(head) + sum(sizes)
    return [head, *views, bytes(-nbytes % ALIGNMENT_BYTES)]


def head_of(
    nonce: bytes, offset: int, kind: int, meta: bytes, sizes: Sequence[int], crc: int, gap: int = 0
) -> bytes:
    """Return what goes before a record's gap and its frames; zeros to a multiple of 8 follow them.

    Args:
        nonce, offset: The place.
        kind, meta: What the record says.
        sizes: Bytes of each frame.
        crc: Checksum of all frames, in their order.
        gap: Bytes between what is returned and the frames.
    """
    count = len(sizes)
    first = (_SIZE.pack(*sizes) if count == 1 else struct.pack(f"<{count}Q", *sizes)) + meta
    nbytes = len(first) + gap + sum(sizes)
    header = _HEADER.pack(
        RECORD_MAGIC, VERSION, kind, len(meta), count, nbytes, gap, google_crc32c.value(first), crc
    )
    return header + _CRC.pack(_header_crc(nonce, offset, header)) + first


def gap_before(offset: int, meta: int, frames: int) -> int:
    """Return the gap with which frames begin where a block does: place, bytes of the meta, number of frames."""
    return -(offset + HEADER_BYTES + frames * 8 + meta) % BLOCK_BYTES


def filler(nonce: bytes, offset: int) -> bytes:
    """Return a record that says nothing and ends where a block does; empty if one ends at the offset."""
    nbytes = -offset % BLOCK_BYTES
    if nbytes and nbytes < HEADER_BYTES:
        nbytes += BLOCK_BYTES
    return head_of(nonce, offset, FILLER, bytes(nbytes - HEADER_BYTES), (), 0) if nbytes else b""


def room_bytes(meta: int, frames: int, nbytes: int) -> int:
    """Return how much of a segment a record may take, with the filler behind it: bytes of the meta, number of frames,
    bytes of all frames.
    """
    return HEADER_BYTES + frames * 8 + meta + nbytes + 3 * BLOCK_BYTES


def scan(data: Buffer, *, sealed: bool) -> Iterator[Record | Damage]:
    """Read a segment from its beginning, in the order it was written.

    Args:
        data: The whole file.
        sealed: It was finished, so that a missing end is damage and not a torn tail.
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
        with unfinished.open("wb") as file:
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
    """Scan a sealed segment; what comes are views, and keep the whole file in memory until they are gone."""
    return scan(path.read_bytes(), sealed=True)


def is_end(data: Buffer) -> bool:
    """Whether the `END_BYTES` at the place of a record, or all that there are, are zeros."""
    return not np.frombuffer(data, np.uint8).any()


def nonce_of(view: Buffer) -> bytes | None:
    """Return the nonce that a segment begins with; None if it does not begin like one."""
    if len(view) < FILE_HEADER_BYTES:
        return None
    magic, nonce, crc, _ = _FILE.unpack_from(view)
    if magic != FILE_MAGIC or crc != checksum([magic, nonce]):
        return None
    return bytes(nonce)


def header_at(data: bytes, nonce: bytes, offset: int) -> Header | None:
    """Return what the `HEADER_BYTES` at an offset of a segment say; None if they are no header of this place."""
    if len(data) < HEADER_BYTES or not data.startswith(RECORD_MAGIC):
        return None
    header = data[: _HEADER.size]
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    _, version, *said = _HEADER.unpack(header)
    if version != VERSION or crc != _header_crc(nonce, offset, header):
        return None
    return Header(*said)


def take_apart(header: Header, payload: memoryview) -> tuple[memoryview, tuple[memoryview, ...]] | None:
    """Return the meta and the frames of a record's payload; None if it is not what was written."""
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


def _header_crc(nonce: bytes, offset: int, header: bytes) -> int:
    return int(google_crc32c.value(_PLACE.pack(nonce, offset) + header))


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
    """Return where the first whole record at or after an offset begins; a filler is none."""
    for match in re.finditer(re.escape(RECORD_MAGIC), view[offset:]):
        record = _record_at(view, nonce, offset + match.start())
        if record is not None and record.kind != FILLER:
            return record.offset
    return None
