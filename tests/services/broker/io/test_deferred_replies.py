from dataclasses import dataclass

from rolloutmq.bus.encoding.codec import encode_tables
from rolloutmq.schemas.wire.replies import Ack, Batch, Ok, Settled, Wait
from rolloutmq.services.broker.actions import Action, Publish, Reply, Unbury
from rolloutmq.services.broker.io.deferred_replies import DEFERRED_LIMIT, DeferredReplies

NO_TABLES = encode_tables(())


@dataclass
class Tickets:
    """Tickets of the journal after the last append."""

    ticket: int
    priority_ticket: int
    priority_open: bool = True


def ack(cumulative: int, session: int = 1, epoch: int = 1) -> Ack:
    return Ack(epoch=epoch, session=session, cumulative=cumulative, byte_limit=0, start_limit=0)


def test_what_binds_leaves_in_its_order_when_its_batch_is_durable() -> None:
    held = DeferredReplies()
    actions: list[Action] = [
        Reply((b"a",), Ok()),
        Unbury(3),
        Publish(b"ack.p/", ack(1)),
        Reply((b"b",), Ok()),
    ]
    for ticket, action in zip((1, 1, 2, 3), actions, strict=True):
        held.hold(ticket, action)
    assert list(held.release(0, 0)) == []
    assert list(held.release(2, 0)) == actions[:3]
    assert list(held.release(9, 0)) == actions[3:]
    assert len(held) == 0


def test_only_replies_are_urgent() -> None:
    held = DeferredReplies()
    held.hold(1, Publish(b"ack.p/", ack(1)))
    urgent = [held.urgent]
    held.hold(1, Reply((b"a",), Ok()))
    urgent.append(held.urgent)
    list(held.release(1, 0))
    assert [*urgent, held.urgent] == [False, True, False]


def test_the_last_durable_ack_stands_in_with_the_reason() -> None:
    held = DeferredReplies()
    newer = Publish(b"ack.p/", ack(7))
    assert held.last_durable_ack(newer) is None
    held.sent(Publish(b"ack.p/", ack(3)))
    assert held.last_durable_ack(Reply((b"a",), Ok())) is None
    assert held.last_durable_ack(Publish(b"ack.q/", ack(7, session=2))) is None
    assert held.last_durable_ack(Publish(b"ack.p/", ack(7, epoch=2))) is None
    instead = held.last_durable_ack(newer)
    assert isinstance(instead, Publish)
    assert isinstance(instead.message, Ack)
    assert (instead.message.cumulative, instead.message.wait) == (3, Wait.JOURNAL_SLOW)


def test_memory_is_bounded_while_nothing_becomes_durable() -> None:
    held = DeferredReplies()
    for number in range(DEFERRED_LIMIT + 10):
        held.hold(1, Reply((b"%d" % number,), Ok()))
    assert len(held) == DEFERRED_LIMIT
    first = next(held.release(1, 0))
    assert isinstance(first, Reply)
    assert first.route == (b"10",)
    list(held.release(1, 0))
    assert not held.urgent


def test_who_asks_again_for_a_batch_gets_it_once() -> None:
    held = DeferredReplies()
    batch = Batch(lease=1, generation=1, step=0, groups=(), tables=NO_TABLES)
    replies = [
        Reply((who, b"%d" % number, b""), batch) for number, who in enumerate((b"a", b"a", b"b", b"a"))
    ]
    for reply in replies:
        held.hold(1, reply)
    assert list(held.release(1, 0)) == replies[2:]
    assert not held.urgent


def test_what_waits_for_facts_that_go_ahead_leaves_by_itself_and_hurries_no_groups() -> None:
    held = DeferredReplies()
    settled, acked = Reply((b"a",), Settled(step=1)), Publish(b"ack.p/", ack(1))
    journal = Tickets(ticket=7, priority_ticket=5)
    for action in (acked, settled):
        held.defer(journal, action)
    assert not held.urgent
    assert list(held.release(4, 4)) == []
    assert list(held.release(4, 5)) == [settled]
    assert list(held.release(7, 5)) == [acked]


def test_where_the_way_is_closed_all_waits_for_everything() -> None:
    held = DeferredReplies()
    held.defer(Tickets(ticket=7, priority_ticket=5, priority_open=False), Reply((b"a",), Settled(step=1)))
    assert held.urgent
    assert list(held.release(6, 6)) == []
    assert len(list(held.release(7, 5))) == 1


def test_a_batch_that_is_asked_for_again_may_wait_for_more_than_before() -> None:
    held = DeferredReplies()
    reply = Reply((b"a", b"", b""), Batch(lease=1, generation=1, step=0, groups=(), tables=NO_TABLES))
    held.defer(Tickets(ticket=7, priority_ticket=5), reply)
    held.defer(Tickets(ticket=8, priority_ticket=5, priority_open=False), reply)
    assert held.urgent
    assert list(held.release(7, 7)) == []
    assert list(held.release(8, 7)) == [reply]
    assert not held.urgent


def test_the_waits_of_trainers_are_counted_once_for_each() -> None:
    held = DeferredReplies()
    settled, batch = Settled(step=1), Batch(lease=1, generation=1, step=2, groups=(), tables=NO_TABLES)
    held.hold(1, Reply((b"a",), settled, awaited=True), 10.0)
    held.hold(2, Reply((b"a",), batch, awaited=True), 11.0)
    held.hold(2, Reply((b"b",), batch, awaited=True), 12.0)
    held.hold(2, Reply((b"c",), Ok()), 10.0)  # nobody trains on this one
    assert held.waited_s(13.0) == (3.0 + 1.0, 3.0)
    assert len(list(held.release(1, 0))) == 1
    assert held.waited_s(13.5) == (0.5 + 0.5, 2.5)
    assert len(list(held.release(2, 0))) == 3
    assert held.waited_s(20.0) == (0.0, 0.0)
