"""The session of a producer: syncs, accepted acks, and sequence numbers after a restart."""

from typing import Any

import pytest
from msgspec.structs import replace

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.encoding.codec import encode_group
from rolloutmq.bus.producer.session import (
    ALIVE_S,
    PACK_BYTES,
    PACK_FRAMES_BYTES,
    PACK_GROUPS,
    PIPE_MAX_S,
    PIPE_S,
    REPORT_S,
    SILENCE_S,
    SLACK_MAX_S,
    SessionState,
)
from rolloutmq.bus.producer.spool import RESEND_MAX_S, RESEND_S, Spool, SpoolEntry
from rolloutmq.bus.shm.arena import Arena, MappedArena
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import FRAMES_LIMIT, Envelope, Split
from rolloutmq.schemas.wire.replies import Ack, Wait
from rolloutmq.schemas.wire.requests import RegisterProducer

LIMIT = 1 << 26
"""Most bytes of a message's frames at the broker."""


def ack(session: int = 5, epoch: int = 1, cumulative: int = 0, **more: int | bytes | Wait) -> Ack:
    values = {"byte_limit": 1 << 30, "start_limit": 4, **more}
    return Ack(epoch=epoch, session=session, cumulative=cumulative, **values)  # type: ignore[arg-type]


def opened(groups: int = 0, now: float = 0.0) -> SessionState:
    session = SessionState(RegisterProducer(producer="p", env="e", split=Split.EVAL), Spool(1 << 20))
    session.registered(ack(), now)
    for index in range(groups):
        add(session, f"g-{index}")
    return session


def add(session: SessionState, name: str) -> None:
    group = Group.build(name, tokens=[[1]], mask=[[1]], scores=[0.0])
    session.spool.add(group, encode_group(group, 1 << 20))


def send(session: SessionState, now: float) -> list[int]:
    sent = []
    while entries := session.unsent(LIMIT):
        for entry in entries:
            session.spool.sent([entry], now)
            sent.append(entry.header.seq)
    return sent


def test_it_asks_after_silence_only_while_it_waits_for_something() -> None:
    idle, unacked = opened(), opened(1)
    assert not idle.must_ask(SILENCE_S, waiting=False)
    assert idle.must_ask(SILENCE_S, waiting=True)
    assert unacked.must_ask(SILENCE_S, waiting=False)
    assert not unacked.must_ask(SILENCE_S * 0.9, waiting=True)
    assert idle.must_ask(ALIVE_S, waiting=False)


def test_a_task_that_gets_nothing_by_asking_asks_less_often() -> None:
    session = opened()
    asked = 0.0
    for pause in (SILENCE_S, 2 * SILENCE_S, ALIVE_S, ALIVE_S):
        assert not session.must_ask(asked + 0.9 * pause, waiting=True)
        asked += pause
        assert session.must_ask(asked, waiting=True)
        session.synced(ack(), session.ask(asked), asked)
    session.acked(ack(start_limit=5), asked)
    assert session.must_ask(asked + SILENCE_S, waiting=True), "there was more, and there may be again"


def test_an_ack_and_a_question_end_the_silence() -> None:
    session = opened(1)
    session.acked(ack(), 0.5)
    assert not session.must_ask(SILENCE_S, waiting=True)
    assert session.must_ask(0.5 + SILENCE_S, waiting=True)
    session.ask(2.0)
    assert not session.must_ask(2.0, waiting=True)


def test_it_asks_when_a_group_is_overdue_although_acks_come() -> None:
    session = opened(2)
    send(session, 0.0)
    session.acked(ack(), RESEND_S)
    assert session.must_ask(RESEND_S, waiting=False)
    asked = session.ask(RESEND_S)
    again = session.synced(ack(), asked, RESEND_S)[1]
    assert [entry.header.seq for entry in again] == [1, 2]
    assert send(session, RESEND_S) == [1, 2]


def test_groups_behind_one_that_was_just_accepted_are_under_way() -> None:
    session = opened(3)
    send(session, 0.0)
    accepted, again = session.synced(ack(cumulative=1), session.ask(RESEND_S), RESEND_S)
    assert [entry.header.seq for entry in accepted] == [1]
    assert again == []
    moment = 2 * RESEND_S + session._slack_s
    assert session.must_ask(moment, waiting=False)
    again = session.synced(ack(cumulative=1), session.ask(moment), moment)[1]
    assert [entry.header.seq for entry in again] == [2, 3]


def test_a_group_before_one_that_was_accepted_is_lost() -> None:
    session = opened(3)
    send(session, 0.0)
    gap = ack(cumulative=1, gaps=bytes([1]))
    accepted, again = session.synced(gap, session.ask(RESEND_S), RESEND_S)
    assert [entry.header.seq for entry in accepted] == [1, 3]
    assert [entry.header.seq for entry in again] == [2]


def test_who_is_heard_by_its_groups_need_not_say_that_it_lives() -> None:
    session = opened(2)
    send(session, 2.0)
    session.acked(ack(cumulative=2), 2.1)
    assert not session.must_ask(2.0 + ALIVE_S * 0.9, waiting=False)
    assert session.must_ask(2.0 + ALIVE_S, waiting=False)
    session.ask(2.0 + ALIVE_S)
    assert not session.must_ask(2.0 + ALIVE_S, waiting=False)


def test_what_was_given_up_is_reported_although_groups_come() -> None:
    session = opened(1)
    send(session, 2.0)
    permit = session.credit.begin()
    assert permit is not None
    session.credit.abandon(permit)
    session.acked(ack(cumulative=1), 2.1)
    assert session.must_ask(ALIVE_S, waiting=False)


def test_where_acks_take_long_groups_are_not_sent_again_soon() -> None:
    session = opened(2)
    send(session, 0.0)
    late_s = 2 * RESEND_S
    session.acked(ack(cumulative=1), late_s)
    assert not session.must_ask(late_s, waiting=False)
    assert session.synced(ack(cumulative=1), session.ask(late_s), late_s) == ([], [])
    moment = late_s + RESEND_S + late_s * 2 - RESEND_S
    assert session.must_ask(moment, waiting=False)
    again = session.synced(ack(cumulative=1), session.ask(moment), moment)[1]
    assert [entry.header.seq for entry in again] == [2]


def test_one_quick_ack_does_not_end_the_patience_with_a_busy_broker() -> None:
    session = opened(1)
    send(session, 0.0)
    session.acked(ack(cumulative=1), 10.0)
    add(session, "quick")
    send(session, 11.0)
    session.acked(ack(cumulative=2), 11.1)
    add(session, "slow")
    send(session, 12.0)
    assert session.synced(ack(cumulative=2), session.ask(21.0), 21.0)[1] == []
    assert len(session.synced(ack(cumulative=2), session.ask(23.0), 23.0)[1]) == 1


def test_patience_with_slow_acks_has_an_end() -> None:
    session = opened(2)
    send(session, 0.0)
    session.acked(ack(cumulative=1), 60.0)
    session.ask(60.0)
    moment = 60.0 + RESEND_S + SLACK_MAX_S
    session.ask(moment)
    assert session.must_ask(moment + RESEND_S + SLACK_MAX_S, waiting=False)
    again = session.synced(ack(cumulative=1), session.ask(moment), moment)[1]
    assert [entry.header.seq for entry in again] == [2]


def test_abandoned_rollouts_are_reported_soon_to_those_who_wait() -> None:
    session = opened()
    permit = session.credit.begin()
    assert permit is not None
    session.credit.abandon(permit)
    assert session.must_ask(REPORT_S, waiting=True)
    assert not session.must_ask(REPORT_S, waiting=False)
    assert not session.must_ask(REPORT_S / 2, waiting=True)
    asked = session.ask(REPORT_S)
    assert asked.abandoned == 1
    session.synced(ack(), asked, REPORT_S)
    assert not session.must_ask(2 * REPORT_S, waiting=True)


def test_acks_of_others_change_nothing() -> None:
    session = opened(1)
    for other in (ack(session=4, cumulative=1), ack(session=6, cumulative=1), ack(epoch=2, cumulative=1)):
        assert session.acked(other, 0.0) == []
    assert session.strange(ack(session=6))
    assert session.strange(ack(epoch=2))
    assert not session.strange(ack(session=4))
    assert not session.strange(ack())


def test_the_same_session_keeps_its_numbers_and_sends_what_is_missing() -> None:
    session = opened(3)
    send(session, 0.0)
    session.declared.add("table")
    again = ack(epoch=2, cumulative=1)
    assert session.goes_on(again)
    assert [entry.header.seq for entry in session.registered(again, 1.0)] == [1]
    assert send(session, 1.0) == [2, 3]
    assert not session.declared
    assert session.epoch == 2


def test_another_session_starts_from_one() -> None:
    session = opened(3)
    permit = session.credit.begin()
    session.acked(ack(cumulative=2), 0.0)
    session.registered(ack(session=9, epoch=2), 1.0)
    assert session.number == 9
    assert send(session, 1.0) == [1]
    assert session.credit.begun == 2
    assert permit is not None
    assert permit.is_open
    assert session.goodbye().produced == 1


def test_a_broker_that_forgot_what_it_acked_must_give_another_number() -> None:
    session = opened(2)
    session.acked(ack(cumulative=1), 0.0)
    assert not session.goes_on(ack(epoch=2, cumulative=0))
    assert session.goes_on(ack(epoch=2, cumulative=1))
    assert session.goes_on(ack(session=6, epoch=2, cumulative=0))


def test_a_group_needs_room_and_credit_unless_it_drains() -> None:
    session = opened()
    session.acked(ack(byte_limit=10), 0.0)
    assert session.may_spool(10)
    assert not session.may_spool(11)
    session.acked(ack(byte_limit=10, draining=True), 0.0)
    session.acked(ack(byte_limit=10), 0.0)
    assert session.draining
    assert session.may_spool(11)
    assert not session.may_spool((1 << 20) + 1)


def test_the_envelope_names_session_and_group() -> None:
    session = opened(1)
    (entry,) = session.unsent(LIMIT)
    (data, *frames), sent = session.message([entry])
    assert sent == [entry]
    assert frames == list(entry.frames)
    envelope = codec.decode_envelope(data, 1, entry.header.nbytes)
    assert (envelope.producer, envelope.session, envelope.env, envelope.split) == ("p", 5, "e", Split.EVAL)
    assert envelope.groups == (entry.header,)


def test_a_registration_goes_on_with_what_was_begun_or_asks_for_a_new_session() -> None:
    session = SessionState(RegisterProducer(producer="p", env="e"), Spool(1 << 20))
    assert replace(session.registration(), key="") == session.register
    session.registered(ack(start_limit=9), 0.0)
    permits = [session.credit.begin() for _ in range(3)]
    assert permits[0] is not None
    session.credit.abandon(permits[0])
    again = session.registration()
    assert (again.producer, again.resume_session, again.begun, again.abandoned) == ("p", 5, 3, 1)
    assert replace(session.registration(new=True), key="") == session.register
    session.forget()
    first, second = session.registration(), session.registration()
    assert replace(first, key="") == session.register
    assert "" != first.key != second.key  # each attempt has a key of its own


def test_a_broker_that_forgot_an_acked_group_above_a_gap_must_give_another_number() -> None:
    session = opened(4)
    session.acked(ack(gaps=b"\x01"), 0.0)  # 2 is acked, 1 is not
    assert session.goes_on(ack(epoch=2, gaps=b"\x01"))
    assert session.goes_on(ack(epoch=2, cumulative=3))
    assert not session.goes_on(ack(epoch=2))


def test_a_broker_that_has_numbers_which_were_never_given_must_give_another() -> None:
    session = opened(2)
    assert session.goes_on(ack(epoch=2, cumulative=2))
    assert not session.goes_on(ack(epoch=2, cumulative=3))
    assert not session.goes_on(ack(epoch=2, gaps=b"\x02"))


def test_after_new_sockets_it_asks_and_sends_only_what_the_broker_lacks() -> None:
    session = opened(4)
    send(session, 0.0)
    session.acked(ack(cumulative=1), 0.0)
    session.reconnected()
    assert not session.unsent(LIMIT)
    assert session.spool.overdue(0.0)
    asked = session.ask(0.0)
    _, again = session.synced(ack(cumulative=2), asked, 0.0)
    assert [entry.header.seq for entry in again] == [3, 4] == send(session, 0.0)


def synced(session: SessionState, now: float, answer: Ack) -> bool:
    """Let it sync and resend; return whether it wants another pipe."""
    session.synced(answer, session.ask(now), now)
    dead = session.pipe_is_dead(answer, now)
    send(session, now)
    return dead


def test_a_pipe_through_which_no_group_comes_is_dead() -> None:
    session = opened(2)
    send(session, 0.0)
    times = [RESEND_S * (2**sends - 1) for sends in range(1, 6)]
    found = [synced(session, now, ack()) for now in times]
    assert found == [now - times[0] >= PIPE_S for now in times]
    assert any(found)


def test_a_dead_pipe_gets_more_time_the_next_time_until_a_group_comes() -> None:
    session = opened(2)
    send(session, 0.0)
    lives: list[float] = []
    for _ in range(9):
        began = now = 1e3 * len(lives)
        session.reconnected()
        while not synced(session, now, ack()):
            now += 1.0
        lives.append(now - began)
    assert lives == sorted(lives)
    assert PIPE_S <= lives[0] < 2 * PIPE_S + RESEND_MAX_S
    assert PIPE_MAX_S <= lives[-1] <= PIPE_MAX_S + RESEND_MAX_S
    session.acked(ack(cumulative=1), 1e5)
    session.reconnected()
    assert not synced(session, 1e5, ack(cumulative=1))
    assert any(synced(session, 1e5 + wait, ack(cumulative=1)) for wait in (PIPE_S, PIPE_S + RESEND_MAX_S))


@pytest.mark.parametrize("wait", [Wait.GLOBAL_FULL, Wait.JOURNAL_SLOW])
def test_a_broker_that_does_not_read_says_nothing_about_the_pipe(wait: Wait) -> None:
    session = opened(1)
    send(session, 0.0)
    assert not any(synced(session, 20.0 * look, ack(wait=wait)) for look in range(1, 10))


def test_a_pipe_of_an_idle_producer_is_not_dead() -> None:
    session = opened(1)
    send(session, 0.0)
    session.acked(ack(cumulative=1), 0.5)
    assert not any(synced(session, 20.0 * look, ack(cumulative=1)) for look in range(1, 5))
    add(session, "later")
    assert not synced(session, 200.0, ack(cumulative=1))


def lay(session: SessionState, name: str, values: int = 1) -> None:
    row = [[1] * values]
    group = Group.build(name, tokens=row, mask=row, scores=[0.0])
    session.take_in(group, session.lay(group, 1 << 30))


def with_arena(groups: int = 0, **options: int) -> SessionState:
    session = opened()
    session.offer(Arena(64 << 20))
    session.acked(ack(arena=True), 0.0)
    for index in range(groups):
        lay(session, f"g-{index}", **options)
    if groups:
        session.declared.add(next(iter(session.spool)).table.id)
    return session


def message(session: SessionState) -> tuple[Envelope, list[Any], list[SpoolEntry]]:
    (data, *frames), sent = session.message(session.unsent(LIMIT))
    nbytes = sum(len(frame) for frame in frames)
    for entry in sent:
        session.spool.sent([entry], 0.0)
    return codec.decode_envelope(data, len(frames), nbytes), frames, sent


def test_groups_in_the_arena_leave_together_and_without_frames() -> None:
    session = with_arena(PACK_GROUPS + 1)
    envelope, frames, sent = message(session)
    assert frames == []
    assert [header.seq for header in envelope.groups] == list(range(1, PACK_GROUPS + 1))
    assert session.arena is not None
    assert envelope.arena == session.arena.ref.ino
    mapped = MappedArena(session.arena.ref)
    for header, offset, entry in zip(envelope.groups, envelope.offsets, sent, strict=True):
        assert mapped.view[offset : offset + header.nbytes] == entry.frames[0]
        assert codec.checksum([mapped.view[offset : offset + header.nbytes]]) == header.crc
    mapped.close()
    assert [header.seq for header in message(session)[0].groups] == [PACK_GROUPS + 1]


def test_a_message_has_few_bytes_and_its_groups_are_all_in_the_arena_or_all_frames() -> None:
    session = with_arena(3, values=PACK_BYTES // 24)
    assert [len(message(session)[2]) for _ in range(2)] == [2, 1]
    lay(session, "laid")
    add(session, "framed")
    add(session, "framed too")
    lay(session, "laid too")
    assert [len(message(session)[1]) for _ in range(3)] == [0, 2, 0]


def framed(groups: int, nbytes: int) -> SessionState:
    """Return a session without an arena, with groups of one frame of about so many bytes."""
    session = SessionState(RegisterProducer(producer="p", env="e"), Spool(1 << 30))
    session.registered(ack(), 0.0)
    row = [[1] * (nbytes // 8)]  # two columns of 4 bytes
    for index in range(groups):
        group = Group.build(f"g-{index}", tokens=row, mask=row, scores=[0.0])
        session.spool.add(group, encode_group(group, 1 << 30))
    session.declared.add(next(iter(session.spool)).table.id)
    return session


def sizes(session: SessionState, limit_bytes: int = LIMIT) -> list[int]:
    """Send everything; return the groups of each message."""
    sent = []
    while entries := session.unsent(limit_bytes):
        (data, *frames), entries = session.message(entries)
        codec.decode_envelope(data, len(frames), sum(map(len, frames)))  # fits, and its frames are all there
        for entry in entries:
            session.spool.sent([entry], 0.0)
        sent.append(len(entries))
    return sent


def test_groups_leave_together_as_frames_within_the_limits_of_a_message() -> None:
    assert sizes(framed(PACK_GROUPS + 1, 1000)) == [PACK_GROUPS, 1]
    assert sizes(framed(5, PACK_FRAMES_BYTES // 2 - 1000)) == [2, 2, 1]
    assert sizes(framed(2, 2 * PACK_FRAMES_BYTES)) == [1, 1]
    assert sizes(framed(4, 1000), limit_bytes=2 * 1300) == [2, 2]


def test_a_message_has_so_many_frames_at_most() -> None:
    session = opened()
    group = Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0])
    encoded = replace(encode_group(group, 1 << 30), frames=(b"x",) * (FRAMES_LIMIT // 2))
    for _ in range(3):
        session.spool.add(group, encoded)
    session.declared.add(encoded.table.id)
    assert [len(session.unsent(LIMIT))] == [1]


def test_a_group_with_undeclared_columns_goes_first_and_alone() -> None:
    session = opened(3)
    assert len(session.unsent(LIMIT)) == 1
    session.declared.add(next(iter(session.spool)).table.id)
    assert len(session.unsent(LIMIT)) == 3


def test_names_that_are_long_leave_in_smaller_messages() -> None:
    session = with_arena()
    for index in range(PACK_GROUPS):
        lay(session, f"{index:\u00e9>128}")
    session.declared.add(next(iter(session.spool)).table.id)
    sizes = []
    while session.unsent(LIMIT):
        sizes.append(len(message(session)[2]))
    assert sum(sizes) == PACK_GROUPS
    assert 1 < max(sizes) < PACK_GROUPS


def test_a_message_with_ids_of_the_usual_length_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ids of 36 characters each message was encoded for 32 groups, then for 16."""
    session = with_arena()
    for index in range(2 * PACK_GROUPS):
        lay(session, f"{index:036}")
    session.declared.add(next(iter(session.spool)).table.id)
    made: list[int] = []

    def counted(envelope: Envelope) -> bytes:
        made.append(len(envelope.groups))
        return codec.encode_envelope(envelope)

    monkeypatch.setattr("rolloutmq.bus.producer.session.encode_envelope", counted)
    sizes = []
    while session.unsent(LIMIT):
        sizes.append(len(message(session)[2]))
    assert made == sizes
    assert max(sizes) > PACK_GROUPS // 2


def test_a_slot_is_used_again_when_it_is_released_and_not_when_it_is_acked() -> None:
    session = with_arena(2)
    assert session.arena is not None
    used = session.arena.slots.used_bytes
    session.acked(ack(cumulative=2, arena=True), 0.0)
    assert session.arena.slots.used_bytes == used
    session.acked(ack(cumulative=2, released=1, arena=True), 0.0)
    assert session.arena.slots.used_bytes == used // 2
    session.acked(ack(cumulative=2, released=2, arena=True), 0.0)
    assert session.arena.slots.used_bytes == 0


def test_after_a_registration_nothing_lies_in_the_arena_of_before() -> None:
    session = with_arena(2)
    before = [bytes(entry.frames[0]) for entry in session.spool]
    group = Group.build("waits", tokens=[[1]], mask=[[1]], scores=[0.0])
    waiting = session.lay(group, 1 << 20)
    session.offer(Arena(1 << 20))
    lay(session, "new")
    session.take_in(group, waiting)
    assert [entry.slot is not None for entry in session.spool] == [False, False, True, False]
    assert [bytes(entry.frames[0]) for entry in session.spool][:2] == before
    assert [len(message(session)[1]) for _ in range(3)] == [2, 0, 1]


def test_a_broker_that_does_not_read_the_arena_gets_frames_and_says_why() -> None:
    session = with_arena(1)
    assert session.registration().arena is not None
    session.acked(ack(), 0.0)  # published before the registration, it may have come late
    session.synced(ack(epoch=2), session.ask(0.0), 0.0)
    assert session.registration().arena is not None
    session.synced(ack(), session.ask(0.0), 0.0)
    assert session.registration().arena is None
    lay(session, "g-1")
    assert len(message(session)[1]) == 2
    assert session.as_frames == {"arena_unreachable": 1}


def test_a_group_that_never_comes_into_the_spool_gives_its_slot_back() -> None:
    session = with_arena()
    assert session.arena is not None
    group = Group.build("g", tokens=[[1]], mask=[[1]], scores=[0.0])
    laid = session.lay(group, 1 << 20)
    assert session.arena.slots.used_bytes > 0
    laid.cancel()
    assert session.arena.slots.used_bytes == 0
    laid = session.lay(group, 1 << 20)
    session.take_in(group, laid)
    laid.cancel()
    assert session.arena.slots.used_bytes > 0


def test_what_has_no_room_in_the_arena_is_a_frame() -> None:
    session = opened()
    session.offer(Arena(4096))
    session.acked(ack(arena=True), 0.0)
    for name in ("small", "large", "small too"):
        lay(session, name, values=2000 if name == "large" else 1)
    assert [entry.slot is None for entry in session.spool] == [False, True, False]
    assert session.as_frames == {"arena_full": 1}


def test_a_reply_that_took_long_delays_what_is_sent_again() -> None:
    session = opened(1)
    send(session, 0.0)
    asked = session.ask(RESEND_S)
    took_s = 3 * RESEND_S
    assert session.synced(ack(), asked, RESEND_S + took_s)[1] == []
    moment = RESEND_S + 2 * took_s
    assert session.synced(ack(), session.ask(moment), moment)[1] != []


def test_a_registration_that_took_long_delays_what_is_sent_again() -> None:
    session = opened(1)
    session.registered(ack(epoch=2), 10.0, 4 * RESEND_S)
    send(session, 10.0)
    early, late = (10.0 + seconds * RESEND_S for seconds in (8, 9))
    assert session.synced(ack(epoch=2), session.ask(early), early)[1] == []
    assert session.synced(ack(epoch=2), session.ask(late), late)[1] != []


@pytest.mark.parametrize("wait", [Wait.GLOBAL_FULL, Wait.JOURNAL_SLOW])
def test_a_broker_that_may_read_no_groups_gets_one_again_late(wait: Wait) -> None:
    """It may read after all, and its trainer wait for this group."""
    session = opened(1)
    send(session, 0.0)
    assert session.synced(ack(wait=wait), session.ask(RESEND_S), RESEND_S)[1] == []
    late = RESEND_S + RESEND_MAX_S
    (again,) = session.synced(ack(wait=wait), session.ask(late), late)[1]
    assert again.header.seq == 1


def test_a_broker_that_may_read_no_groups_gets_one_again_by_a_new_pipe() -> None:
    session = opened(1)
    send(session, 0.0)
    session.reconnected()
    (again,) = session.synced(ack(wait=Wait.GLOBAL_FULL), session.ask(0.1), 0.1)[1]
    assert again.header.seq == 1


def test_groups_stay_under_way_where_the_sockets_stay() -> None:
    session = opened(1)
    send(session, 0.0)
    session.reconnected(is_kept=True)
    assert session.synced(ack(), session.ask(0.1), 0.1)[1] == []


def test_a_stop_of_the_broker_tells_nothing_about_the_pipe() -> None:
    session = opened(2)
    send(session, 0.0)
    moment = RESEND_S
    answer = ack()
    assert session.synced(answer, session.ask(moment), moment)[1] != []
    assert not session.pipe_is_dead(answer, moment)
    session.reconnected(is_kept=True)  # it was stopped for long
    assert not session.pipe_is_dead(answer, moment + 10 * PIPE_S)


def test_a_group_that_had_arrived_by_a_lost_pipe_tells_no_slow_broker() -> None:
    session = opened(2)
    send(session, 0.0)
    session.reconnected()
    again = session.synced(ack(cumulative=1), session.ask(0.1), 0.1)[1]
    assert [entry.header.seq for entry in again] == [2]
    assert session._slack_s == 0.0
