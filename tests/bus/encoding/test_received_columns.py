"""A received group is judged as the reading of every column judges it, and makes its columns when they are used."""

import copy
import math
import pickle
import struct
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bus.encoding.test_codec import LIMIT, PLAIN, U1, assert_equal, crafted, groups, recounted, sent

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.encoding.codec import decode_group, encode_group
from rolloutmq.bus.encoding.received_columns import ReceivedColumns
from rolloutmq.schemas.errors import MalformedError, WireError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import ColumnSpec, ColumnTable, Dtype, GroupHeader

Sent = tuple[GroupHeader, ColumnTable, list[bytes]]
U2 = struct.pack("<I", 2)


def outcome(group: Sent) -> Group | tuple[type[WireError], str]:
    try:
        return decode_group(*group)
    except WireError as error:
        return type(error), str(error)


def by_columns(group: Sent) -> Group | tuple[type[WireError], str]:
    """Decode as if no group were plainly sound: each column is read and checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "received_columns", lambda *_: None)
        return outcome(group)


def assert_judged_alike(group: Sent) -> None:
    expected = by_columns(group)
    for found in (outcome(group), outcome(group)):  # the second time with the directory known
        if isinstance(found, Group):
            assert isinstance(expected, Group)
            assert_equal(expected, found)
            found.check()
        else:
            assert found == expected


@given(groups())
@settings(max_examples=200, deadline=None)
def test_sound_groups_are_equal(group: Group) -> None:
    assert_judged_alike(sent(group))


@given(groups(), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bodies_have_the_same_outcome(group: Group, data: st.DataObject) -> None:
    header, table, frames = sent(group)
    body = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([table.blocks * 24, len(body)]))
        body[data.draw(st.integers(0, end - 1))] = data.draw(st.sampled_from([0, 1, 2, 4, 8, 0x7F, 0xFF]))
    frames[0] = (
        bytes(body[: data.draw(st.integers(1, len(body)))]) if data.draw(st.booleans()) else bytes(body)
    )
    header = msgspec.structs.replace(
        recounted(header, frames),
        sequences=header.sequences + data.draw(st.sampled_from([0, 0, 0, 1])),
        tokens=header.tokens + data.draw(st.sampled_from([0, 0, 0, 1])),
    )
    assert_judged_alike((header, table, frames))


MINE = ColumnSpec("mine", Dtype.I8, 0)
FLAGS = ColumnSpec("mine", Dtype.BOOL, 0)
NESTED = ColumnSpec("mine", Dtype.I8, 2)
IMAGES = ColumnSpec("images", Dtype.OPAQUE, 0)
OWN_MASK = [PLAIN[0], ColumnSpec("mask", Dtype.I32, 1), PLAIN[2]]


@pytest.mark.parametrize(
    ("specs", "blocks", "more"),
    [
        (PLAIN, [U1, U1, U1, bytes(8)], {}),
        (PLAIN, [U1, U1, U1, struct.pack("<d", math.inf)], {}),
        (PLAIN, [U1, U1, U1, bytes(7)], {}),
        (PLAIN, [U2, U1, U1, bytes(8)], {}),
        (PLAIN, [U1, U1, U1 + U1, bytes(8)], {}),
        (PLAIN, [U1 + b"\0", U1, U1, bytes(8)], {}),
        (PLAIN, [U1 + U1, U1 + U1, U1 + U1, bytes(16)], {"sequences": 2, "tokens": 2}),
        (PLAIN, [U1 + U1, U1 + U1, U1 + U1, bytes(8)], {"sequences": 2, "tokens": 2}),
        (PLAIN, [b"", b"", b"", b""], {"sequences": 0, "tokens": 0}),
        (PLAIN, [U1, U1, U1, bytes(8)], {"sequences": 2}),
        (PLAIN, [U1, U1, U1, bytes(8)], {"tokens": 2}),
        (OWN_MASK, [U1, U1, U1, U1, bytes(8)], {}),
        (OWN_MASK, [U1, U1, U2, U2 + U1, bytes(8)], {}),
        ([*PLAIN[:2], ColumnSpec("scores", Dtype.BF16, 0)], [U1, U1, U1, b"\x80\x7f"], {}),
        ([*PLAIN[:2], ColumnSpec("scores", Dtype.I64, 0)], [U1, U1, U1, b"\xff" * 8], {}),
        ([*PLAIN, MINE], [U1, U1, U1, bytes(8), b"\x02"], {}),
        ([*PLAIN, MINE], [U1, U1, U1, bytes(8), b"\x02\x03"], {}),
        ([*PLAIN, FLAGS], [U1, U1, U1, bytes(8), b"\x02"], {}),
        ([*PLAIN, FLAGS], [U1, U1, U1, bytes(8), b"\x01"], {}),
        ([*PLAIN, NESTED], [U1, U1, U1, bytes(8), U1, U2, b"\x02\x03"], {}),
        ([*PLAIN, NESTED], [U1, U1, U1, bytes(8), U1, U2, b"\x02"], {}),
        ([*PLAIN, NESTED], [U1, U1, U1, bytes(8), U2, U2, b"\x02\x03"], {}),
        ([*PLAIN, IMAGES], [U1, U1, U1, bytes(8), b"\x91\x01"], {}),
        ([*PLAIN, IMAGES], [U1, U1, U1, bytes(8), b"\xc1"], {}),
        ([*PLAIN, IMAGES], [U1, U1, U1, bytes(8), b"\xa1\xff"], {}),
        ([*PLAIN, IMAGES], [U1, U1, U1, bytes(8), b"\x91" * 5000], {}),
    ],
)
def test_each_exception_has_the_same_outcome(
    specs: list[ColumnSpec], blocks: list[bytes], more: dict[str, int]
) -> None:
    assert_judged_alike(crafted(specs, blocks, **more))


def plain(sequences: int = 3, length: int = 5, **more: Any) -> Group:
    return Group.build(
        "g",
        tokens=np.full((sequences, length), 7, np.int32),
        mask=np.ones((sequences, length), bool),
        scores=np.arange(float(sequences)),
        **more,
    )


def received(group: Group) -> Group:
    back = decode_group(*sent(group))
    assert isinstance(back.columns, ReceivedColumns)
    return back


@pytest.mark.parametrize("sequences", [1, 64, 65, 300])
@pytest.mark.parametrize("length", [0, 5, 400])
def test_groups_of_any_size_are_received_without_making_their_columns(sequences: int, length: int) -> None:
    group = plain(
        sequences, length, messages=[{"role": "user"}], distill_token_ids=[[[1, 2]] * length] * sequences
    )
    assert_equal(group, received(group))


def test_a_known_directory_vouches_for_no_contents() -> None:
    header, table, frames = sent(plain())
    decode_group(header, table, frames)
    rows = struct.unpack_from(f"<{3 * table.blocks}Q", frames[0])
    lengths, _, mask, scores = rows[1::3]
    for at, data in ((lengths, U2), (mask, b"\2"), (scores, struct.pack("<d", math.nan))):
        body = bytearray(frames[0])
        body[at : at + len(data)] = data
        with pytest.raises(MalformedError):
            decode_group(recounted(header, [bytes(body)]), table, [bytes(body)])
    assert_equal(plain(), decode_group(header, table, frames))


def test_a_column_is_made_once_and_shares_the_lengths_of_its_owner() -> None:
    columns = received(plain()).columns
    assert columns["mask"] is columns["mask"]
    assert columns["mask"].lengths is columns["tokens"].lengths
    assert not columns["tokens"].values.flags.writeable


def test_they_are_a_mapping_like_any_other() -> None:
    group = received(plain(messages=["m"]))
    assert list(group.columns) == ["tokens", "mask", "scores", "messages"]
    assert len(group.columns) == 4
    assert "tokens" in group
    assert "other" not in group.columns
    assert group.columns.get("other") is None
    with pytest.raises(KeyError):
        group.columns["other"]
    assert "tokens" in repr(group.columns)
    assert_equal(group, replace(group, columns={**group.columns}))
    assert encode_group(group, LIMIT).crc == encode_group(plain(messages=["m"]), LIMIT).crc


def test_a_pickled_or_copied_group_owns_its_columns() -> None:
    group = received(plain(messages=["m"]))
    for made in (pickle.loads(pickle.dumps(group)), copy.deepcopy(group)):
        assert_equal(group, made)
        assert isinstance(made.columns, dict)
        assert not np.shares_memory(made.columns["tokens"].values, group.columns["tokens"].values)
