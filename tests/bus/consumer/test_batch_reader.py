"""The reader of batches: groups in arenas, copied or not, and groups that follow as frames."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rolloutmq.bus.consumer.batch import RUN_BYTES, DecodedBatch, decode_groups
from rolloutmq.bus.consumer.batch_reader import BatchReader
from rolloutmq.bus.encoding.codec import encode_group, encode_tables, header_of
from rolloutmq.bus.shm.arena import Arena
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import ArenaRef, ColumnTable
from rolloutmq.schemas.wire.replies import Batch, Delivery

GONE = ArenaRef(1, 1 << 20, 1, 1 << 20)


def group_of(number: int, length: int = 5) -> Group:
    tokens = np.full((2, length), number, np.int32)
    return Group.build(f"g-{number}", tokens=tokens, mask=np.ones((2, length), bool), scores=[0.0, 1.0])


class Shared:
    """Groups of one table in an arena, as the broker names them."""

    def __init__(self) -> None:
        self.arena = Arena(8 << 20)
        self.frames: list[memoryview] = []
        self.tables: set[ColumnTable] = set()

    def put(self, group: Group, *, at: int | None = None, apart: bool = False) -> Delivery:
        """Lay a group into the arena, at a given place or the next one, or into frames."""
        offset = None

        def room(nbytes: int) -> tuple[object, int]:
            nonlocal offset
            if at is not None:
                offset = at
            else:
                block = self.arena.slots.allocate(nbytes)
                assert block is not None
                offset = block.offset
            return self.arena.memory, offset

        body = encode_group(group, 1 << 26, None if apart else room)  # type: ignore[arg-type]
        self.tables.add(body.table)
        if apart:
            self.frames += [memoryview(bytes(frame)) for frame in body.frames]
        return Delivery(
            header=header_of(group, body, seq=1, position=1),
            env="e",
            producer="p",
            session=1,
            place=None if offset is None else (0, offset),
        )

    def batch(self, deliveries: Sequence[Delivery]) -> Batch:
        return Batch(
            lease=1,
            generation=1,
            step=1,
            groups=tuple(deliveries),
            tables=encode_tables(tuple(self.tables)),
            arenas=(self.arena.ref,),
        )

    def read(self, reader: BatchReader, *deliveries: Delivery) -> DecodedBatch | None:
        return reader.read(self.batch(deliveries), self.frames)


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    made.arena.close()


@pytest.fixture(params=[False, True], ids=["copies", "views"])
def reader(request: pytest.FixtureRequest) -> Iterator[BatchReader]:
    made = BatchReader(views=request.param)
    yield made
    made.close()


def numbers(found: DecodedBatch | None) -> list[int]:
    assert found is not None
    for group, delivery in zip(found.groups, found.deliveries, strict=True):
        assert group.group_id == delivery.header.group_id
        assert len({int(value) for row in group["tokens"] for value in row}) == 1
    return [int(group["tokens"][0][0]) for group in found.groups]


@pytest.mark.parametrize("length", [5, 2_000, RUN_BYTES // 8])
def test_groups_behind_each_other_and_apart_come_in_order(
    shared: Shared, reader: BatchReader, length: int
) -> None:
    sizes = [length, 5, length, length, 7, length]
    placed = [shared.put(group_of(number, size)) for number, size in enumerate(sizes)]
    placed.insert(3, shared.put(group_of(9), apart=True))
    placed.insert(5, shared.put(group_of(8), at=7 << 20))
    assert numbers(shared.read(reader, *placed)) == [0, 1, 2, 9, 3, 8, 4, 5]


def test_backward_overlapping_and_repeated_places_are_read_as_named(
    shared: Shared, reader: BatchReader
) -> None:
    first, second = shared.put(group_of(1)), shared.put(group_of(2))
    assert numbers(shared.read(reader, second, first, first, second)) == [2, 1, 1, 2]


def test_a_group_outside_its_arena_is_rejected_alone(shared: Shared, reader: BatchReader) -> None:
    good, other = shared.put(group_of(1)), shared.put(group_of(2))
    bad = [
        Delivery(header=good.header, env="e", producer="p", session=1, place=place)
        for place in ((1, 0), (0, (8 << 20) - 1), (0, 1 << 62))
    ]
    found = shared.read(reader, good, *bad, other)
    assert numbers(found) == [1, 2]
    assert found is not None
    assert ["ends outside its arena" in each.reason for each in found.rejected] == [True] * 3


def test_a_reused_slot_is_asked_for_again_as_frames(shared: Shared, reader: BatchReader) -> None:
    placed = [shared.put(group_of(number)) for number in range(3)]
    assert placed[1].place is not None
    shared.put(group_of(7), at=placed[1].place[1])
    assert (reader.in_place, shared.read(reader, *placed), reader.in_place) == (True, None, False)
    shared.put(group_of(1), at=placed[1].place[1])
    assert numbers(shared.read(reader, *placed)) == [0, 1, 2]
    assert reader.in_place


def test_an_arena_that_is_gone_is_asked_for_again_as_frames(shared: Shared, reader: BatchReader) -> None:
    batch = shared.batch([shared.put(group_of(1))])
    gone = Batch(lease=1, generation=1, step=1, groups=batch.groups, tables=batch.tables, arenas=(GONE,))
    assert reader.read(gone, []) is None
    assert not reader.in_place


def test_copies_outlive_the_slot_and_views_show_what_is_there(shared: Shared) -> None:
    copies, views = BatchReader(), BatchReader(views=True)
    placed = shared.put(group_of(1))
    assert placed.place is not None
    copied, seen = shared.read(copies, placed), shared.read(views, placed)
    shared.put(group_of(2), at=placed.place[1])
    assert (numbers(copied), numbers(seen)) == ([1], [2])
    for found in (copied, seen):
        assert found is not None
        assert not found.groups[0].columns["tokens"].values.flags.writeable
    copies.close()
    views.close()
    shared.arena.close()
    assert (numbers(copied), numbers(seen)) == ([1], [2])


def test_small_groups_are_copied_together_but_not_too_many(shared: Shared) -> None:
    placed = [shared.put(group_of(number, 500)) for number in range(200)]
    copied: list[int] = []

    def copy(source: memoryview) -> NDArray[np.uint8]:
        copied.append(source.nbytes)
        return np.frombuffer(source, np.uint8).copy()

    arena = memoryview(shared.arena.memory)
    groups, _, _ = decode_groups(shared.batch(placed), [], [arena], copy)
    assert [int(group["tokens"][0][0]) for group in groups] == list(range(200))
    assert RUN_BYTES // 2 < max(copied) <= RUN_BYTES
    assert len(copied) == -(-sum(copied) // RUN_BYTES)
