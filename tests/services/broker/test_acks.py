from dataclasses import dataclass

from tests.services.broker.bench import Bench, Peer
from tests.services.broker.test_admission import in_line

from rolloutmq.bus.session import SILENCE_S
from rolloutmq.schemas.config import BrokerConfig, EnvironmentConfig
from rolloutmq.schemas.delivery import Ack, RegisterProducer
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.services.broker.acks import GATHER_S, LONGEST_S, REPEATS_PER_S, Acks
from rolloutmq.services.broker.core import POUR_S
from rolloutmq.services.broker.lanes import Lane
from rolloutmq.services.broker.sessions import Sessions

INTERVAL_S = 0.25


@dataclass
class Heard:
    """What is published for producers."""

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


def settled(*names: str) -> tuple[Heard, list[Peer]]:
    """Producers whose registration is told."""
    bench = Bench()
    peers = [bench.producer(name) for name in names]
    heard = Heard(bench)
    heard.after(0.0)
    return heard, peers


def test_an_ack_is_repeated_an_interval_after_it_was_said_last() -> None:
    heard, (first, _) = settled("a", "b")
    heard.after(INTERVAL_S * 0.8)
    first.send()
    assert [name for name, _ in heard.after(0.0)] == ["a"]
    assert [name for name, _ in heard.after(INTERVAL_S * 0.3)] == ["b"]
    assert [name for name, _ in heard.after(INTERVAL_S * 0.7)] == ["a"]


def test_many_producers_hear_their_acks_less_often_and_before_they_ask() -> None:
    many = int(REPEATS_PER_S * LONGEST_S * 0.8)
    sessions = Sessions(1)
    acks = Acks(BrokerConfig(), 1, sessions, PolicyVersion)
    lane = Lane("e", Split.TRAIN, EnvironmentConfig(entry="a:B"), 0.0)
    for number in range(many):
        acks.schedule(sessions.open(RegisterProducer(producer=f"p{number}", env="e"), lane, 0.0), 0.0)
    assert not list(acks.due(INTERVAL_S))
    assert acks.next_due() == many / REPEATS_PER_S < LONGEST_S < SILENCE_S
    assert len(list(acks.due(LONGEST_S))) == many
    assert not list(acks.due(LONGEST_S))


def test_where_there_are_many_what_can_wait_is_said_once_in_the_time_of_a_repetition() -> None:
    sessions = Sessions(1)
    acks = Acks(BrokerConfig(), 1, sessions, PolicyVersion)
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
    heard = Heard(bench)
    bench.consumer()
    bench.train(0)
    heard.after(POUR_S)
    peer.send(nbytes=100)
    assert heard.after(0.0) == [], "it has no new credit"
    bench.train(1)
    bench.train(2)
    ((name, ack),) = heard.after(0.0)
    assert (name, ack.cumulative, ack.byte_limit) == ("p", peer.seq, peer.sync().byte_limit)
    assert ack.byte_limit > peer.position + 300


def test_an_ack_without_news_of_credit_waits_a_little_and_no_longer() -> None:
    heard, (peer,) = settled("a")
    session = heard.bench.core._state.sessions.current("a")
    assert session is not None
    session.touch_later(heard.bench.now)
    session.touch_later(heard.bench.now + GATHER_S / 2)
    assert heard.after(GATHER_S / 2) == []
    assert [name for name, _ in heard.after(GATHER_S / 2)] == ["a"]
    session.touch_later(heard.bench.now)
    peer.send()
    assert [name for name, _ in heard.after(0.0)] == ["a"], "what must be said at once says all"
    assert heard.after(GATHER_S) == []
