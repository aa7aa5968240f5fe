"""When a session asks, which acks it believes, and how its numbers go on."""

from rolloutmq.bus import codec
from rolloutmq.bus.codec import encode_group
from rolloutmq.bus.session import ALIVE_S, REPORT_S, SILENCE_S, Session
from rolloutmq.bus.spool import RESEND_S, Spool
from rolloutmq.schemas.delivery import Ack, RegisterProducer
from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.trajectory import Group


def ack(session: int = 5, epoch: int = 1, cumulative: int = 0, **more: int | bytes) -> Ack:
    values = {"byte_limit": 1 << 30, "start_limit": 4, **more}
    return Ack(epoch=epoch, session=session, cumulative=cumulative, **values)  # type: ignore[arg-type]


def opened(groups: int = 0, now: float = 0.0) -> Session:
    session = Session(RegisterProducer(producer="p", env="e", split=Split.EVAL), Spool(1 << 20))
    session.registered(ack(), now)
    for index in range(groups):
        add(session, f"g-{index}")
    return session


def add(session: Session, name: str) -> None:
    group = Group.build(name, tokens=[[1]], mask=[[1]], scores=[0.0])
    session.spool.add(group, encode_group(group, 1 << 20))


def send(session: Session, now: float) -> list[int]:
    sent = []
    while (entry := session.next_unsent()) is not None:
        session.spool.sent(entry, now)
        sent.append(entry.header.seq)
    return sent


def test_it_asks_after_silence_only_while_it_waits_for_something() -> None:
    idle, unacked = opened(), opened(1)
    assert not idle.must_ask(SILENCE_S, waiting=False)
    assert idle.must_ask(SILENCE_S, waiting=True)
    assert unacked.must_ask(SILENCE_S, waiting=False)
    assert not unacked.must_ask(SILENCE_S * 0.9, waiting=True)
    assert idle.must_ask(ALIVE_S, waiting=False)


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
    accepted, again = session.synced(ack(cumulative=1), asked, RESEND_S)
    assert [entry.header.seq for entry in accepted] == [1]
    assert [entry.header.seq for entry in again] == [2]
    assert send(session, RESEND_S) == [2]


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
    entry = session.next_unsent()
    assert entry is not None
    envelope = codec.decode_envelope(session.envelope(entry), 1, entry.header.nbytes)
    assert (envelope.producer, envelope.session, envelope.env, envelope.split) == ("p", 5, "e", Split.EVAL)
    assert envelope.groups == (entry.header,)


def test_a_registration_goes_on_with_what_was_begun_or_asks_for_a_new_session() -> None:
    session = Session(RegisterProducer(producer="p", env="e"), Spool(1 << 20))
    assert session.registration() == session.register
    session.registered(ack(start_limit=9), 0.0)
    permits = [session.credit.begin() for _ in range(3)]
    assert permits[0] is not None
    session.credit.abandon(permits[0])
    again = session.registration()
    assert (again.producer, again.resume_session, again.begun, again.abandoned) == ("p", 5, 3, 1)
    assert session.registration(new=True) == session.register
    session.forget()
    assert session.registration() == session.register


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
    assert session.next_unsent() is None
    assert session.spool.overdue(0.0)
    asked = session.ask(0.0)
    _, again = session.synced(ack(cumulative=2), asked, 0.0)
    assert [entry.header.seq for entry in again] == [3, 4] == send(session, 0.0)
