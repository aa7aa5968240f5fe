"""Groups and messages to frames and back. Pure: no socket, no clock.

Body of a group, little-endian: a directory with one row of three u64 (frame, offset, length) for each block of its
`ColumnTable`, then the blocks at offsets that are multiples of 64. A block above `BIG_BLOCK_BYTES` lies alone in a
frame of its own. The blocks of a column are its lengths, one u32 array per level unless it shares those of an earlier
column, then its values. Decoding makes views into the frames and copies nothing.

Whatever a peer sends ends in a value or in a `WireError`: sizes are checked before anything is decoded, and no
allocation is larger than the frames that came in.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

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

ALIGNMENT_BYTES: Final = 64
"""Offsets of blocks: a cache line, and enough for any vector instruction."""
MESSAGE_LIMIT_BYTES: Final = 8 << 20
"""Largest control message; a status of 10,000 workers is 3 MB."""
TABLE_LIMIT_BYTES: Final = 8 << 10
"""Largest column table: 64 columns whose names, and the names whose lengths they share, are as long as can be."""

_ROW: Final = 24
_T = TypeVar("_T")


class EncodedGroup(msgspec.Struct, frozen=True, gc=False):
    """A group as frames, and what its header will say of them."""

    table: ColumnTable
    frames: tuple[Any, ...]
    nbytes: int
    crc: int


def encode_group(group: Group, limit: int) -> EncodedGroup:
    """Lay out a group's columns.

    Args:
        group: A checked group.
        limit: Most bytes that its frames may have together.

    Raises:
        GroupTooLargeError: They have more; nothing was allocated.
        InvalidGroupError: A value of an opaque column is not msgpack.
    """
    table = table_of(group)
    blocks = _blocks(group, table)
    frames_of, offsets, body_bytes, big = _place(blocks)
    nbytes = body_bytes + sum(blocks[index].nbytes for index in big)
    if nbytes > limit:
        raise GroupTooLargeError(nbytes, limit)
    body = np.zeros(body_bytes, np.uint8)
    directory = np.array([(frames_of[i], offsets[i], block.nbytes) for i, block in enumerate(blocks)], "<u8")
    body[: directory.nbytes] = directory.reshape(-1).view(np.uint8)
    for index, block in enumerate(blocks):
        if frames_of[index] == 0:
            body[offsets[index] : offsets[index] + block.nbytes] = block
    frames = (body, *(blocks[index] for index in big))
    return EncodedGroup(table, tuple(f.data for f in frames), nbytes, checksum(frames))


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
    blocks = _read_directory(table, arrays)
    opaque = [spec for spec in table.columns if spec.dtype is Dtype.OPAQUE]
    check_values(blocks[spec.name, spec.blocks - 1].data for spec in opaque)
    columns: dict[str, Column] = {}
    for spec in table.columns:
        columns[spec.name] = _read_column(spec, blocks, columns)
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
    """Describe the columns of a group; equal lengths are named once."""
    specs: list[ColumnSpec] = []
    for name, column in group.columns.items():
        shared = next(
            (
                spec.name
                for spec in specs
                if column.depth
                and spec.depth == column.depth
                and not spec.lengths_of
                and _same_lengths(group.columns[spec.name], column)
            ),
            "",
        )
        specs.append(ColumnSpec(name, column.dtype, column.depth, shared))
    return ColumnTable(tuple(specs))


def _same_lengths(one: Column, other: Column) -> bool:
    return all(
        a is b or (a.size == b.size and bool((a == b).all()))
        for a, b in zip(one.lengths, other.lengths, strict=True)
    )


def _blocks(group: Group, table: ColumnTable) -> list[NDArray[np.uint8]]:
    blocks: list[NDArray[np.uint8]] = []
    for spec in table.columns:
        column = group.columns[spec.name]
        if spec.dtype is Dtype.OPAQUE:
            blocks.append(np.frombuffer(encode_opaque(spec.name, column.values), np.uint8))
            continue
        if not spec.lengths_of:
            blocks.extend(_bytes_of(lengths.astype("<u4", copy=False)) for lengths in column.lengths)
        blocks.append(_bytes_of(column.values))
    return blocks


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _place(blocks: Sequence[NDArray[np.uint8]]) -> tuple[list[int], list[int], int, list[int]]:
    """Return frame and offset of each block, the size of the body, and the blocks with own frames."""
    frames, offsets, big = [], [], []
    end = len(blocks) * _ROW
    for index, block in enumerate(blocks):
        if block.nbytes > BIG_BLOCK_BYTES:
            big.append(index)
            frames.append(len(big))
            offsets.append(0)
            continue
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        frames.append(0)
        offsets.append(start)
        end = start + block.nbytes
    return frames, offsets, end, big


def _read_directory(
    table: ColumnTable, arrays: Sequence[NDArray[np.uint8]]
) -> dict[tuple[str, int], NDArray[np.uint8]]:
    size = table.blocks * _ROW
    if arrays[0].nbytes < size:
        raise MalformedError("the body is shorter than its directory")
    rows = arrays[0][:size].view("<u8").reshape(-1, 3).tolist()
    blocks: dict[tuple[str, int], NDArray[np.uint8]] = {}
    names = ((spec.name, level) for spec in table.columns for level in range(spec.blocks))
    for key, (frame, offset, nbytes) in zip(names, rows, strict=True):
        if frame >= len(arrays) or offset + nbytes > arrays[frame].nbytes:
            raise MalformedError(f"column {key[0]}: block lies outside its frame")
        blocks[key] = arrays[frame][offset : offset + nbytes]
    return blocks


def _read_column(
    spec: ColumnSpec, blocks: Mapping[tuple[str, int], NDArray[np.uint8]], done: Mapping[str, Column]
) -> Column:
    raw = blocks[spec.name, spec.blocks - 1]
    if spec.dtype is Dtype.OPAQUE:
        return Column.opaque(decode_value(raw.data))
    if spec.lengths_of:
        owner = done.get(spec.lengths_of)
        if owner is None or owner.depth != spec.depth:
            raise MalformedError(f"column {spec.name}: shares the lengths of no earlier column")
        lengths = owner.lengths
    else:
        lengths = tuple(
            _view(spec.name, blocks[spec.name, level], np.dtype("<u4")) for level in range(spec.depth)
        )
    return Column(spec.dtype, _view(spec.name, raw, numpy_dtype(spec.dtype)), lengths)


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
        # The C extension takes read-only buffers and arrays, but no bytearray and no memoryview.
        data = frame if isinstance(frame, bytes) else np.frombuffer(frame, np.uint8)
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
    """Decode the first frame of a producer's message and hold it against the frames that follow.

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
    if sum(header.frames for header in envelope.groups) != frames:
        raise MalformedError("the envelope names another number of frames")
    if sum(header.nbytes for header in envelope.groups) != nbytes:
        raise MalformedError("the envelope names another number of bytes")
    return envelope


decode_request = partial(_decoding, _request, limit=MESSAGE_LIMIT_BYTES, what="request")
decode_reply = partial(_decoding, _reply, limit=MESSAGE_LIMIT_BYTES, what="reply")
decode_event = partial(_decoding, _event, limit=MESSAGE_LIMIT_BYTES, what="event")
decode_ack = partial(_decoding, _ack, limit=ENVELOPE_LIMIT_BYTES, what="ack")
decode_drain = partial(_decoding, _drain, limit=ENVELOPE_LIMIT_BYTES, what="drain")
decode_table = partial(_decoding, _table, limit=TABLE_LIMIT_BYTES, what="column table")
decode_header = partial(_decoding, _header, limit=ENVELOPE_LIMIT_BYTES, what="group header")
decode_value = partial(_decoding, _value, limit=1 << 30, what="opaque column")
