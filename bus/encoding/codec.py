"""The codec: groups and messages to frames and back. Pure: no socket, no clock.

The body of a group has the blocks of its `ColumnTable`. The blocks of a column are its lengths, one u32 array for each
level unless it shares those of an earlier column, then its values. A block above `BIG_BLOCK_BYTES` has its own frame,
unless the caller provides room for the whole group. Decoding creates views into the frames and copies nothing.

Any input yields a value or a `WireError`: sizes are checked before decoding, and no allocation exceeds the received
frames.
"""

import math
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, Generic, TypeVar

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.encoding.group_layout import Block, GroupLayout, place
from rolloutmq.bus.encoding.opaque_columns import EncodedColumn, check_values, encode_opaque, require_few
from rolloutmq.bus.encoding.received_columns import (
    TABLES_KEPT,
    U32,
    Arrays,
    TablePlan,
    are_bools,
    plan_of,
    received_columns,
)
from rolloutmq.schemas.errors import (
    ChecksumError,
    GroupTooLargeError,
    InvalidGroupError,
    LimitExceededError,
    MalformedError,
    UsageError,
    VersionMismatchError,
)
from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.wire.control import Drain
from rolloutmq.schemas.wire.envelope import (
    BIG_BLOCK_BYTES,
    ENVELOPE_LIMIT_BYTES,
    FRAMES_LIMIT,
    PROTOCOL_VERSION,
    ColumnSpec,
    ColumnTable,
    Dtype,
    Envelope,
    GroupHeader,
    Message,
    PolicyVersion,
)
from rolloutmq.schemas.wire.replies import Ack, Reply
from rolloutmq.schemas.wire.requests import RegisterConsumer, RegisterProducer, Request
from rolloutmq.schemas.wire.telemetry import Event

Buffer = bytes | bytearray | memoryview
"""A frame: any object with the buffer protocol."""
Room = Callable[[int], tuple[mmap.mmap, int] | None]
"""Allocates that many bytes; returns the memory and the offset in it, or None if there is no room."""

MESSAGE_LIMIT_BYTES: Final = 8 << 20
"""Largest control message; a status with 10,000 workers is 3 MB."""
TABLE_LIMIT_BYTES: Final = 8 << 10
"""Largest column table: 64 columns with names, and names of shared lengths, of the greatest length."""

_OPAQUE: Final = Dtype.OPAQUE
_UNREAD: Final = Column.opaque(None)
_JOINED_BYTES: Final = 32 << 10
"""Up to this many bytes, a body is joined before it is copied: it stays in the cache, and one copy is one call."""
_T = TypeVar("_T")


_REGISTRATIONS: Final = frozenset({"register_producer", "register_consumer"})


class _Registration(msgspec.Struct, frozen=True):
    """The fields that registrations of all protocol versions share. Version 1 had no `protocol`."""

    kind: str
    protocol: int = 1


class EncodedGroup(msgspec.Struct, frozen=True, gc=False):
    """A group as frames, with their table, size and checksum."""

    table: ColumnTable
    frames: tuple[Any, ...]
    nbytes: int
    crc: int


class PreparedGroup(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A group ready to be encoded: its table, its blocks, their sizes, and their places if they become frames."""

    table: ColumnTable
    blocks: list[Block]
    sizes: tuple[int, ...]
    apart: GroupLayout

    @property
    def nbytes(self) -> int:
        """Size of all frames in bytes, as the limits count it."""
        return self.apart.nbytes


def prepare_group(group: Group) -> PreparedGroup:
    """Do all of `encode_group` that may fail and copies no big column.

    Raises:
        InvalidGroupError: An opaque column is not msgpack, or has too many values.
    """
    table, blocks, sizes = _described(group)
    return PreparedGroup(table, blocks, sizes, place(sizes, BIG_BLOCK_BYTES))


def encode_group(group: Group | PreparedGroup, limit: int, room: Room | None = None) -> EncodedGroup:
    """Encode a group.

    Args:
        group: A checked group; it may be prepared already.
        limit: Most bytes of all its frames.
        room: Called at most once for room for the whole group. If it returns room, the group becomes one frame there,
            with copies of big columns; every byte of it is overwritten. The room is always used.

    Raises:
        GroupTooLargeError: The frames exceed `limit`; nothing was allocated and `room` was not called.
        InvalidGroupError: An opaque column is not msgpack, or has too many values; `room` was not called.
    """
    prepared = group if isinstance(group, PreparedGroup) else prepare_group(group)
    blocks, apart = prepared.blocks, prepared.apart
    if apart.nbytes > limit:
        raise GroupTooLargeError(apart.nbytes, limit)
    if room is not None:
        whole = place(prepared.sizes, apart.nbytes) if apart.big else apart
        if whole.nbytes <= limit and (given := room(whole.nbytes)) is not None:
            frame, crc = _written(whole.body(blocks), whole.nbytes, *given)
            return EncodedGroup(prepared.table, (frame,), whole.nbytes, crc)
    frames = (memoryview(b"".join(apart.body(blocks))), *[memoryview(blocks[i]).cast("B") for i in apart.big])
    return EncodedGroup(prepared.table, frames, apart.nbytes, checksum(frames))


def _written(pieces: list[Block], nbytes: int, memory: mmap.mmap, start: int) -> tuple[memoryview, int]:
    """Write the pieces of a body into memory at `start`; return a view of it and its checksum."""
    end = start + nbytes
    if nbytes <= _JOINED_BYTES:
        body = b"".join(pieces)
        memory[start:end] = body
        return memoryview(memory)[start:end], google_crc32c.extend(0, body)
    at = start
    for piece in pieces:
        size = len(piece) if isinstance(piece, bytes) else piece.nbytes
        memory[at : at + size] = piece  # slice assignment copies a block of any element type
        at += size
    written = np.frombuffer(memory, np.uint8, nbytes, start)
    return memoryview(memory)[start:end], google_crc32c.extend(0, written)


def group_bytes(group: Group) -> int:
    """Return the size of all frames of a group in bytes, as `limit` counts it; raises what `prepare_group` raises."""
    return prepare_group(group).nbytes


def header_of(
    group: Group, encoded: EncodedGroup, *, seq: int, position: int, policy: PolicyVersion | None = None
) -> GroupHeader:
    """Return the header of an encoded group: number `seq` of its session, ending at byte `position`.

    `policy` is the version of a group without its own.
    """
    oldest, newest = group.oldest, group.newest
    if policy is not None and not group.stamped:
        oldest = newest = policy
    return GroupHeader(  # by position: names cost as much again
        seq,
        position,
        group.group_id,
        encoded.table.id,
        len(encoded.frames),
        encoded.nbytes,
        encoded.crc,
        group.sequences,
        group.tokens,
        oldest,
        newest,
        group.started_at,
        group.finished_at,
        group.rewards(),
        group.task,
    )


def decode_group(header: GroupHeader, table: ColumnTable, frames: Sequence[Buffer], env: str = "") -> Group:
    """Return a group of views into `frames`, which the group keeps alive.

    Raises:
        ChecksumError: The checksum differs from the header.
        MalformedError: The body contradicts its header or its table.
    """
    return decode_body(header, plan_of(table), [np.frombuffer(frame, np.uint8) for frame in frames], env)


def decode_body(header: GroupHeader, plan: TablePlan, arrays: Arrays, env: str = "") -> Group:
    """Do what `decode_group` does, for frames that are `bytes` or arrays of bytes."""
    nbytes = len(arrays[0]) if len(arrays) == 1 else sum(map(len, arrays))
    if nbytes != header.nbytes or len(arrays) != header.frames:
        raise MalformedError(
            f"group {header.group_id}: size differs from the header (got {nbytes} bytes in {len(arrays)} frames, "
            f"the header has {header.nbytes} in {header.frames})"
        )
    crc = google_crc32c.extend(0, arrays[0]) if len(arrays) == 1 else checksum(arrays)
    if crc != header.crc:
        raise ChecksumError(f"group {header.group_id}: checksum differs from the header")
    if plan.problem:
        raise MalformedError(f"group {header.group_id}: {plan.problem}")
    columns = received_columns(plan, header, arrays)
    if columns is None:
        return _checked(header, _read_columns(plan, arrays), env)
    return Group.received(header, columns, env)


def _checked(header: GroupHeader, columns: dict[str, Column], env: str) -> Group:
    """Return the group of these columns; MalformedError if they contradict each other or the header."""
    name = header.group_id
    group = Group.received(header, columns, env)
    try:
        group.check_values()
    except (InvalidGroupError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedError(f"group {name}: {error}") from None
    tokens = columns["tokens"].values.size
    if tokens != group.tokens:
        raise MalformedError(
            f"group {name}: token count differs from the header (got {tokens}, the header has {group.tokens})"
        )
    return group


def table_of(group: Group) -> ColumnTable:
    """Return the column table of a group. Columns with equal lengths share them; equal tables are the same object."""
    return _described(group)[0]


def _described(group: Group) -> tuple[ColumnTable, list[Block], tuple[int, ...]]:
    """Return the table of a group, and its blocks and their sizes in the order of the table.

    Each block is contiguous in memory.
    """
    owners: dict[tuple[bytes, ...], str] = {}
    latest: tuple[NDArray[np.uint32], ...] | None = None
    latest_owner = ""
    specs: list[str | int] = []
    blocks: list[Block] = []
    sizes: list[int] = []
    opaque: dict[str, bytes] = {}
    for name, column in group.columns.items():
        dtype, lengths, values = column.dtype, column.lengths, column.values
        shared = ""
        if lengths and lengths is latest:  # as columns of one group mostly are
            shared = latest_owner
        elif lengths:
            own = tuple(map(np.ndarray.tobytes, lengths))
            latest, latest_owner = lengths, owners.setdefault(own, name)
            if latest_owner == name:
                blocks += own
                sizes += map(len, own)
            else:
                shared = latest_owner
        specs += (name, dtype, len(lengths), shared)
        if dtype is not _OPAQUE:
            blocks.append(np.ascontiguousarray(values))
            sizes.append(values.nbytes)
            continue
        if isinstance(values, EncodedColumn):
            block = values.data
        else:
            block = opaque[name] = encode_opaque(name, values)
        blocks.append(block)
        sizes.append(len(block))
    if opaque:
        require_few(opaque)
    return _table_of(tuple(specs)), blocks, tuple(sizes)


@lru_cache(maxsize=TABLES_KEPT)
def _table_of(specs: tuple[Any, ...]) -> ColumnTable:
    """Return the table of columns of these names, element types, depths and owners of their lengths, in turn."""
    each = zip(*[iter(specs)] * 4, strict=True)
    return ColumnTable(tuple(ColumnSpec(name, Dtype(dtype), *others) for name, dtype, *others in each))


class _Blocks:
    """The blocks of a body, in their order."""

    def __init__(self, directory: struct.Struct, arrays: Arrays) -> None:
        if len(arrays[0]) < directory.size:
            raise MalformedError(
                f"body: shorter than its directory (got {len(arrays[0])} bytes, needs {directory.size})"
            )
        self._arrays = arrays
        self._rows = directory.unpack_from(arrays[0])
        for at in range(0, len(self._rows), 3):
            frame, offset, nbytes = self._rows[at : at + 3]
            if frame >= len(arrays) or offset + nbytes > len(arrays[frame]):
                raise MalformedError(f"block {at // 3}: ends outside its frame")
        self._at = 0

    def raw(self, skipped: int) -> memoryview:
        """Return the next block, after some that are skipped."""
        at = self._at + 3 * skipped
        frame, offset, nbytes = self._rows[at : at + 3]
        self._at = at + 3
        return memoryview(self._arrays[frame])[offset : offset + nbytes]

    def values(self, name: str, kind: np.dtype[Any]) -> NDArray[Any]:
        """Return the next block as a view of its elements."""
        at = self._at
        frame, offset, nbytes = self._rows[at : at + 3]
        self._at = at + 3
        if nbytes % kind.itemsize:
            raise MalformedError(
                f"column {name}: block size must be a multiple of {kind.itemsize} (got {nbytes})"
            )
        return np.frombuffer(self._arrays[frame], kind, nbytes // kind.itemsize, offset)


def _read_columns(plan: TablePlan, arrays: Arrays) -> dict[str, Column]:
    blocks = _Blocks(plan.directory, arrays)
    columns: dict[str, Column] = {}
    opaque: dict[str, memoryview] = {}
    for name, dtype, kind, _, levels, owner in plan.columns.values():
        if kind is None:
            opaque[name] = blocks.raw(levels)
            columns[name] = _UNREAD
            continue
        own = [blocks.values(name, U32) for _ in range(levels)]
        lengths = columns[owner].lengths if owner else tuple(own)
        values = blocks.values(name, kind)
        if kind.kind == "b":
            _require_bools(name, values.view(np.uint8))
        columns[name] = Column(dtype, values, lengths)
    if opaque:
        # The number of values in all opaque columns is checked before the first of them is decoded.
        check_values(opaque.values())
        for name, block in opaque.items():
            columns[name] = Column.opaque(decode_value(block))
    return columns


def _require_bools(name: str, raw: NDArray[np.uint8]) -> None:
    if not are_bools(raw):
        raise MalformedError(f"column {name}: bools must be 0 or 1 (got {raw.max()})")


def checksum(frames: Iterable[Buffer | NDArray[np.uint8]]) -> int:
    """Return the CRC32C (Castagnoli) over the frames in order."""
    crc = 0
    for frame in frames:
        # The C extension takes bytes and arrays, but no bytearray and no memoryview.
        data = frame if isinstance(frame, (bytes, np.ndarray)) else np.frombuffer(frame, np.uint8)
        crc = google_crc32c.extend(crc, data)
    return int(crc)


class _Decoder(Generic[_T]):
    """Decodes at most `limit` bytes; raises WireError for others, and for what is not of its kind.

    It is built on its first use: no process needs all, and each costs a part of a millisecond.
    """

    def __init__(self, kind: Any, limit: int, what: str) -> None:
        self._kind = kind
        self._limit = limit
        self._what = what

    def __call__(self, data: Buffer) -> _T:
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        if size > self._limit:
            raise LimitExceededError(f"size of the {self._what}", size, self._limit)
        try:
            return self.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedError(f"{self._what}: {error}") from None

    @cached_property
    def decode(self) -> Callable[[Buffer], _T]:
        built: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(self._kind)
        return built.decode


_envelope: Final = _Decoder[Envelope](Envelope, ENVELOPE_LIMIT_BYTES, "envelope")
_request: Final = _Decoder[Request](Request, MESSAGE_LIMIT_BYTES, "request")
_registration: Final = _Decoder[_Registration](_Registration, MESSAGE_LIMIT_BYTES, "request")
decode_reply: Final = _Decoder[Reply](Reply, MESSAGE_LIMIT_BYTES, "reply")
decode_event: Final = _Decoder[Event](Event, MESSAGE_LIMIT_BYTES, "event")
decode_ack: Final = _Decoder[Ack](Ack, ENVELOPE_LIMIT_BYTES, "ack")
decode_drain: Final = _Decoder[Drain](Drain, ENVELOPE_LIMIT_BYTES, "drain")
decode_table: Final = _Decoder[ColumnTable](ColumnTable, TABLE_LIMIT_BYTES, "column table")
decode_tables: Final = _Decoder[tuple[ColumnTable, ...]](
    tuple[ColumnTable, ...], MESSAGE_LIMIT_BYTES, "column tables of the batch"
)
decode_header: Final = _Decoder[GroupHeader](GroupHeader, ENVELOPE_LIMIT_BYTES, "group header")
decode_value: Final = _Decoder[Any](Any, 1 << 30, "opaque column")


def encode(value: Message | Envelope | GroupHeader | ColumnTable | PolicyVersion) -> bytes:
    """Encode a control message or a part of the wire as msgpack."""
    return msgspec.msgpack.encode(value)


@lru_cache(maxsize=TABLES_KEPT)
def encode_tables(tables: tuple[ColumnTable, ...]) -> msgspec.Raw:
    """Encode the tables of a batch."""
    return msgspec.Raw(msgspec.msgpack.encode(tables))


def require_encodable(message: Message) -> None:
    """Raise UsageError, naming the field, if a field of a message has a value that its receiver would refuse."""
    for field in msgspec.structs.fields(type(message)):
        name, value = field.name, getattr(message, field.name)
        problem = ""
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=field.type)
        except UnicodeEncodeError:
            problem = "must be text that UTF-8 can encode"
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            problem = str(error)
        if isinstance(value, float) and not math.isfinite(value):
            problem = "must be finite"
        if problem:
            raise UsageError(f"{name}: {problem} (got {value!a:.80})")


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode an envelope; LimitExceededError if it is above 4 KiB."""
    data = msgspec.msgpack.encode(envelope)
    if len(data) > ENVELOPE_LIMIT_BYTES:
        raise LimitExceededError("size of the envelope", len(data), ENVELOPE_LIMIT_BYTES)
    return data


def decode_envelope(frame: Buffer, frames: int, nbytes: int) -> Envelope:
    """Decode the first frame of a producer's message, and check it against the frames that follow.

    Args:
        frame: The first frame.
        frames: Number of frames after it.
        nbytes: Bytes of the frames after it.

    Raises:
        WireError: It is not an envelope of this version, or it contradicts the frames.
    """
    if frames + 1 > FRAMES_LIMIT:
        raise LimitExceededError("frames of a message", frames + 1, FRAMES_LIMIT)
    envelope = _envelope(frame)
    if envelope.version != PROTOCOL_VERSION:
        raise VersionMismatchError(envelope.version, PROTOCOL_VERSION)
    if envelope.offsets:
        _require_in_arena(envelope, frames)
        return envelope
    named = sum(header.frames for header in envelope.groups)
    if named != frames:
        raise MalformedError(f"envelope: frame count differs from the message (got {named}, {frames} follow)")
    named = sum(header.nbytes for header in envelope.groups)
    if named != nbytes:
        raise MalformedError(f"envelope: size differs from the message (got {named} bytes, {nbytes} follow)")
    return envelope


def _require_in_arena(envelope: Envelope, frames: int) -> None:
    """Require that every group of a message is one piece in an arena, and that no frame follows."""
    if len(envelope.offsets) != len(envelope.groups):
        raise MalformedError(
            f"envelope: needs one offset for each group (got {len(envelope.offsets)} for {len(envelope.groups)})"
        )
    if frames or any(header.frames != 1 for header in envelope.groups):
        raise MalformedError("envelope: a group in an arena must have one frame and no frames may follow")


def decode_request(frame: Buffer) -> Request:
    """Decode a request.

    Raises:
        VersionMismatchError: It registers a peer of another protocol version; checked even if it does not decode.
        WireError: It is not a request.
    """
    try:
        request = _request(frame)
    except MalformedError:
        _require_own_version(frame)
        raise
    if isinstance(request, RegisterProducer | RegisterConsumer):
        _require_own_version(frame)
    return request


def _require_own_version(frame: Buffer) -> None:
    """Raise VersionMismatchError for a registration by a peer of another version."""
    try:
        found = _registration.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if found.kind in _REGISTRATIONS and found.protocol != PROTOCOL_VERSION:
        raise VersionMismatchError(found.protocol, PROTOCOL_VERSION)
