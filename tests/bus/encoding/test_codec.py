"""The codec by properties: groups survive bit for bit, and any other input is a WireError."""

import math
import mmap
import resource
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.encoding.codec import decode_group, encode_group, group_bytes
from rolloutmq.bus.encoding.opaque_columns import VALUES_LIMIT, EncodedColumn, encode_opaque
from rolloutmq.schemas.errors import (
    ChecksumError,
    GroupTooLargeError,
    InvalidGroupError,
    LimitExceededError,
    MalformedError,
    VersionMismatchError,
    WireError,
)
from rolloutmq.schemas.group import COLUMN_DEPTH, OPAQUE_COLUMNS, Column, Group, numpy_dtype
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
    PolicyVersion,
    Split,
)
from rolloutmq.schemas.wire.requests import RegisterConsumer, RegisterProducer

LIMIT = 1 << 26
NUMERIC = [dtype for dtype in Dtype if dtype is not Dtype.OPAQUE]


def values(dtype: Dtype, size: int, seed: int) -> NDArray[Any]:
    """Random bits, so that every NaN payload, infinity and subnormal comes up."""
    kind = numpy_dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype is Dtype.BOOL:
        return rng.integers(0, 2, size).astype(bool)
    return rng.integers(0, 256, size * kind.itemsize, np.uint8).view(kind)


def finite(dtype: Dtype, size: int) -> NDArray[Any]:
    """Scores must be finite; those of every type."""
    if dtype is Dtype.BF16:
        return (np.arange(size, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return (np.arange(size) % 2).astype(numpy_dtype(dtype))


@st.composite
def lengths(draw: st.DrawFn, n: int, depth: int) -> tuple[NDArray[np.uint32], ...]:
    levels: list[NDArray[np.uint32]] = []
    rows = n
    for _ in range(depth):
        level = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
        levels.append(np.array(level, np.uint32))
        rows = sum(level)
    return tuple(levels)


OPAQUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Any group: every element type, depth, ragged shape and known column, and columns of one's own."""
    n = draw(st.integers(1, 5))
    rows = draw(lengths(n, 1))
    total = int(rows[0].sum())
    seed = st.integers(0, 1 << 30)
    columns = {
        "tokens": Column(Dtype.I32, values(Dtype.I32, total, draw(seed)), rows),
        "mask": Column(Dtype.BOOL, values(Dtype.BOOL, total, draw(seed)), tuple(r.copy() for r in rows)),
        "scores": Column((dtype := draw(st.sampled_from(NUMERIC))), finite(dtype, n)),
    }
    known = st.sampled_from(sorted(set(COLUMN_DEPTH) | OPAQUE_COLUMNS | {"mine_0", "mine_1", "mine_2"}))
    for name in draw(st.lists(known, max_size=8, unique=True)):
        if name in columns:
            continue
        if name in OPAQUE_COLUMNS:
            columns[name] = Column.opaque(draw(OPAQUE))
            continue
        depth = COLUMN_DEPTH.get(name, int(name[-1]) if name[-1].isdigit() else 1)
        dtype = draw(st.sampled_from(NUMERIC))
        own = rows if depth == 1 else draw(lengths(n, depth))
        size = int(own[-1].sum()) if own else n
        columns[name] = Column(dtype, values(dtype, size, draw(seed)), own)
    version = st.builds(PolicyVersion, st.integers(0, 9), st.integers(0, 1 << 62))
    return Group(
        draw(st.text(min_size=1, max_size=128)),
        columns,
        draw(version),
        draw(version),
        draw(st.floats(allow_nan=False, allow_infinity=False)),
        draw(st.floats(allow_nan=False, allow_infinity=False)),
        task=draw(st.text(max_size=128)),
        sequences=n,
        tokens=total,
    )


def header_of(group: Group, body: codec.EncodedGroup) -> GroupHeader:
    return codec.header_of(group, body, seq=1, position=body.nbytes)


def sent(group: Group) -> tuple[GroupHeader, ColumnTable, list[bytes]]:
    """Encode a group and return what arrives at the other end, header and table by the wire too."""
    group.check()
    body = encode_group(group, LIMIT)
    frames = [bytes(frame) for frame in body.frames]
    assert sum(map(len, frames)) == body.nbytes
    header = codec.decode_header(codec.encode(header_of(group, body)))
    return header, codec.decode_table(codec.encode(body.table)), frames


def assert_equal(one: Group, other: Group) -> None:
    assert list(one.columns) == list(other.columns)
    for name, column in one.columns.items():
        back = other.columns[name]
        assert (back.dtype, back.depth) == (column.dtype, column.depth), name
        if column.dtype is Dtype.OPAQUE:
            assert back.values == column.values
            continue
        assert back.values.dtype == numpy_dtype(column.dtype)
        assert back.values.tobytes() == column.values.tobytes(), name
        for mine, theirs in zip(column.lengths, back.lengths, strict=True):
            assert mine.tolist() == theirs.tolist(), name
        assert len(back.rows()) == one.sequences
    for name in ("group_id", "oldest", "newest", "started_at", "finished_at", "task", "sequences", "tokens"):
        assert getattr(one, name) == getattr(other, name), name


@given(groups())
@settings(max_examples=200, deadline=None)
def test_every_group_comes_back_bit_for_bit(group: Group) -> None:
    header, table, frames = sent(group)
    assert_equal(group, decode_group(header, table, frames, "env"))


@pytest.mark.parametrize("dtype", NUMERIC)
def test_every_element_type_has_every_bit_pattern(dtype: Dtype) -> None:
    """All 65,536 patterns where an element has two bytes; NaN payloads and both zeros among them."""
    kind = numpy_dtype(dtype)
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    own = np.array([0, 1] * 8, np.uint8) if dtype is Dtype.BOOL else patterns
    column = Column(dtype, own.view(kind), (np.array([own.view(kind).size], np.uint32),))
    group = Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0], mine=column)
    header, table, frames = sent(group)
    assert decode_group(header, table, frames).columns["mine"].values.tobytes() == own.tobytes()


def test_payloads_of_nan_survive_in_opaque_columns_too() -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    group = Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0], overrides=[{"t": odd}])
    back = decode_group(*sent(group)).columns["overrides"].values[0]["t"]
    assert math.isnan(back)
    assert struct.pack("<d", back) == struct.pack("<d", odd)


def test_equal_lengths_travel_once() -> None:
    rows = [[1, 2], [3]]
    group = Group.build(
        "g", tokens=rows, mask=rows, scores=[0, 1], ref_logprobs=[[0, -1], [0]], mine=[[1], [2, 3]]
    )
    shared = {spec.name: spec.lengths_of for spec in codec.table_of(group).columns}
    assert shared == {
        "tokens": "", "mask": "tokens", "scores": "", "ref_logprobs": "tokens", "mine": ""
    }  # fmt: skip


def test_blocks_are_aligned_and_big_ones_have_a_frame_of_their_own_without_a_copy() -> None:
    length = BIG_BLOCK_BYTES // 8 + 1
    tokens = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    group = Group.build("g", tokens=tokens, mask=tokens > 0, scores=[0.0, 1.0], mine=[[1, 2], [3]])
    header, table, frames = sent(group)
    assert header.frames == 2
    assert len(frames[1]) == tokens.nbytes
    body = encode_group(group, LIMIT).frames
    assert np.shares_memory(np.frombuffer(body[1], np.int32), tokens)
    rows = np.frombuffer(frames[0], "<u8", table.blocks * 3).reshape(-1, 3)
    assert all(offset % 64 == 0 for _, offset, _ in rows)
    assert_equal(group, decode_group(header, table, frames))


class Room:
    """Room with old bytes in it, between two guards."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.whole = mmap.mmap(-1, 1)

    def __call__(self, nbytes: int) -> tuple[mmap.mmap, int]:
        self.asked.append(nbytes)
        self.whole = mmap.mmap(-1, nbytes + 2)
        self.whole[:] = b"\xa5" * (nbytes + 2)
        return self.whole, 1


def small_and_big() -> list[Group]:
    length = BIG_BLOCK_BYTES // 4 + 1
    tokens = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    mask = np.ones((2, length), np.float64)
    big = Group.build("g", tokens=tokens, mask=mask, scores=[0.0, 1.0], mine=[[1, 2], [3]], messages=["m"])
    return [Group.build("g", tokens=[[1], []], mask=[[1], []], scores=[0, 1], mine=[[], []]), big]


@given(groups())
@settings(max_examples=100, deadline=None)
def test_a_body_in_given_room_is_that_of_a_frame_and_nothing_else_is_touched(group: Group) -> None:
    room = Room()
    body = encode_group(group, LIMIT, room)
    plain = encode_group(group, LIMIT)
    assert room.asked == [body.nbytes]
    assert [bytes(frame) for frame in body.frames] == [bytes(frame) for frame in plain.frames]
    assert (body.nbytes, body.crc, body.table) == (plain.nbytes, plain.crc, plain.table)
    assert (room.whole[0], room.whole[-1]) == (0xA5, 0xA5)


@pytest.mark.parametrize("group", small_and_big(), ids=["small", "big"])
def test_all_columns_lie_in_one_frame_where_there_is_room(group: Group) -> None:
    room = Room()
    body = encode_group(group, LIMIT, room)
    (frame,) = body.frames
    assert np.shares_memory(np.frombuffer(frame, np.uint8), np.frombuffer(room.whole, np.uint8))
    assert (body.nbytes, body.crc) == (frame.nbytes, codec.checksum([frame]))
    header = header_of(group, body)
    assert (header.frames, header.nbytes) == (1, frame.nbytes)
    back = decode_group(header, body.table, [frame])
    assert_equal(group, back)
    used = np.zeros(frame.nbytes, bool)
    rows = np.frombuffer(frame, "<u8", body.table.blocks * 3).reshape(-1, 3)
    used[: rows.nbytes] = True
    for which, offset, nbytes in rows.tolist():
        assert (which, offset % 64) == (0, 0)
        used[offset : offset + nbytes] = True
    assert not np.frombuffer(frame, np.uint8)[~used].any()


def test_a_column_that_is_not_of_one_piece_is_laid_out_as_one_that_is() -> None:
    values = np.arange(12, dtype=np.int32)
    lengths = (np.array([2, 4], np.uint32),)
    pieces = Column(Dtype.I32, values[::2], lengths), Column(Dtype.I32, values[::2].copy(), lengths)
    rows = [[1, 2], [3, 4, 5, 6]]
    apart, whole = (Group.build("g", tokens=rows, mask=rows, scores=[0, 1], mine=one) for one in pieces)
    assert encode_group(apart, LIMIT) == encode_group(whole, LIMIT)
    assert encode_group(apart, LIMIT, Room()) == encode_group(whole, LIMIT, Room())


def test_what_would_be_refused_at_its_end_is_refused_at_its_beginning() -> None:
    half = [None] * (VALUES_LIMIT // 2)
    group = Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0], messages=half, images=half)
    with pytest.raises(InvalidGroupError, match="opaque values"):
        encode_group(group, LIMIT)


def test_an_encoded_value_travels_as_the_value_would() -> None:
    images = {"a": [1, "b", None]}
    kept = Column.opaque(EncodedColumn(encode_opaque("images", images)))
    plain, before = (
        Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0], images=value) for value in (images, kept)
    )
    assert encode_group(before, LIMIT) == encode_group(plain, LIMIT)


@pytest.mark.parametrize("size", [1, 5000])
def test_the_size_of_a_group_is_known_before_it_is_laid_out(size: int) -> None:
    group = Group.build("g", tokens=[[1] * size], mask=[[1] * size], scores=[0.0], images="x" * size * 100)
    assert group_bytes(group) == encode_group(group, LIMIT).nbytes
    with pytest.raises(GroupTooLargeError):
        encode_group(group, group_bytes(group) - 1)


@pytest.mark.parametrize("group", small_and_big(), ids=["small", "big"])
def test_without_room_all_is_as_if_nobody_had_asked(group: Group) -> None:
    asked: list[int] = []
    body = encode_group(group, LIMIT, asked.append)
    plain = encode_group(group, LIMIT)
    assert len(asked) == 1
    assert [bytes(frame) for frame in body.frames] == [bytes(frame) for frame in plain.frames]
    assert (body.nbytes, body.crc) == (plain.nbytes, plain.crc)


@pytest.mark.parametrize("group", small_and_big(), ids=["small", "big"])
def test_room_is_asked_for_only_if_it_will_be_used(group: Group) -> None:
    room = Room()
    apart, whole = encode_group(group, LIMIT).nbytes, encode_group(group, LIMIT, Room()).nbytes
    assert encode_group(group, whole, room).nbytes == room.asked.pop() == whole
    with pytest.raises(GroupTooLargeError):
        encode_group(group, apart - 1, room)
    # A group that fits its limit in frames of their own, and with the gaps between them not, goes in frames.
    assert encode_group(group, apart, room).nbytes == apart
    bad = Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0], images=[object()])
    with pytest.raises(InvalidGroupError):
        encode_group(bad, LIMIT, room)
    assert room.asked == ([apart] if apart == whole else [])


def test_groups_of_one_kind_share_their_table() -> None:
    rows = [[1, 2], [3]]
    made = [Group.build("g", tokens=rows, mask=rows, scores=[0, n], mine=[[n], [2, 3]]) for n in range(2)]
    other = Group.build("g", tokens=rows, mask=rows, scores=[0, 1], mine=rows)
    tables = [codec.table_of(group) for group in (*made, other)]
    assert tables[0] is tables[1]
    assert tables[2].columns[-1].lengths_of == "tokens"
    assert tables[0].id != tables[2].id


def test_decoding_copies_nothing_and_gives_read_only_views() -> None:
    header, table, frames = sent(Group.build("g", tokens=[[1, 2]], mask=[[1, 1]], scores=[0.0]))
    tokens = decode_group(header, table, frames).columns["tokens"].values
    assert np.shares_memory(tokens, np.frombuffer(frames[0], np.uint8))
    assert not tokens.flags.writeable


def test_a_group_above_the_limit_is_refused_before_it_is_laid_out() -> None:
    tokens = np.zeros((1, 100_000), np.int32)
    group = Group.build("g", tokens=tokens, mask=tokens, scores=[0.0])
    size = encode_group(group, LIMIT).nbytes
    assert encode_group(group, size).nbytes == size
    with pytest.raises(GroupTooLargeError) as caught:
        encode_group(group, size - 1)
    assert (caught.value.nbytes, caught.value.limit) == (size, size - 1)


def test_what_is_no_msgpack_is_said_with_its_column() -> None:
    group = Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0], images=[object()])
    with pytest.raises(InvalidGroupError, match="images"):
        encode_group(group, LIMIT)


@given(groups(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_anywhere_is_a_checksum_error(group: Group, data: st.DataObject) -> None:
    header, table, frames = sent(group)
    which = data.draw(st.integers(0, len(frames) - 1))
    damaged = bytearray(frames[which])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    frames[which] = bytes(damaged)
    with pytest.raises(ChecksumError):
        decode_group(header, table, frames)


@given(groups(), st.data())
@settings(max_examples=100, deadline=None)
def test_frames_that_were_cut_or_grew_or_went_are_malformed(group: Group, data: st.DataObject) -> None:
    header, table, frames = sent(group)
    change = data.draw(st.sampled_from(["cut", "grow", "more", "none"]))
    if change == "cut":
        frames[-1] = frames[-1][: data.draw(st.integers(0, len(frames[-1]) - 1))]
    elif change == "grow":
        frames[-1] += b"\0"
    else:
        frames = [*frames, b""] if change == "more" else []
    with pytest.raises(MalformedError):
        decode_group(header, table, frames)


def recounted(header: GroupHeader, frames: list[bytes]) -> GroupHeader:
    """Make the header true of the frames, as a peer does that means harm."""
    nbytes = sum(map(len, frames))
    return msgspec.structs.replace(header, nbytes=nbytes, frames=len(frames), crc=codec.checksum(frames))


@given(groups(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_body_that_lies_with_a_right_checksum_is_a_value_or_a_wire_error(
    group: Group, data: st.DataObject
) -> None:
    header, table, frames = sent(group)
    body = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        # The directory, its offsets and sizes, is the front of the body: aim there half of the time.
        end = data.draw(st.sampled_from([table.blocks * 24, len(body)]))
        body[data.draw(st.integers(0, end - 1))] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xDD, 0xFF]))
    frames[0] = (
        bytes(body[: data.draw(st.integers(1, len(body)))]) if data.draw(st.booleans()) else bytes(body)
    )
    try:
        back = decode_group(recounted(header, frames), table, frames)
    except WireError:
        return
    back.check()
    assert sum(len(row) for row in back["tokens"]) == group.tokens


@given(groups(), st.data())
@settings(max_examples=100, deadline=None)
def test_another_table_than_the_right_one_is_a_value_or_a_wire_error(
    group: Group, data: st.DataObject
) -> None:
    header, table, frames = sent(group)
    specs = list(table.columns)
    names = st.sampled_from([*(spec.name for spec in specs), "other"])
    for index in data.draw(st.lists(st.integers(0, len(specs) - 1), max_size=3)):
        specs[index] = ColumnSpec(
            data.draw(names),
            data.draw(st.sampled_from(list(Dtype))),
            data.draw(st.integers(0, 2)),
            data.draw(st.sampled_from(["", "tokens", "mask", "scores", "other", "mine_2"])),
        )
    try:
        decode_group(header, ColumnTable(tuple(specs)), frames).check()
    except WireError:
        return


def crafted(
    specs: list[ColumnSpec], blocks: list[bytes], **more: Any
) -> tuple[GroupHeader, ColumnTable, list[bytes]]:
    """A group whose body is laid out by hand, so that it may say anything."""
    start = 24 * len(blocks)
    rows, data = [], b""
    for block in blocks:
        rows.append((0, start + len(data), len(block)))
        data += block
    frames = [b"".join(struct.pack("<QQQ", *row) for row in rows) + data]
    about = {"sequences": 1, "tokens": 1, **more}
    plain = Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0])
    header = msgspec.structs.replace(header_of(plain, encode_group(plain, LIMIT)), **about)
    return recounted(header, frames), ColumnTable(tuple(specs)), frames


U1 = struct.pack("<I", 1)
PLAIN = [
    ColumnSpec("tokens", Dtype.I32, 1),
    ColumnSpec("mask", Dtype.I32, 1, "tokens"),
    ColumnSpec("scores", Dtype.F64, 0),
]


def test_a_crafted_group_can_be_right() -> None:
    assert decode_group(*crafted(PLAIN, [U1, U1, U1, bytes(8)])).tokens == 1


@pytest.mark.parametrize(
    ("specs", "blocks"),
    [
        (PLAIN, [U1, U1, U1, struct.pack("<d", math.nan)]),
        (PLAIN, [struct.pack("<I", 2), U1, U1, bytes(8)]),
        (PLAIN, [b"\xff\xff\xff\xff", U1, U1, bytes(8)]),
        (PLAIN, [U1, U1, U1 + U1, bytes(8)]),
        (PLAIN, [U1, U1 + b"\0", U1, bytes(8)]),
        (PLAIN, [U1, U1, U1, bytes(16)]),
        (PLAIN[:2], [U1, U1, U1]),
        ([*PLAIN, PLAIN[2]], [U1, U1, U1, bytes(8), bytes(8)]),
        (PLAIN[1:], [U1, bytes(8)]),
        ([*PLAIN[:2], ColumnSpec("scores", Dtype.OPAQUE, 0)], [U1, U1, U1, b"\x91\x01"]),
        ([ColumnSpec("tokens", Dtype.OPAQUE, 0), *PLAIN[2:]], [b"\x91\x01", bytes(8)]),
        ([ColumnSpec("tokens", Dtype.F32, 1), *PLAIN[1:]], [U1, U1, U1, bytes(8)]),
        ([*PLAIN, ColumnSpec("mine", Dtype.BOOL, 0)], [U1, U1, U1, bytes(8), b"\x02"]),
        ([*PLAIN, ColumnSpec("mine", Dtype.I8, 0, "mine")], [U1, U1, U1, bytes(8), b"\x02"]),
        ([*PLAIN, ColumnSpec("mine", Dtype.I8, 2, "tokens")], [U1, U1, U1, bytes(8), b"\x02"]),
        ([*PLAIN, ColumnSpec("images", Dtype.OPAQUE, 0)], [U1, U1, U1, bytes(8), b"\xc1"]),
        ([*PLAIN, ColumnSpec("images", Dtype.OPAQUE, 0)], [U1, U1, U1, bytes(8), b""]),
        ([*PLAIN, ColumnSpec("images", Dtype.OPAQUE, 0)], [U1, U1, U1, bytes(8), b"\x91" * 5000]),
        ([*PLAIN, ColumnSpec("images", Dtype.OPAQUE, 0)], [U1, U1, U1, bytes(8), b"\xdd\xff\xff\xff\xff"]),
    ],
)
def test_columns_that_contradict_are_malformed(specs: list[ColumnSpec], blocks: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        decode_group(*crafted(specs, blocks))


def peak_growth(action: Callable[[], object]) -> int:
    """Run an action and return by how many bytes the peak of this process grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    action()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.parametrize("filler", [b"\x90", b"\x80", b"\x91\x90", b"\xc0"])
def test_a_bomb_of_small_values_is_refused_before_it_is_decoded(filler: bytes) -> None:
    """8 MB of empty lists would become 600 MB of them."""
    count = (8 << 20) // len(filler)
    bomb = b"\xdd" + struct.pack(">I", count) + filler * count
    specs = [*PLAIN, ColumnSpec("images", Dtype.OPAQUE, 0)]
    group = crafted(specs, [U1, U1, U1, bytes(8), bomb])

    def attack() -> None:
        with pytest.raises(LimitExceededError):
            decode_group(*group)

    assert peak_growth(attack) < 64 << 20


def test_a_bomb_in_many_columns_counts_as_one() -> None:
    names = sorted(OPAQUE_COLUMNS)
    count = VALUES_LIMIT // len(names)
    bomb = b"\xdd" + struct.pack(">I", count) + b"\x90" * count
    specs = [*PLAIN, *(ColumnSpec(name, Dtype.OPAQUE, 0) for name in names)]
    with pytest.raises(LimitExceededError):
        decode_group(*crafted(specs, [U1, U1, U1, bytes(8), *([bomb] * len(names))]))


def envelope_of(*headers: GroupHeader, version: int = PROTOCOL_VERSION, producer: str = "p") -> Envelope:
    return Envelope(version, producer, 1, "r", "e", Split.TRAIN, headers)


@given(st.lists(groups(), min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_envelopes_come_back(made: list[Group]) -> None:
    envelope = envelope_of(*(sent(group)[0] for group in made))
    nbytes = sum(header.nbytes for header in envelope.groups)
    frames = sum(header.frames for header in envelope.groups)
    assert codec.decode_envelope(codec.encode_envelope(envelope), frames, nbytes) == envelope


def test_an_envelope_is_held_against_what_follows_it() -> None:
    header = sent(Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0]))[0]
    data = codec.encode_envelope(envelope_of(header))
    most = FRAMES_LIMIT - 1
    for frames, nbytes in ((0, header.nbytes), (2, header.nbytes), (1, header.nbytes - 1), (1, 0), (most, 0)):
        with pytest.raises(MalformedError):
            codec.decode_envelope(data, frames, nbytes)
    with pytest.raises(LimitExceededError):
        codec.decode_envelope(data, FRAMES_LIMIT, header.nbytes)
    with pytest.raises(VersionMismatchError):
        codec.decode_envelope(
            codec.encode_envelope(envelope_of(header, version=PROTOCOL_VERSION - 1)), 1, header.nbytes
        )
    with pytest.raises(LimitExceededError):
        codec.decode_envelope(data.ljust(ENVELOPE_LIMIT_BYTES + 1, b"\0"), 1, header.nbytes)
    with pytest.raises(LimitExceededError):
        codec.encode_envelope(envelope_of(*[header] * 64))


def test_an_envelope_may_be_just_as_large_as_its_limit() -> None:
    header = sent(Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0]))[0]
    name = "p" * 1000
    name += "p" * (ENVELOPE_LIMIT_BYTES - len(codec.encode_envelope(envelope_of(header, producer=name))))
    assert len(codec.encode_envelope(envelope_of(header, producer=name))) == ENVELOPE_LIMIT_BYTES
    with pytest.raises(LimitExceededError):
        codec.encode_envelope(envelope_of(header, producer=name + "p"))


DECODERS = [
    codec.decode_request,
    codec.decode_reply,
    codec.decode_event,
    codec.decode_ack,
    codec.decode_drain,
    codec.decode_table,
    codec.decode_header,
    codec.decode_value,
    lambda data: codec.decode_envelope(data, 1, 1),
]
ODDITIES = [
    b"", b"\xc1", b"\x90", b"\x80", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xd7\xff" + b"\xff" * 8, b"\xa2\xff\xfe",
    b"\x81\x80\x01", b"\x81\xa4kind\xa3ack", b"\x81\xa4kind\x90",
    b"\x97\x01\xa1p\x01\xa1r\xa1e\x00\xdd\x7f\xff\xff\xff",
]  # fmt: skip


@pytest.mark.parametrize("decode", DECODERS)
def test_oddities_are_values_or_wire_errors_and_cost_nothing(decode: Callable[[bytes], object]) -> None:
    def attack() -> None:
        for data in ODDITIES:
            try:
                decode(data)
            except WireError:
                continue

    assert peak_growth(attack) < 32 << 20


PIECES = st.sampled_from(
    [*ODDITIES[:4], b"\x81", b"\x92", b"\xa4kind", b"\xa4pull", b"\xcf" + b"\xff" * 8, b"\xc0"]
)


@given(st.lists(PIECES | st.binary(max_size=12), max_size=8).map(b"".join), st.sampled_from(DECODERS))
@settings(max_examples=300, deadline=None)
def test_noise_is_a_value_or_a_wire_error(data: bytes, decode: Callable[[bytes], object]) -> None:
    try:
        decode(data)
    except WireError:
        return


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_envelope_is_a_value_or_a_wire_error(data: st.DataObject) -> None:
    header = sent(Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0], task="t"))[0]
    good = codec.encode_envelope(envelope_of(header))
    body = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    try:
        envelope = codec.decode_envelope(
            bytes(body[:cut]) if data.draw(st.booleans()) else body, 1, header.nbytes
        )
    except WireError:
        return
    assert envelope.groups[0].nbytes == header.nbytes


def test_messages_above_their_limit_are_not_decoded() -> None:
    with pytest.raises(LimitExceededError):
        codec.decode_ack(bytes(ENVELOPE_LIMIT_BYTES + 1))
    with pytest.raises(LimitExceededError):
        codec.decode_request(bytes(codec.MESSAGE_LIMIT_BYTES + 1))


def test_the_largest_table_fits_its_limit() -> None:
    columns = tuple(ColumnSpec(f"a{index:02}".ljust(48, "x"), Dtype.I8, 2, "y" * 48) for index in range(64))
    table = ColumnTable(columns)
    assert codec.decode_table(codec.encode(table)) == table


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_the_checksum_is_that_of_all_frames_in_order(frames: list[bytes]) -> None:
    whole = codec.checksum([b"".join(frames)])
    assert codec.checksum(frames) == whole
    assert codec.checksum([memoryview(bytearray(frame)) for frame in frames]) == whole


def test_the_checksum_is_crc32c() -> None:
    assert codec.checksum([b"123456789"]) == 0xE3069283


@pytest.mark.parametrize("asked", [RegisterProducer(producer="p", env="e"), RegisterConsumer(consumer="t")])
def test_a_registration_of_another_version_names_both(asked: RegisterProducer | RegisterConsumer) -> None:
    fields = msgspec.msgpack.decode(codec.encode(asked))
    assert codec.decode_request(codec.encode(asked)) == asked
    version_1 = {name: value for name, value in fields.items() if name != "protocol"}
    version_3 = fields | {"protocol": PROTOCOL_VERSION + 1, "renamed": 1}  # does not decode as one of ours
    for other, version in ((version_1, 1), (version_3, PROTOCOL_VERSION + 1)):
        with pytest.raises(VersionMismatchError) as caught:
            codec.decode_request(msgspec.msgpack.encode(other))
        assert (caught.value.theirs, caught.value.ours) == (version, PROTOCOL_VERSION)
        assert f"got {version}, this side speaks {PROTOCOL_VERSION}" in str(caught.value)
    with pytest.raises(MalformedError, match="renamed"):
        codec.decode_request(msgspec.msgpack.encode(fields | {"renamed": 1}))
