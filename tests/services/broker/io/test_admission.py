"""Admission: messages wait for room in the journal, group by group, in their order."""

from collections.abc import Iterable
from typing import Any, cast

import pytest
from tests.services.broker.journal.journals import group

from rolloutmq.schemas.wire.envelope import PROTOCOL_VERSION, Envelope, GroupHeader, Split
from rolloutmq.services.broker.io.admission import Admission
from rolloutmq.services.broker.journal.journal import Journal

LIMIT = 1000


class Room:
    """A journal with room for so many more groups."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.wanted: list[int] = []

    def admits(self, groups: Iterable[GroupHeader]) -> bool:
        return len(list(groups)) <= self.groups

    def want(self, groups: Iterable[GroupHeader]) -> None:
        self.wanted = [header.seq for header in groups]


def message(*numbers: int, arena: bool = False, nbytes: int = 100) -> tuple[Envelope, list[Any]]:
    groups = [group(number, nbytes) for number in numbers]
    envelope = Envelope(
        version=PROTOCOL_VERSION,
        producer="p",
        session=1,
        run="r",
        env="e",
        split=Split.TRAIN,
        groups=tuple(one.header for one in groups),
        offsets=tuple(number * 4096 for number in numbers) if arena else (),
        arena=7 if arena else 0,
    )
    return envelope, [] if arena else [frame for one in groups for frame in one.body.frames]


def taken(admission: Admission, room: Room) -> list[tuple[list[int], tuple[int, ...], int]]:
    """Take what has room; each group takes some. Return numbers, offsets, and the count of frames."""
    found = []
    for envelope, frames in admission.take():
        room.groups -= len(envelope.groups)
        found.append(([header.seq for header in envelope.groups], envelope.offsets, len(frames)))
    return found


def admission(room: Room) -> Admission:
    return Admission(cast(Journal, room), LIMIT)


def test_a_message_with_room_passes_whole() -> None:
    room = Room(5)
    door = admission(room)
    door.put(*message(1, 2))
    assert taken(door, room) == [([1, 2], (), 4)]
    assert not door


def test_without_a_journal_everything_passes() -> None:
    door = Admission(None, LIMIT)
    door.put(*message(1, 2))
    assert [len(envelope.groups) for envelope, _ in door.take()] == [2]


@pytest.mark.parametrize("arena", [False, True])
def test_what_has_no_room_waits_group_by_group_in_order(arena: bool) -> None:
    room = Room(2)
    door = admission(room)
    door.put(*message(1, 2, 3, arena=arena))
    offsets = [(4096,), (8192,), (12288,)] if arena else [(), (), ()]
    frames = 0 if arena else 2
    assert taken(door, room) == [([1], offsets[0], frames), ([2], offsets[1], frames)]
    assert (bool(door), door.blocked) == (True, True)
    assert room.wanted == [3]
    room.groups = 1
    assert (bool(door), door.blocked) == (True, False)
    assert taken(door, room) == [([3], offsets[2], frames)]
    assert room.wanted == []
    assert not door


def test_a_group_that_the_core_will_refuse_needs_no_room() -> None:
    room = Room(0)
    door = admission(room)
    door.put(*message(1, nbytes=LIMIT + 1))
    assert len(taken(door, room)) == 1
