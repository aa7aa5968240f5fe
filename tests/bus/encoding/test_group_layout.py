"""The layout of a body: the same for equal sizes, in whatever way the blocks reach it."""

import mmap
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.encoding.codec import encode_group, prepare_group, table_of
from rolloutmq.bus.encoding.group_layout import ALIGNMENT_BYTES, LAYOUTS_KEPT, ROW, place
from rolloutmq.schemas.group import Column, Group

LIMIT = 1 << 26


@given(st.lists(st.integers(0, 200), min_size=1, max_size=12), st.integers(0, 200))
def test_blocks_are_aligned_and_apart_and_the_directory_names_them(
    sizes: list[int], alone_above: int
) -> None:
    layout = place(tuple(sizes), alone_above)
    blocks = [np.full(size, index + 1, np.uint8) for index, size in enumerate(sizes)]
    body = b"".join(layout.body(blocks))
    assert len(body) == layout.body_bytes
    assert layout.nbytes == len(body) + sum(sizes[index] for index in layout.big)
    frames = [body, *[blocks[index].tobytes() for index in layout.big]]
    used = np.zeros(len(body), bool)
    used[: len(sizes) * ROW] = True
    for block, (frame, offset, nbytes) in zip(
        blocks, struct.iter_unpack("<3Q", body[: len(sizes) * ROW]), strict=True
    ):
        assert frames[frame][offset : offset + nbytes] == block.tobytes()
        assert (frame > 0) == (block.nbytes > alone_above)
        assert offset % ALIGNMENT_BYTES == 0
        if frame == 0:
            assert not used[offset : offset + nbytes].any()
            used[offset : offset + nbytes] = True
    assert not np.frombuffer(body, np.uint8)[~used].any()


def test_few_layouts_are_kept_and_each_is_that_of_its_sizes() -> None:
    for size in range(2 * LAYOUTS_KEPT):
        place((size, 8), 1 << 20)
    assert place.cache_info().currsize == LAYOUTS_KEPT
    assert place((3, 8), 1 << 20) == place.__wrapped__((3, 8), 1 << 20)
    assert place((8, 3), 1 << 20) != place((3, 8), 1 << 20)
    assert place((3, 8), 4).big == (1,)


def ragged(lengths: list[int], **columns: Any) -> Group:
    rows = [list(range(length)) for length in lengths]
    return Group.build("g", tokens=rows, mask=rows, scores=[0.0] * len(rows), **columns)


@pytest.mark.parametrize("joined", [0, 1 << 20])
def test_a_body_is_the_same_in_one_copy_or_in_pieces(monkeypatch: pytest.MonkeyPatch, joined: int) -> None:
    group = ragged([3, 0, 5], mine=[[1.0], [], [2.0, 3.0]], messages=["m"])
    plain = encode_group(group, LIMIT)
    memory = mmap.mmap(-1, 4096)
    memory[:] = b"\xa5" * 4096
    monkeypatch.setattr(codec, "_JOINED_BYTES", joined)
    inside = encode_group(group, LIMIT, lambda _: (memory, 100))
    assert inside.crc == plain.crc == codec.checksum(inside.frames)
    assert bytes(inside.frames[0]) == bytes(plain.frames[0])
    assert set(memory[:100] + memory[100 + inside.nbytes :]) == {0xA5}


def test_equal_lengths_are_shared_whoever_made_them() -> None:
    group = ragged([3, 0, 5], mine=[[1], [], [2]], own=[[1], [], [2]])
    columns = {
        name: replace(column, lengths=tuple(level.copy() for level in column.lengths))
        for name, column in group.columns.items()
    }
    apart = replace(group, columns=columns)
    assert encode_group(apart, LIMIT) == encode_group(group, LIMIT)
    owners = {spec.name: spec.lengths_of for spec in table_of(apart).columns}
    assert owners == {"tokens": "", "mask": "tokens", "scores": "", "mine": "", "own": "mine"}


def test_lengths_that_alternate_have_the_first_owner() -> None:
    tokens, mine = ragged([3, 1]).columns["tokens"].lengths, ragged([1, 1]).columns["tokens"].lengths
    values = {4: np.arange(4, dtype=np.int32), 2: np.arange(2, dtype=np.int32)}
    group = ragged([3, 1])
    more = {
        "a": Column(group.columns["tokens"].dtype, values[2], mine),
        "b": Column(group.columns["tokens"].dtype, values[4], tokens),
        "c": Column(group.columns["tokens"].dtype, values[2], mine),
    }
    group = replace(group, columns={**group.columns, **more})
    owners = [spec.lengths_of for spec in table_of(group).columns]
    assert owners == ["", "tokens", "", "", "tokens", "a"]
    prepared = prepare_group(group)
    assert len(prepared.blocks) == len(prepared.sizes) == prepared.table.blocks
