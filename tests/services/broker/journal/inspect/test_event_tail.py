"""The tail of event logs: each event once, however often it looks, and what it missed is told."""

from pathlib import Path

import pytest
from tests.services.broker.journal.handmade import Handmade, item

from rolloutmq.services.broker.journal.format.events import Accepted, Disconnected, GroupSnapshot
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES
from rolloutmq.services.broker.journal.inspect.event_tail import EventTail


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    return Handmade(run_dir)


def left(name: str) -> Disconnected:
    return Disconnected(name)


def new(tail: EventTail) -> list[str]:
    """Return what is new: names of environments that left, and of groups."""
    found = []
    for _, event in tail.new():
        match event:
            case Disconnected():
                found.append(event.env)
            case Accepted():
                found.append(event.header.group_id)
            case GroupSnapshot():
                found.append(f"state {event.accepted.header.group_id}")
    return found


def test_each_event_comes_once_while_the_log_grows(made: Handmade) -> None:
    tail = EventTail(made.journal)
    assert new(tail) == []
    snapshot = [item(made.accept(1))]
    made.log(snapshot, [left("a")], number=1)
    assert new(tail) == ["state g1", "a"]
    assert new(tail) == []
    made.log(snapshot, [left("a")], [left("b"), left("c")], number=1)
    assert new(tail) == ["b", "c"]


def test_a_record_under_way_comes_when_it_is_whole(made: Handmade) -> None:
    made.log([], [left("a")], [left("b")], number=1)
    whole = made.log_file(1).read_bytes()
    tail, found = EventTail(made.journal), []
    for end in range(FILE_HEADER_BYTES, len(whole), 7):
        made.log_file(1).write_bytes(
            whole[:end] + bytes(4096)
        )  # written ahead with zeros, as the broker does
        found += new(tail)
    made.log_file(1).write_bytes(whole)
    assert found + new(tail) == ["a", "b"]
    assert tail.gaps == 0


def test_a_new_log_goes_on_without_its_state(made: Handmade) -> None:
    tail = EventTail(made.journal)
    made.log([], [left("a")], number=1)
    assert new(tail) == ["a"]
    made.log([], [left("a")], [left("b")], number=1)
    made.log([item(made.accept(1))], [left("c")], number=2)
    assert new(tail) == ["b", "c"]
    made.log_file(1).unlink()
    made.log([item(made.accept(1))], [left("c")], [left("d")], number=2)
    assert new(tail) == ["d"]
    assert tail.gaps == 0


def test_a_removed_log_is_a_gap_and_the_state_comes_again(made: Handmade) -> None:
    tail = EventTail(made.journal)
    made.log([], [left("a")], number=1)
    assert new(tail) == ["a"]
    made.log_file(1).unlink()
    made.log([item(made.accept(1))], [left("c")], number=3)
    assert new(tail) == ["state g1", "c"]
    assert tail.gaps == 1


def test_damage_in_a_log_is_a_gap_once_the_next_log_is_there(made: Handmade) -> None:
    made.log([], [left("a")], [left("b")], [left("c")], number=1)
    data = bytearray(made.log_file(1).read_bytes())
    data[data.index(b"\xa1b")] ^= 0xFF  # in the record of b
    made.log_file(1).write_bytes(data)
    tail = EventTail(made.journal)
    assert new(tail) == ["a"]
    assert new(tail) == []
    made.log([item(made.accept(1))], [left("d")], number=2)
    assert new(tail) == ["state g1", "d"]
    assert tail.gaps == 1
