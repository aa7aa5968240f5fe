from dataclasses import dataclass

from tests.services.broker.bench import Bench, Peer
from tests.services.broker.flow.test_credits import in_line

from rolloutmq.bus.producer.session import SILENCE_S
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Ack, Wait
from rolloutmq.schemas.wire.requests import RegisterProducer
from rolloutmq.services.broker.core import GRANT_S
from rolloutmq.services.broker.flow.ack_schedule import (
    ANNOUNCE_S,
    GATHER_S,
    LONGEST_S,
    REPEATS_PER_S,
    AckSchedule,
)
from rolloutmq.services.broker.flow.sessions import ProducerSessions
from rolloutmq.services.broker.state.queues import Lane

INTERVAL_S = 0.25


@dataclass
class PublishedAcks:
    """Acks published to producers."""

    bench: Bench

    def after(self, seconds: float) -> list[tuple[str, Ack]]:
        """Let time pass, and return the acks of that tick by producer."""
        self.bench.published.clear()
        self.bench.tick(seconds)
        return [
            (published.topic.decode().removeprefix("ack.").rstrip("/"), published.message)
            for published in self.bench.published
            if isinstance(published.message, Ack)
        ]


def settled(*names: str) -> tuple[PublishedAcks, list[Peer]]:
    """Register producers and publish their first acks."""
    bench = Bench()
    peers = [bench.producer(name) for name in names]
    acked = PublishedAcks(bench)
    acked.after(0.0)
    return acked, peers


def test_an_ack_is_repeated_an_interval_after_it_was_said_last() -> None:
    acked, (first, _) = settled("a", "b")
    acked.after(INTERVAL_S * 0.8)
    first.send()
    assert [name for name, _ in acked.after(0.0)] == ["a"]
    assert [name for name, _ in acked.after(INTERVAL_S * 0.3)] == ["b"]
    assert [name for name, _ in acked.after(INTERVAL_S * 0.7)] == ["a"]


def test_a_producer_that_does_not_wait_hears_its_ack_twice() -> None:
    acked, _ = settled("a", "b")
    told = [name for _ in range(12) for name, _ in acked.after(INTERVAL_S)]
    assert sorted(told) == ["a", "a", "a", "b", "b", "b"], (
        "that of the registration again; more credit, and again"
    )


def test_acks_are_repeated_as_long_as_their_producer_waits() -> None:
    bench, _ = in_line()
    acked = PublishedAcks(bench)
    while not any(ack.wait is Wait.GLOBAL_FULL for _, ack in acked.after(INTERVAL_S)):
        pass
    assert [ack.wait for _ in range(12) for _, ack in acked.after(INTERVAL_S)] == 12 * [Wait.GLOBAL_FULL]
    bench.consumer()
    bench.train(0)
    bench.train(1)
    assert [ack.wait for _, ack in acked.after(GRANT_S)] == [Wait.NONE]
    assert [ack.wait for _ in range(12) for _, ack in acked.after(INTERVAL_S)] == [Wait.NONE]


def test_another_policy_comes_to_all_live_producers_within_a_repetition() -> None:
    many = 500
    sessions, policies = ProducerSessions(1), [PolicyVersion()]
    acks = AckSchedule(
        BrokerConfig(), 1, sessions, lambda: policies[-1], lambda: [one for one in sessions if one.alive]
    )
    lane = Lane("e", Split.TRAIN, EnvironmentConfig(entry="a:B"), 0.0)
    for number in range(many):
        sessions.open(RegisterProducer(producer=f"p{number}", env="e"), lane, 0.0)
    gone = next(iter(sessions))
    gone.alive = False
    assert acks.due(1.0) == []
    policies.append(PolicyVersion(0, 1))
    told = [acks.due(1.0 + step / 20) for step in range(int(20 * LONGEST_S) + 1)]
    assert sorted(one.number for part in told for one in part) == sorted(
        one.number for one in sessions if one is not gone
    )
    assert max(map(len, told)) < many / 5, "spread over the time"
    assert acks.due(2.0) == []
    policies.append(PolicyVersion(0, 2))
    assert [len(acks.due(2.0 + step)) for step in range(2)] == [0, 0], "that would be most of the work"
    acks.due(1.0 + ANNOUNCE_S)
    assert len(acks.due(1.0 + ANNOUNCE_S + LONGEST_S)) > many / 2


def test_many_producers_hear_their_acks_less_often_and_before_they_ask() -> None:
    many = int(REPEATS_PER_S * LONGEST_S * 0.8)
    sessions = ProducerSessions(1)
    acks = AckSchedule(BrokerConfig(), 1, sessions, PolicyVersion, lambda: list(sessions))
    lane = Lane("e", Split.TRAIN, EnvironmentConfig(entry="a:B"), 0.0)
    for number in range(many):
        acks.schedule(sessions.open(RegisterProducer(producer=f"p{number}", env="e"), lane, 0.0), 0.0)
    assert not list(acks.due(INTERVAL_S))
    assert acks.next_due() == many / REPEATS_PER_S < LONGEST_S < SILENCE_S
    assert len(list(acks.due(LONGEST_S))) == many
    assert not list(acks.due(LONGEST_S))


def test_where_there_are_many_what_can_wait_is_said_once_in_the_time_of_a_repetition() -> None:
    sessions = ProducerSessions(1)
    acks = AckSchedule(BrokerConfig(), 1, sessions, PolicyVersion, lambda: list(sessions))
    lane = Lane("e", Split.TRAIN, EnvironmentConfig(entry="a:B"), 0.0)
    for number in range(int(REPEATS_PER_S)):
        acks.schedule(sessions.open(RegisterProducer(producer=f"p{number}", env="e"), lane, 0.0), 0.5)
    first = next(iter(sessions))
    first.touch_later(0.5 + GATHER_S)
    assert acks.next_due() == 0.5 + LONGEST_S
    assert not list(acks.due(0.5 + 2 * GATHER_S)), "credit comes in the meantime"
    first.touch()
    assert list(acks.due(1.0)) == [first]
    assert first not in list(acks.due(0.5 + LONGEST_S))


def test_who_is_in_line_hears_of_a_group_together_with_what_follows() -> None:
    bench, peer = in_line()
    acked = PublishedAcks(bench)
    bench.consumer()
    bench.train(0)
    acked.after(GRANT_S)
    peer.send(nbytes=100)
    assert acked.after(0.0) == [], "it has no new credit"
    bench.train(1)
    bench.train(2)
    ((name, ack),) = acked.after(0.0)
    assert (name, ack.cumulative, ack.byte_limit) == ("p", peer.seq, peer.sync().byte_limit)
    assert ack.byte_limit > peer.position + 300


def test_an_ack_without_news_of_credit_waits_a_little_and_no_longer() -> None:
    acked, (peer,) = settled("a")
    session = acked.bench.core._state.sessions.current("a")
    assert session is not None
    session.touch_later(acked.bench.now)
    session.touch_later(acked.bench.now + GATHER_S / 2)
    assert acked.after(GATHER_S / 2) == []
    assert [name for name, _ in acked.after(GATHER_S / 2)] == ["a"]
    session.touch_later(acked.bench.now)
    peer.send()
    assert [name for name, _ in acked.after(0.0)] == ["a"], "an urgent ack carries all changes"
    assert acked.after(GATHER_S) == []
