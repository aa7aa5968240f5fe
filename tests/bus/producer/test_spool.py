"""The spool: numbers, positions, acks, sends and resends."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.bus.encoding.codec import EncodedGroup, encode_group
from rolloutmq.bus.producer.spool import RESEND_MAX_S, RESEND_S, Spool, SpoolEntry
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.replies import GAP_WINDOW, Ack

FAR = 1 << 60


def encoded(name: str, length: int = 3) -> tuple[Group, EncodedGroup]:
    row = [list(range(length))]
    group = Group.build(name, tokens=row, mask=row, scores=[1.0], task="t")
    return group, encode_group(group, 1 << 20)


def filled(count: int) -> Spool:
    spool = Spool(1 << 20)
    for index in range(count):
        spool.add(*encoded(f"g-{index}", length=index % 5))
    return spool


def ack(cumulative: int, above: Iterable[int] = ()) -> Ack:
    bits = sum(1 << (seq - cumulative - 2) for seq in above)
    gaps = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    return Ack(epoch=1, session=1, cumulative=cumulative, gaps=gaps, byte_limit=0, start_limit=0)


def send_all(spool: Spool, now: float = 0.0, byte_limit: int = FAR) -> list[int]:
    sent = []
    while (entry := next(spool.unsent(byte_limit), None)) is not None:
        spool.sent([entry], now)
        sent.append(entry.header.seq)
    return sent


def numbers(entries: Iterable[SpoolEntry]) -> list[int]:
    return [entry.header.seq for entry in entries]


def test_groups_are_numbered_and_positions_add_up() -> None:
    spool = filled(3)
    headers = [entry.header for entry in spool]
    assert [h.seq for h in headers] == [1, 2, 3]
    ends = [sum(h.nbytes for h in headers[: i + 1]) for i in range(3)]
    assert [h.position for h in headers] == ends
    assert spool.nbytes == spool.position == ends[-1]
    assert headers[1].task == "t"
    assert headers[1].rewards.mean == 1.0


def test_room_is_bounded_in_bytes() -> None:
    group, body = encoded("g")
    spool = Spool(2 * body.nbytes)
    assert spool.fits(2 * body.nbytes)
    spool.add(group, body)
    assert spool.fits(body.nbytes)
    assert not spool.fits(body.nbytes + 1)
    spool.accepted(ack(1))
    assert spool.fits(2 * body.nbytes)


def test_an_ack_removes_what_it_names_and_nothing_else() -> None:
    spool = filled(8)
    assert numbers(spool.accepted(ack(2, [4, 7]))) == [1, 2, 4, 7]
    assert numbers(spool) == [3, 5, 6, 8]
    assert numbers(spool.accepted(ack(2, [4, 7]))) == []
    assert numbers(spool.accepted(ack(1))) == []
    assert spool.cumulative == 2
    assert spool.nbytes == sum(entry.header.nbytes for entry in spool)
    assert numbers(spool.accepted(ack(8))) == [3, 5, 6, 8]
    assert spool.nbytes == 0


def test_an_ack_beyond_what_was_sent_is_harmless() -> None:
    spool = filled(2)
    assert numbers(spool.accepted(ack(9, [11, 12]))) == [1, 2]
    assert len(spool) == 0


def test_sending_stops_at_the_credit() -> None:
    spool = filled(4)
    limit = [entry.header.position for entry in spool][1]
    assert send_all(spool, byte_limit=limit) == [1, 2]
    assert not list(spool.unsent(limit))
    assert send_all(spool) == [3, 4]


def test_sending_stops_at_the_window_that_the_broker_remembers() -> None:
    spool = filled(GAP_WINDOW + 3)
    assert send_all(spool)[-1] == GAP_WINDOW
    spool.accepted(ack(1))
    assert send_all(spool) == [GAP_WINDOW + 1]


def test_only_what_is_overdue_is_sent_again_with_growing_pauses() -> None:
    spool = filled(3)
    send_all(spool, now=10.0)
    spool.accepted(ack(1, [3]))
    assert not spool.overdue(10.0 + RESEND_S / 2)
    assert spool.overdue(10.0 + RESEND_S)
    now, pauses = 10.0, []
    for _ in range(7):
        later = next(now + t / 4 for t in range(100) if spool.overdue(now + t / 4))
        pauses.append(later - now)
        assert numbers(spool.send_overdue_again(later)) == [2]
        assert numbers(spool.send_overdue_again(later)) == []
        assert send_all(spool, later) == [2]
        now = later
    assert pauses == sorted(pauses)
    assert pauses[:3] == [RESEND_S, 2 * RESEND_S, 4 * RESEND_S]
    assert pauses[-1] == RESEND_MAX_S


def test_what_was_never_sent_is_not_overdue() -> None:
    spool = filled(2)
    assert not spool.overdue(1e9)
    assert spool.send_overdue_again(1e9) == []


def test_an_acked_group_is_not_sent_again() -> None:
    spool = filled(3)
    spool.send_all_again()
    spool.accepted(ack(0, [2]))
    assert send_all(spool) == [1, 3]


def test_renumbering_makes_the_unacked_the_first_of_a_new_session() -> None:
    spool = filled(5)
    send_all(spool)
    spool.accepted(ack(2, [4]))
    bodies = [entry.frames for entry in spool]
    spool.renumber()
    assert numbers(spool) == [1, 2]
    assert [entry.header.group_id for entry in spool] == ["g-2", "g-4"]
    assert [entry.frames for entry in spool] == bodies
    assert spool.last == 2
    assert spool.position == spool.nbytes
    assert send_all(spool) == [1, 2]
    assert spool.add(*encoded("g-5")).header.seq == 3


def test_a_restored_spool_goes_on_where_it_was() -> None:
    old = filled(4)
    old.accepted(ack(1, [3]))
    new = Spool(1 << 20)
    new.restore(list(old), old.last, old.position)
    assert numbers(new) == [2, 4]
    assert new.nbytes == old.nbytes
    assert send_all(new) == [2, 4]
    added = new.add(*encoded("g-4")).header
    assert (added.seq, added.position) == (5, old.position + added.nbytes)


@given(st.lists(st.sampled_from(["add", "lose", "arrive", "ack", "late"]), max_size=120), st.randoms())
def test_every_group_arrives_whatever_is_lost(steps: list[str], random: Random) -> None:
    """A broker that drops at will, acks late or not at all: in the end it has each group exactly under one number."""
    spool, now, added = Spool(1 << 20), 0.0, 0
    has: dict[int, str] = {}

    def arrives(entry: SpoolEntry) -> None:
        assert has.setdefault(entry.header.seq, entry.header.group_id) == entry.header.group_id

    def truth() -> Ack:
        cumulative = next(n for n in range(added + 1) if n + 1 not in has)
        return ack(cumulative, [seq for seq in has if seq > cumulative])

    late = truth()
    for step in steps:
        now += random.random()
        if step == "add":
            added += 1
            spool.add(*encoded(f"g-{added}"))
        elif step in {"lose", "arrive"} and (entry := next(spool.unsent(FAR), None)):
            spool.sent([entry], now)
            if step == "arrive":
                arrives(entry)
        elif step == "ack":
            late = truth()
            spool.accepted(late)
            spool.send_overdue_again(now)
        elif step == "late":
            spool.accepted(late)
        assert spool.nbytes == sum(entry.header.nbytes for entry in spool)
        assert set(range(1, added + 1)) - has.keys() <= set(numbers(spool))
    while len(spool):
        now += RESEND_MAX_S
        spool.send_overdue_again(now)
        while (entry := next(spool.unsent(FAR), None)) is not None:
            spool.sent([entry], now)
            arrives(entry)
        spool.accepted(truth())
    assert has == {seq: f"g-{seq}" for seq in range(1, added + 1)}


@pytest.mark.parametrize("gaps", [b"\x00", b"\xff" * 4096])
def test_a_bitmap_of_any_form_is_harmless(gaps: bytes) -> None:
    spool = filled(4)
    ack = Ack(epoch=1, session=1, cumulative=0, gaps=gaps, byte_limit=0, start_limit=0)
    assert numbers(spool.accepted(ack)) == ([] if gaps == b"\x00" else [2, 3, 4])
