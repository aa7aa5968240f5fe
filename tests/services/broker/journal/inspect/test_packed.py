"""Events in memory as their bytes: the same events, and a fraction of the memory."""

import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from tests.services.broker.journal.handmade import Handmade

from rolloutmq.services.broker.journal.format.events import Accepted, Began, Numbers
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent, decode_events, encode
from rolloutmq.services.broker.journal.inspect import packed as module
from rolloutmq.services.broker.journal.inspect.packed import PackedEvents, PackedGroups

BEGAN = Began(epoch=1, pid=1, durability="disk")


@pytest.fixture
def accepted(made: Handmade) -> Accepted:
    return made.accept(1)


@pytest.fixture
def made(tmp_path: Path) -> Handmade:
    return Handmade(tmp_path)


def test_events_come_as_often_as_they_are_asked_for(accepted: Accepted) -> None:
    first: tuple[AnyEvent, ...] = (BEGAN, accepted)
    second: tuple[AnyEvent, ...] = (replace(accepted, order=2),)
    packed = PackedEvents()
    for events in (first, second):
        packed.add(encode(events), events)
    assert [*packed] == [*packed] == [*first, *second]
    assert [*packed.of(Accepted)] == [accepted, *second]
    assert [*packed.of(Numbers)] == []


def test_records_without_a_kind_are_not_decoded(accepted: Accepted, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedEvents()
    for event in (accepted, BEGAN, accepted):
        packed.add(encode([event]), [event])
    monkeypatch.setattr(module, "decode_events", Mock(side_effect=decode_events))
    assert [*packed.of(Began)] == [BEGAN]
    assert module.decode_events.call_count == 1  # type: ignore[attr-defined]


def test_groups_are_those_that_were_put(accepted: Accepted) -> None:
    groups, later = PackedGroups(), PackedGroups()
    for order in (3, 1, 2):
        groups[order] = replace(accepted, order=order)
    moved = replace(accepted, order=2, at=accepted.at + 1.0)
    later[2], later[9] = moved, accepted
    groups.renew(later)
    groups.forget(3)
    groups.forget(3)
    assert list(groups) == [1, 2]
    assert (groups[2], groups.get(3), 3 in groups, len(groups)) == (moved, None, False, 2)
    del groups[1]
    assert dict(groups) == {2: moved}


def test_a_group_takes_a_third_of_its_decoded_size(accepted: Accepted) -> None:
    data, groups = encode(accepted), PackedGroups()
    tracemalloc.start()
    try:
        decoded = [module._ACCEPTED.decode(data) for _ in range(1000)]
        plain = tracemalloc.get_traced_memory()[0]
        for order in range(1000):
            groups[order] = accepted
        packed = tracemalloc.get_traced_memory()[0] - plain
    finally:
        tracemalloc.stop()
    assert len(decoded) == len(groups)
    assert packed < plain / 3, (packed, plain)
