"""Events as repeated state: no peer is harmed by subscribers that do not read, lie, or were absent.

Where a test sets the intervals to an hour, an arriving event is what the broker sends to a new subscription.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.faults.support.borders import (
    ENV,
    LIMIT_S,
    MIB,
    Wire,
    broker_process,
    expect,
    forger,
    proxy,
    run_config,
    small_group,
    status_of,
    traffic,
    wait_for,
)

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.producer.client import BlockingProducer, Producer
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import DrainingError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.control import Drain, Pressure
from rolloutmq.schemas.wire.envelope import Message, Name
from rolloutmq.schemas.wire.replies import Ack, Ok, Registered
from rolloutmq.schemas.wire.requests import RegisterProducer
from rolloutmq.services.broker.server import running_broker

ACKS = 60_000
PRODUCERS = 300
WAITING = "waiting"
"""An environment whose producers wait for permits, so that their acks are repeated."""
HOUR_S = 3600.0
SELDOM = {"ack_interval_s": HOUR_S, "pressure_interval_s": HOUR_S}


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def _producer(endpoints: Endpoints, name: str) -> BlockingProducer:
    return Producer.blocking(endpoints.serve, env=ENV, producer=name, group_size=2)


class Stalled:
    """A producer whose event loop stands still for a while: it reads no acks, and answers nothing."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.stalled = threading.Event()
        self.go_on = threading.Event()
        self.unacked = -1
        self._endpoints = endpoints
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="stalled")
        self._thread.start()

    async def _live(self) -> None:
        async with Producer.open(self._endpoints.serve, env=ENV, producer="stalled", group_size=2) as it:
            for number in range(5):
                await it.send(small_group(f"stalled-{number}"))
            self.stalled.set()
            self.go_on.wait(4 * LIMIT_S)
            assert await it.flush(LIMIT_S)
            self.unacked = it.unacked

    def end(self) -> None:
        self.go_on.set()
        self._thread.join(2 * LIMIT_S)


@pytest.mark.extended
def test_subscriber_that_stalls_for_60000_acks_costs_and_harms_nothing(layout: RunLayout) -> None:
    config = run_config(ack_interval_s=0.002, silence_s=HOUR_S, high_groups=1_000_000)
    config.environment[WAITING] = EnvironmentConfig(entry="m:C", group_size=2, pacing=True, max_staleness=0)
    with (
        broker_process(layout, config) as broker,
        forger(broker.endpoints) as by_hand,
        traffic(broker.endpoints.serve) as good,
        sockets.subscriber(by_hand.context, broker.endpoints.events, [topics.ACK]) as deaf,
        BlockingSubscriber(broker.endpoints.events, [topics.ACK], by_hand.context) as listener,
    ):
        deaf.rcvhwm = 1
        stalled = Stalled(broker.endpoints)
        try:
            assert stalled.stalled.wait(LIMIT_S)
            for number in range(PRODUCERS):
                by_hand.ask(RegisterProducer(producer=f"p-{number}", env=WAITING))
            with broker.growth_below(48 * MIB):
                _hear(listener, ACKS)
                good.advance()
        finally:
            stalled.end()
        assert stalled.unacked == 0
        _catches_up(deaf, by_hand.ask(RegisterProducer(producer="p-0", env=WAITING)))


def _hear(listener: BlockingSubscriber, count: int) -> None:
    """Receive so many acks: at least as many were published to a subscriber that does not listen."""
    until = time.monotonic() + 2 * LIMIT_S
    for _ in range(count):
        assert listener.poll(LIMIT_S) is not None
        assert time.monotonic() < until


def _catches_up(deaf: sockets.Socket, registered: object) -> None:
    """Check that repetition brings the present state to a subscriber that missed everything before."""
    session = expect(Registered, registered).ack.session
    until = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < until
        assert deaf.poll(5000)
        topic, payload = deaf.recv_multipart()
        if topic == topics.ack("p-0") and codec.decode_ack(payload).session == session:
            return


def _lies(endpoints: Endpoints, session: int, pressure: Pressure) -> dict[bytes, Message]:
    """Return events that only the broker may publish, each of which would do harm."""
    ack = Ack(
        epoch=endpoints.epoch,
        session=session,
        cumulative=1 << 40,
        byte_limit=1 << 60,
        start_limit=1 << 40,
        draining=True,
    )
    forged = msgspec.structs.replace(pressure, number=1 << 40, rollout_pressure=1e9)
    return {
        topics.ack("w"): ack,
        topics.control("w"): Drain(worker="w", reason="forged"),
        topics.PRESSURE: forged,
        topics.ACK: ack,
        b"": ack,
    }


NEARLY: dict[bytes, str] = {
    b"policies": "publish: not forwarded",
    b"step.": "publish: not forwarded",
    b"telemetry.ack.w/": "publish: malformed",
}
"""Topics that begin as those do which are forwarded, and how an ack under them is counted."""


class Liar(Wire):
    """A handmade publisher: those of the library send only topics with a subscription of the broker."""

    def __init__(self, endpoints: Endpoints) -> None:
        super().__init__(endpoints.publish, b"PUB")

    def publish(self, topic: bytes, message: Message) -> None:
        self.send(topic, more=True)
        self.send(codec.encode(message), more=False)


def test_forged_events_fool_nobody(layout: RunLayout) -> None:
    with (
        running_broker(run_config(pressure_interval_s=0.02), layout) as broker,
        _producer(broker.endpoints, "w") as producer,
        BlockingSubscriber(broker.endpoints.events, [b""]) as everything,
        closing(Liar(broker.endpoints)) as liar,
    ):
        pressure = status_of(broker.endpoints).pressure
        lies = _lies(broker.endpoints, producer.session, pressure)
        assert everything.poll(LIMIT_S) is not None  # its subscription has arrived
        for _ in range(10):
            for topic, message in lies.items():
                liar.publish(topic, message)
            for topic in NEARLY:
                liar.publish(topic, lies[topics.ACK])
        liar.publish(topics.STEP, pressure)  # well formed, and the last
        seen = list(_until(everything, topics.STEP))
        assert {topic for topic, _ in seen} <= {topics.ack("w"), topics.PRESSURE, topics.STEP}
        acks = [codec.decode_ack(payload) for topic, payload in seen if topic == topics.ack("w")]
        assert not [ack for ack in acks if ack.cumulative or ack.draining]
        assert not [p for topic, p in seen if topic == topics.PRESSURE and p == codec.encode(lies[topic])]
        assert not producer.draining
        producer.send(small_group("g"))
        assert producer.flush(LIMIT_S)
        status = status_of(broker.endpoints)
        assert status.pressure.ledger.accepted == 1
        assert status.rejected_by_reason["publish: malformed"] == 10
        assert status.rejected_by_reason["publish: not forwarded"] >= 20


def test_forged_events_are_counted(layout: RunLayout) -> None:
    with running_broker(run_config(), layout) as broker, closing(Liar(broker.endpoints)) as liar:
        pressure = status_of(broker.endpoints).pressure
        lies = _lies(broker.endpoints, 1, pressure)
        for topic, message in lies.items():
            liar.publish(topic, message)
        counted = len(lies)
        wait_for(lambda: status_of(broker.endpoints).rejected_messages == counted, 3.0)
        assert status_of(broker.endpoints).rejected_by_reason == {"publish: not forwarded": counted}


def _until(subscriber: BlockingSubscriber, last: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield events up to the one of that topic; others never cease to arrive."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and (event := subscriber.poll(LIMIT_S)) is not None:
        yield event
        if event[0] == last:
            return
    raise AssertionError(f"{last!r} did not come")


NAMESAKES = ("w-1", "w-10", "w-100", "w-1.0", "w")


def test_names_that_begin_alike_are_never_mixed_up(layout: RunLayout) -> None:
    with (
        running_broker(run_config(), layout) as broker,
        BlockingClient(broker.endpoints.serve) as client,
        ExitStack() as stack,
    ):
        producers = {n: stack.enter_context(_producer(broker.endpoints, n)) for n in NAMESAKES}
        for count, (name, producer) in enumerate(producers.items(), 1):
            for number in range(count):
                producer.send(small_group(f"{name}-{number}"))
        assert all(producer.flush(LIMIT_S) for producer in producers.values())
        assert [producer.accepted for producer in producers.values()] == [1, 2, 3, 4, 5]
        for drained in NAMESAKES[:3]:
            assert client.request(Drain(worker=drained)) == Ok()
            wait_for(lambda name=drained: producers[name].draining)  # type: ignore[misc]
        for name, producer in producers.items():
            assert producer.draining == (name in NAMESAKES[:3])
        with pytest.raises(DrainingError):
            producers["w-10"].acquire()
        for name in NAMESAKES[3:]:
            producers[name].send(small_group(f"{name}-last"))
            assert producers[name].flush(LIMIT_S)


def test_drain_is_published_to_its_worker_alone(layout: RunLayout) -> None:
    with running_broker(run_config(ack_interval_s=0.02), layout) as broker, ExitStack() as stack:
        client = stack.enter_context(BlockingClient(broker.endpoints.serve))
        for name in NAMESAKES:
            client.request(RegisterProducer(producer=name, env=ENV))
        assert client.request(Drain(worker="w-10")) == Ok()
        for name in NAMESAKES:
            listener = BlockingSubscriber(broker.endpoints.events, [topics.control(name), topics.ack(name)])
            with listener:
                told = dict(_heard(listener, 4 if name == "w-10" else 1))
                told |= _heard_soon(listener)
            assert codec.decode_ack(told[topics.ack(name)]).draining == (name == "w-10")
            assert set(told) - {topics.ack(name)} <= {topics.control("w-10")}
            if name == "w-10":
                assert codec.decode_drain(told[topics.control(name)]).worker == "w-10"


def _heard(listener: BlockingSubscriber, count: int) -> Iterator[tuple[bytes, bytes]]:
    for _ in range(count):
        event = listener.poll(LIMIT_S)
        assert event is not None
        yield event


def _heard_soon(listener: BlockingSubscriber) -> dict[bytes, bytes]:
    """Return what comes in ten intervals of the broker."""
    until, told = time.monotonic() + 0.2, {}
    while (left_s := until - time.monotonic()) > 0:
        if (event := listener.poll(left_s)) is not None:
            told[event[0]] = event[1]
    return told


class State:
    """State of a run on `events`: each topic has a last value."""

    def __init__(self, endpoints: Endpoints, name: Name = "w") -> None:
        self.name = name
        self.client = BlockingClient(endpoints.serve)

    def begin(self) -> int:
        """Open a session of the worker, and order it to drain; return the session."""
        reply = expect(Registered, self.client.request(RegisterProducer(producer=self.name, env=ENV)))
        assert self.client.request(Drain(worker=self.name)) == Ok()
        return reply.ack.session

    def wait_complete(self, listener: BlockingSubscriber, session: int, epoch: int) -> None:
        """Wait until the listener has the last value of every topic."""
        wanted: dict[bytes, Callable[[bytes], bool]] = {
            topics.ack(self.name): lambda p: codec.decode_ack(p).session == session,
            topics.control(self.name): lambda p: codec.decode_drain(p).worker == self.name,
            topics.PRESSURE: lambda p: expect(Pressure, codec.decode_event(p)).epoch == epoch,
        }
        missing = set(wanted)
        until = time.monotonic() + LIMIT_S
        while missing:
            assert time.monotonic() < until, missing
            event = listener.poll(LIMIT_S)
            assert event is not None, missing
            if event[0] in wanted and wanted[event[0]](event[1]):
                missing.discard(event[0])


@contextmanager
def _state(endpoints: Endpoints) -> Iterator[State]:
    state = State(endpoints)
    with state.client:
        yield state


WANTED = [topics.ACK, topics.CONTROL, topics.PRESSURE]


def test_subscriber_that_joins_late_gets_the_state(layout: RunLayout) -> None:
    with running_broker(run_config(**SELDOM), layout) as broker, _state(broker.endpoints) as state:
        session = state.begin()
        for prefixes in (WANTED, [b""], [topics.ack("w"), topics.control("w"), topics.PRESSURE]):
            with BlockingSubscriber(broker.endpoints.events, prefixes) as late:
                state.wait_complete(late, session, broker.endpoints.epoch)


def test_subscriber_that_was_cut_off_gets_the_state(layout: RunLayout, tmp_path: Path) -> None:
    """Changes during its absence come with its subscriptions, which the library sends again."""
    with (
        running_broker(run_config(**SELDOM), layout) as broker,
        _state(broker.endpoints) as state,
        proxy(tmp_path / "proxy", broker.endpoints.events) as between,
        BlockingSubscriber(between.address, WANTED) as cut_off,
    ):
        session = state.begin()
        state.wait_complete(cut_off, session, broker.endpoints.epoch)
        for _ in range(3):
            between.cut()
            previous, session = session, state.begin()
            assert previous != session
            between.mend()
            state.wait_complete(cut_off, session, broker.endpoints.epoch)


def test_subscriber_outlives_the_broker(layout: RunLayout) -> None:
    """The addresses of a run on one machine stay; the next life of the broker publishes its own state."""
    lives: list[int] = []
    address = f"ipc://{layout.sockets / 'events'}"
    with BlockingSubscriber(address, WANTED) as patient:
        for _ in range(3):
            with running_broker(run_config(**SELDOM), layout) as broker, _state(broker.endpoints) as state:
                state.wait_complete(patient, state.begin(), broker.endpoints.epoch)
                lives.append(broker.endpoints.epoch)
    assert lives == sorted(set(lives))


def test_subscriptions_come_and_go_without_end(layout: RunLayout) -> None:
    """Each brings the state of its topic once; the broker keeps nothing of them."""
    with (
        broker_process(layout, run_config()) as broker,
        traffic(broker.endpoints.serve) as good,
        forger(broker.endpoints) as by_hand,
        broker.growth_below(32 * MIB),
        sockets.subscriber(by_hand.context, broker.endpoints.events, []) as fickle,
    ):
        for number in range(20_000):
            topic = b"ack.%d/" % number if number % 10 else topics.ack("good")
            fickle.setsockopt(zmq.SUBSCRIBE, topic)
            fickle.setsockopt(zmq.UNSUBSCRIBE, topic)
        good.advance()
