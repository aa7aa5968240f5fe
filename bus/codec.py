"""Groups and messages to frames and back. Pure: no socket, no clock.

Body of a group, little-endian: a directory with one row of three u64 (frame, offset, length) for each block of its
`ColumnTable`, then the blocks at offsets that are multiples of 64. A block above `BIG_BLOCK_BYTES` lies alone in a
frame of its own, unless all was laid into room that the caller gave. The blocks of a column are its lengths, one u32
array per level unless it shares those of an earlier column, then its values. Decoding makes views into the frames and
copies nothing.

Whatever a peer sends ends in a value or in a `WireError`: sizes are checked before anything is decoded, and no
allocation is larger than the frames that came in.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeVar

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.opaque import check_values, encode_opaque
from rolloutmq.schemas.control import Drain
from rolloutmq.schemas.delivery import Ack, Reply, Request
from rolloutmq.schemas.envelope import (
    BIG_BLOCK_BYTES,
    ENVELOPE_LIMIT_BYTES,
    FRAMES_LIMIT,
    PROTOCOL_VERSION,
    ColumnSpec,
    ColumnTable,
    Dtype,
    Envelope,
    GroupHeader,
    PolicyVersion,
)
from rolloutmq.schemas.errors import (
    ChecksumError,
    GroupTooLargeError,
    InvalidGroupError,
    LimitExceededError,
    MalformedError,
    VersionMismatchError,
)
from rolloutmq.schemas.message import Message
from rolloutmq.schemas.telemetry import Event
from rolloutmq.schemas.trajectory import Column, Group, numpy_dtype

Buffer = bytes | bytearray | memoryview
"""A frame; anything with the buffer protocol will do."""
Room = Callable[[int], memoryview | None]
"""Gives a writable buffer of that many bytes, or None if there is no room for them."""

ALIGNMENT_BYTES: Final = 64
"""Offsets of blocks: a cache line, and enough for any vector instruction."""
MESSAGE_LIMIT_BYTES: Final = 8 << 20
"""Largest control message; a status of 10,000 workers is 3 MB."""
TABLE_LIMIT_BYTES: Final = 8 << 10
"""Largest column table: 64 columns whose names, and the names whose lengths they share, are as long as can be."""

TABLES_KEPT: Final = 256
"""Column tables that are remembered, so that groups of one kind share one."""

_ROW: Final = 24
_U32: Final = np.dtype("<u4")
_OPAQUE: Final = Dtype.OPAQUE
_GAPS: Final = tuple(bytes(size) for size in range(ALIGNMENT_BYTES))
_T = TypeVar("_T")


class EncodedGroup(msgspec.Struct, frozen=True, gc=False):
    """A group as frames, and what its header will say of them."""

    table: ColumnTable
    frames: tuple[Any, ...]
    nbytes: int
    crc: int


def encode_group(group: Group, limit: int, room: Room | None = None) -> EncodedGroup:
    """Lay out a group's columns.

    Args:
        group: A checked group.
        limit: Most bytes that its frames may have together.
        room: Asked, at most once, for a place for all of it; if it gives one, that is the only frame, big columns are
            copied there too, and no byte of it keeps what was there before. What is given is always used.

    Raises:
        GroupTooLargeError: They have more; nothing was allocated, and no room was asked for.
        InvalidGroupError: A value of an opaque column is not msgpack. No room was asked for.
    """
    table = table_of(group)
    blocks = _blocks(group, table)
    apart = _place(blocks, BIG_BLOCK_BYTES)
    nbytes = apart.nbytes + sum(blocks[index].nbytes for index in apart.big)
    if nbytes > limit:
        raise GroupTooLargeError(nbytes, limit)
    if room is not None:
        whole = _place(blocks, nbytes) if apart.big else apart
        if whole.nbytes <= limit and (given := room(whole.nbytes)) is not None:
            _lay(whole.parts, given)
            return EncodedGroup(table, (given,), whole.nbytes, checksum([given]))
    body = b"".join(apart.parts)
    frames = (memoryview(body), *(blocks[index].cast("B") for index in apart.big))
    return EncodedGroup(table, frames, nbytes, checksum((body, *frames[1:])))


def header_of(group: Group, encoded: EncodedGroup, *, seq: int, position: int) -> GroupHeader:
    """Describe an encoded group as number `seq` of its session, ending at `position`."""
    return GroupHeader(
        seq=seq,
        position=position,
        group_id=group.group_id,
        table=encoded.table.id,
        frames=len(encoded.frames),
        nbytes=encoded.nbytes,
        crc=encoded.crc,
        sequences=group.sequences,
        tokens=group.tokens,
        oldest=group.oldest,
        newest=group.newest,
        started_at=group.started_at,
        finished_at=group.finished_at,
        rewards=group.rewards(),
        task=group.task,
    )


def decode_group(header: GroupHeader, table: ColumnTable, frames: Sequence[Buffer], env: str = "") -> Group:
    """Make a group of views into `frames`, which stay alive as long as the group does.

    Raises:
        ChecksumError: The bytes are not those that the header describes.
        MalformedError: The body contradicts its header or its table.
    """
    arrays = [np.frombuffer(frame, np.uint8) for frame in frames]
    if sum(array.nbytes for array in arrays) != header.nbytes or len(arrays) != header.frames:
        raise MalformedError(f"group {header.group_id}: frames do not have the size of the header")
    if checksum(arrays) != header.crc:
        raise ChecksumError(f"group {header.group_id}: checksum differs")
    columns = _read_columns(table, _read_blocks(table, arrays))
    group = Group(
        header.group_id,
        columns,
        header.oldest,
        header.newest,
        header.started_at,
        header.finished_at,
        env=env,
        task=header.task,
        sequences=header.sequences,
        tokens=header.tokens,
    )
    _check(group)
    return group


def _check(group: Group) -> None:
    missing = {"tokens", "mask", "scores"} - group.columns.keys()
    if missing:
        raise MalformedError(f"group {group.group_id}: no column {sorted(missing)[0]}")
    try:
        group.check()
    except (InvalidGroupError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedError(f"group {group.group_id}: {error}") from None
    if group.columns["tokens"].values.size != group.tokens:
        raise MalformedError(f"group {group.group_id}: has not the tokens of its header")


def table_of(group: Group) -> ColumnTable:
    """Describe the columns of a group; equal lengths are named once. Equal columns give the same object."""
    owners: list[tuple[str, tuple[NDArray[np.uint32], ...]]] = []
    specs = []
    for name, column in group.columns.items():
        shared = ""
        if lengths := column.lengths:
            for owner, others in owners:
                if _same_lengths(others, lengths):
                    shared = owner
                    break
            else:
                owners.append((name, lengths))
        specs.append((name, int(column.dtype), len(lengths), shared))
    return _table_of(tuple(specs))


@lru_cache(maxsize=TABLES_KEPT)
def _table_of(specs: tuple[tuple[str, int, int, str], ...]) -> ColumnTable:
    return ColumnTable(
        tuple(ColumnSpec(name, Dtype(dtype), depth, shared) for name, dtype, depth, shared in specs)
    )


def _same_lengths(ones: tuple[NDArray[np.uint32], ...], others: tuple[NDArray[np.uint32], ...]) -> bool:
    if len(ones) != len(others):
        return False
    for one, other in zip(ones, others, strict=True):
        if one is not other and (one.size != other.size or one.tobytes() != other.tobytes()):
            return False
    return True


def _blocks(group: Group, table: ColumnTable) -> list[memoryview]:
    """Return the blocks in the order of the table, each of one piece in memory."""
    blocks: list[memoryview] = []
    for spec in table.columns:
        column = group.columns[spec.name]
        if spec.dtype is _OPAQUE:
            blocks.append(memoryview(encode_opaque(spec.name, column.values)))
            continue
        if not spec.lengths_of:
            blocks.extend(np.ascontiguousarray(lengths, _U32).data for lengths in column.lengths)
        blocks.append(np.ascontiguousarray(column.values).data)
    return blocks


class _Places(NamedTuple):
    parts: list[bytes | memoryview]
    """What the body is put together of, without a gap."""
    nbytes: int
    """Size of the body."""
    big: list[int]
    """Blocks with frames of their own."""


def _place(blocks: Sequence[memoryview], alone_above: int) -> _Places:
    """Find a place for each block; those above that many bytes get a frame of their own."""
    rows: list[int] = []
    parts: list[bytes | memoryview] = [b""]
    big = []
    end = len(blocks) * _ROW
    for index, block in enumerate(blocks):
        nbytes = block.nbytes
        if nbytes > alone_above:
            big.append(index)
            rows += (len(big), 0, nbytes)
            continue
        gap = -end % ALIGNMENT_BYTES
        rows += (0, end + gap, nbytes)
        parts += (_GAPS[gap], block)
        end += gap + nbytes
    parts[0] = struct.pack(f"<{len(rows)}Q", *rows)
    return _Places(parts, end, big)


def _lay(parts: Sequence[bytes | memoryview], given: memoryview) -> None:
    at = 0
    for part in parts:
        data = memoryview(part)
        if data.nbytes:  # What is empty cannot be cast.
            given[at : at + data.nbytes] = data.cast("B")
            at += data.nbytes


def _read_blocks(table: ColumnTable, arrays: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    size = table.blocks * _ROW
    if arrays[0].nbytes < size:
        raise MalformedError("the body is shorter than its directory")
    blocks: list[NDArray[np.uint8]] = []
    for frame, offset, nbytes in struct.iter_unpack("<QQQ", arrays[0].data[:size]):
        if frame >= len(arrays) or offset + nbytes > arrays[frame].nbytes:
            raise MalformedError(f"block {len(blocks)} lies outside its frame")
        blocks.append(arrays[frame][offset : offset + nbytes])
    return blocks


def _read_columns(table: ColumnTable, blocks: Sequence[NDArray[np.uint8]]) -> dict[str, Column]:
    placed = []
    at = 0
    for spec in table.columns:
        start, at = at, at + spec.blocks
        placed.append((spec, blocks[start:at]))
    # What all opaque columns hold together is bounded before the first of them is decoded.
    check_values([own[-1].data for spec, own in placed if spec.dtype is _OPAQUE])
    columns: dict[str, Column] = {}
    for spec, own in placed:
        columns[spec.name] = _read_column(spec, own, columns)
    return columns


def _read_column(spec: ColumnSpec, blocks: Sequence[NDArray[np.uint8]], done: Mapping[str, Column]) -> Column:
    if spec.dtype is _OPAQUE:
        return Column.opaque(decode_value(blocks[-1].data))
    if spec.lengths_of:
        owner = done.get(spec.lengths_of)
        if owner is None or owner.depth != spec.depth:
            raise MalformedError(f"column {spec.name}: shares the lengths of no earlier column")
        lengths = owner.lengths
    else:
        lengths = tuple([_view(spec.name, level, _U32) for level in blocks[:-1]])
    return Column(spec.dtype, _view(spec.name, blocks[-1], numpy_dtype(spec.dtype)), lengths)


def _view(name: str, raw: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    if raw.nbytes % dtype.itemsize:
        raise MalformedError(f"column {name}: block is no whole number of elements")
    if dtype.kind == "b" and raw.size and raw.max() > 1:
        raise MalformedError(f"column {name}: a bool that is neither 0 nor 1")
    return raw.view(dtype)


def checksum(frames: Sequence[Buffer | NDArray[np.uint8]]) -> int:
    """CRC32C (Castagnoli) over the frames in their order."""
    crc = 0
    for frame in frames:
        # The C extension takes bytes and arrays, but no bytearray and no memoryview.
        data = frame if isinstance(frame, bytes | np.ndarray) else np.frombuffer(frame, np.uint8)
        crc = google_crc32c.extend(crc, data)
    return int(crc)


def _decoding(decoder: "msgspec.msgpack.Decoder[_T]", data: Buffer, limit: int, what: str) -> _T:
    size = len(data) if isinstance(data, bytes | bytearray) else data.nbytes
    if size > limit:
        raise LimitExceededError(f"size of the {what}", size, limit)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"{what}: {error}") from None


_value: Final = msgspec.msgpack.Decoder()
_envelope: Final = msgspec.msgpack.Decoder(Envelope)
_request: Final = msgspec.msgpack.Decoder(Request)
_reply: Final = msgspec.msgpack.Decoder(Reply)
_event: Final = msgspec.msgpack.Decoder(Event)
_ack: Final = msgspec.msgpack.Decoder(Ack)
_drain: Final = msgspec.msgpack.Decoder(Drain)
_table: Final = msgspec.msgpack.Decoder(ColumnTable)
_header: Final = msgspec.msgpack.Decoder(GroupHeader)


def encode(value: Message | Envelope | GroupHeader | ColumnTable | PolicyVersion) -> bytes:
    """Encode a control message or a part of the wire as msgpack."""
    return msgspec.msgpack.encode(value)


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode an envelope; LimitExceededError if it is above 4 KiB."""
    data = msgspec.msgpack.encode(envelope)
    if len(data) > ENVELOPE_LIMIT_BYTES:
        raise LimitExceededError("size of the envelope", len(data), ENVELOPE_LIMIT_BYTES)
    return data


def decode_envelope(frame: Buffer, frames: int, nbytes: int) -> Envelope:
    """Decode the first frame of a producer's message and hold it against the frames that follow, if any must.

    Args:
        frame: The first frame.
        frames: How many frames follow it.
        nbytes: How many bytes they have together.

    Raises:
        WireError: Not an envelope of this version, or it does not describe what follows.
    """
    if frames + 1 > FRAMES_LIMIT:
        raise LimitExceededError("frames of a message", frames + 1, FRAMES_LIMIT)
    envelope = _decoding(_envelope, frame, ENVELOPE_LIMIT_BYTES, "envelope")
    if envelope.version != PROTOCOL_VERSION:
        raise VersionMismatchError(envelope.version, PROTOCOL_VERSION)
    if envelope.offsets:
        _require_in_arena(envelope, frames)
        return envelope
    if sum(header.frames for header in envelope.groups) != frames:
        raise MalformedError("the envelope names another number of frames")
    if sum(header.nbytes for header in envelope.groups) != nbytes:
        raise MalformedError("the envelope names another number of bytes")
    return envelope


def _require_in_arena(envelope: Envelope, frames: int) -> None:
    """Require that all of a message lies in an arena: each group in one piece, and nothing follows."""
    if len(envelope.offsets) != len(envelope.groups):
        raise MalformedError("the envelope names another number of offsets")
    if frames or any(header.frames != 1 for header in envelope.groups):
        raise MalformedError("the envelope names frames beside its offsets")


decode_request = partial(_decoding, _request, limit=MESSAGE_LIMIT_BYTES, what="request")
decode_reply = partial(_decoding, _reply, limit=MESSAGE_LIMIT_BYTES, what="reply")
decode_event = partial(_decoding, _event, limit=MESSAGE_LIMIT_BYTES, what="event")
decode_ack = partial(_decoding, _ack, limit=ENVELOPE_LIMIT_BYTES, what="ack")
decode_drain = partial(_decoding, _drain, limit=ENVELOPE_LIMIT_BYTES, what="drain")
decode_table = partial(_decoding, _table, limit=TABLE_LIMIT_BYTES, what="column table")
decode_header = partial(_decoding, _header, limit=ENVELOPE_LIMIT_BYTES, what="group header")
decode_value = partial(_decoding, _value, limit=1 << 30, what="opaque column")
