"""Groups and messages to frames and back. Pure: no socket, no clock.

The body of a group (`body`) has the blocks of its `ColumnTable`: those of a column are its lengths, one u32 array per
level unless it shares those of an earlier column, then its values. A block above `BIG_BLOCK_BYTES` lies alone in a
frame of its own, unless all was laid into room that the caller gave. Decoding makes views into the frames and copies
nothing.

Whatever a peer sends ends in a value or in a `WireError`: sizes are checked before anything is decoded, and no
allocation is larger than the frames that came in.
"""

import mmap
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.body import ROW, Block, joined, lay, place
from rolloutmq.bus.opaque import Encoded, check_values, encode_opaque, require_few
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
Room = Callable[[int], tuple[mmap.mmap, int] | None]
"""Gives the memory, and the offset in it, at which that many bytes may be written; None if there is no room."""

MESSAGE_LIMIT_BYTES: Final = 8 << 20
"""Largest control message; a status of 10,000 workers is 3 MB."""
TABLE_LIMIT_BYTES: Final = 8 << 10
"""Largest column table: 64 columns whose names, and the names whose lengths they share, are as long as can be."""

TABLES_KEPT: Final = 256
"""Column tables that are remembered, so that groups of one kind share one."""

_U32: Final = np.dtype("<u4")
_OPAQUE: Final = Dtype.OPAQUE
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
        InvalidGroupError: A value of an opaque column is not msgpack, or there are too many. No room was asked for.
    """
    table, blocks = _described(group)
    apart = place(blocks, BIG_BLOCK_BYTES)
    if apart.nbytes > limit:
        raise GroupTooLargeError(apart.nbytes, limit)
    if room is not None:
        whole = place(blocks, apart.nbytes) if apart.big else apart
        if whole.nbytes <= limit and (given := room(whole.nbytes)) is not None:
            frame = lay(whole, *given)
            return EncodedGroup(table, (frame,), whole.nbytes, checksum((frame,)))
    frames = (joined(apart), *[memoryview(block).cast("B") for block in apart.big])
    return EncodedGroup(table, frames, apart.nbytes, checksum(frames))


def group_bytes(group: Group) -> int:
    """Return how many bytes the frames of a group would have together, as `limit` counts them.

    Raises:
        InvalidGroupError: A value of an opaque column is not msgpack.
    """
    return place(_described(group)[1], BIG_BLOCK_BYTES).nbytes


def header_of(
    group: Group, encoded: EncodedGroup, *, seq: int, position: int, policy: PolicyVersion | None = None
) -> GroupHeader:
    """Describe an encoded group as number `seq` of its session, ending at `position`.

    `policy` stands for the versions of a group that does not tell its own.
    """
    oldest, newest = group.oldest, group.newest
    if policy is not None and not group.stamped:
        oldest = newest = policy
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
        oldest=oldest,
        newest=newest,
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
    return _described(group)[0]


def _described(group: Group) -> tuple[ColumnTable, list[Block]]:
    """Return the table of a group, and its blocks in the order of the table, each of one piece in memory."""
    owners: list[tuple[str, list[bytes]]] = []
    specs = []
    blocks: list[Block] = []
    opaque: dict[str, bytes] = {}
    for name, column in group.columns.items():
        shared = ""
        if lengths := column.lengths:
            own = list(map(np.ndarray.tobytes, lengths))
            for owner, others in owners:
                if own == others:
                    shared = owner
                    break
            else:
                owners.append((name, own))
                blocks += map(memoryview, own)
        specs.append((name, int(column.dtype), len(lengths), shared))
        if column.dtype is _OPAQUE:
            value = column.values
            if isinstance(value, Encoded):
                blocks.append(memoryview(value.data))
            else:
                opaque[name] = encode_opaque(name, value)
                blocks.append(memoryview(opaque[name]))
        else:
            blocks.append(np.ascontiguousarray(column.values))
    require_few(opaque)
    return _table_of(tuple(specs)), blocks


@lru_cache(maxsize=TABLES_KEPT)
def _table_of(specs: tuple[tuple[str, int, int, str], ...]) -> ColumnTable:
    return ColumnTable(
        tuple(ColumnSpec(name, Dtype(dtype), depth, shared) for name, dtype, depth, shared in specs)
    )


def _read_blocks(table: ColumnTable, arrays: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    size = table.blocks * ROW
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


def checksum(frames: Iterable[Buffer | NDArray[np.uint8]]) -> int:
    """CRC32C (Castagnoli) over the frames in their order."""
    crc = 0
    for frame in frames:
        # The C extension takes bytes and arrays, but no bytearray and no memoryview.
        data = frame if isinstance(frame, (bytes, np.ndarray)) else np.frombuffer(frame, np.uint8)
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
