"""Events: whole topics, prefixes, no blocking, and no loss in a cancelled wait."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.pubsub import BlockingSubscriber, Publisher, Subscriber, matches
from rolloutmq.bus.transport.sockets import Context, Socket
from rolloutmq.schemas.errors import ClosedError
from rolloutmq.schemas.wire.control import ScaleDecision

DECISION = ScaleDecision(
    env="sort3", at=1.0, rollout_pressure=0.5, current=1, target=2, reason="below low_pressure"
)


@pytest.fixture
def context() -> Iterator[Context]:
    context = sockets.make_context()
    yield context
    context.term()


@pytest.fixture
def xpub(context: Context, tmp_path: Path) -> Iterator[Socket]:
    with sockets.events_xpub(context) as socket:
        socket.bind(f"ipc://{tmp_path}/events")
        yield socket


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


def _wait_for(xpub: Socket, subscriptions: int) -> None:
    for _ in range(subscriptions):
        assert xpub.poll(5000)
        assert xpub.recv()[:1] == b"\x01"


def test_topic_with_an_id_is_compared_whole() -> None:
    assert matches(b"ack.w-1/", [b"ack.w-1/"])
    assert not matches(b"ack.w-1/x", [b"ack.w-1/"])
    assert not matches(b"pressure2", [topics.PRESSURE])
    assert matches(b"telemetry.host.a", [topics.STEP, topics.TELEMETRY])
    assert matches(b"anything", [b""])
    assert not matches(b"anything", [])


async def test_subscriber_gets_its_topics_and_no_namesakes(xpub: Socket, address: str) -> None:
    async with Subscriber(address, [topics.ack("w-1"), topics.STEP]) as subscriber:
        _wait_for(xpub, 2)
        for topic in (b"ack.w-1/x", b"ack.w-10/", b"step2", b"ack.w-1/", b"pressure", b"step"):
            xpub.send_multipart([topic, b"payload"])
        xpub.send_multipart([b"step", b"too", b"many"])
        xpub.send_multipart([b"step", b"last"])
        async with asyncio.timeout(30):
            got = [await anext(subscriber) for _ in range(3)]
    assert got == [(b"ack.w-1/", b"payload"), (b"step", b"payload"), (b"step", b"last")]


async def test_try_next_never_waits(xpub: Socket, address: str) -> None:
    async with Subscriber(address, [b""]) as subscriber:
        assert subscriber.try_next() is None
        _wait_for(xpub, 1)
        xpub.send_multipart([b"not", b"an", b"event"])
        xpub.send_multipart([b"a", b"1"])
        async with asyncio.timeout(30):
            assert await anext(subscriber) == (b"a", b"1")
        assert subscriber.try_next() is None
    assert subscriber.try_next() is None


async def test_cancelled_wait_takes_nothing(xpub: Socket, address: str) -> None:
    got: list[bytes] = []
    async with Subscriber(address, [b""]) as subscriber:
        _wait_for(xpub, 1)
        for number in range(300):
            xpub.send_multipart([b"t", b"%d" % number])
        async with asyncio.timeout(30):
            while len(got) < 300:
                try:
                    async with asyncio.timeout(0.0001):
                        async for _, payload in subscriber:
                            got.append(payload)
                except TimeoutError:
                    await asyncio.sleep(0)
    assert got == [b"%d" % number for number in range(300)]


async def test_close_ends_the_iteration(address: str) -> None:
    subscriber = Subscriber(address, [b""])
    async with subscriber:
        waiting = asyncio.create_task(anext(subscriber, None))
        await asyncio.sleep(0)
        subscriber.close()
        assert await waiting is None
    assert [event async for event in subscriber] == []


def test_blocking_subscriber_polls_with_a_deadline(xpub: Socket, address: str) -> None:
    with BlockingSubscriber(address, [topics.PRESSURE]) as subscriber:
        _wait_for(xpub, 1)
        assert subscriber.poll(0.01) is None
        xpub.send_multipart([b"pressure2", b"x"])
        xpub.send_multipart([b"pressure", b"y"])
        assert subscriber.poll(5) == (b"pressure", b"y")
        assert subscriber.poll(0) is None
    with pytest.raises(ClosedError):
        subscriber.poll(0)


def test_publisher_reaches_the_broker_and_never_blocks(context: Context, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/publish"
    with Publisher(address) as publisher:
        for _ in range(3000):  # nobody there: all dropped
            publisher.publish(b"telemetry.scale.a", DECISION)
        with sockets.publish_xsub(context, 1 << 16) as xsub:
            xsub.bind(address)
            xsub.send(b"\x01telemetry.")
            while not xsub.poll(5):
                publisher.publish(b"telemetry.scale.a", DECISION)
                publisher.publish(b"step", DECISION)
            topic, payload = xsub.recv_multipart(zmq.NOBLOCK)
    assert topic == b"telemetry.scale.a"
    assert codec.decode_event(payload) == DECISION
    with pytest.raises(ClosedError):
        publisher.publish(b"step", DECISION)
