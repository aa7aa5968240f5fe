"""Heartbeats: both sides of `events` and `publish` notice a way that forwards nothing and ends nothing."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import zmq

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.pubsub import BlockingSubscriber, Publisher
from rolloutmq.bus.transport.sockets import Context, Socket
from rolloutmq.schemas.wire.control import ScaleDecision

DECISION = ScaleDecision(
    env="sort3", at=1.0, rollout_pressure=0.5, current=1, target=2, reason="below low_pressure"
)
TRIES = 600
"""Looks of 0.1 s each until a test gives up."""


class Way:
    """Forwards TCP connections to a port; `half_open` forgets the present ones without ending them."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._events, self._order = socket.socketpair()
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._order.close()
        self._thread.join()

    def half_open(self) -> None:
        self._order.send(b"h")
        assert self._order.recv(1) == b"d"

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready, contextlib.ExitStack() as stack:
            stack.enter_context(self._listener)
            stack.enter_context(self._events)
            stack.callback(self._close)
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._events, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self._listener:
                        self._accept(ready)
                    elif key.fileobj is self._events:
                        if not self._events.recv(1):
                            return
                        self._forget(ready)
                    else:
                        self._forward(ready, key)

    def _close(self) -> None:
        for one in self._kept:
            one.close()

    def _accept(self, ready: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._kept += [near, far]
        ready.register(near, selectors.EVENT_READ, far)
        ready.register(far, selectors.EVENT_READ, near)

    def _forget(self, ready: selectors.BaseSelector) -> None:
        for key in list(ready.get_map().values()):
            if key.data is not None:
                ready.unregister(key.fileobj)
        self._events.send(b"d")

    @staticmethod
    def _forward(ready: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        source = key.fileobj
        assert isinstance(source, socket.socket)
        try:
            data = source.recv(1 << 16)
            key.data.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (source, key.data):
                with contextlib.suppress(KeyError, ValueError):
                    ready.unregister(one)
                one.close()


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "SILENCE_MS", 500)
    context = sockets.make_context(2)
    yield context
    context.term()


def _port(bound: Socket) -> int:
    return int(sockets.bind_remote(bound, ["tcp://127.0.0.1:*"], "").rpartition(":")[2])


def test_a_subscriber_on_a_half_open_way_subscribes_again(context: Context) -> None:
    with (
        sockets.events_xpub(context) as xpub,
        Way(_port(xpub)) as way,
        contextlib.closing(BlockingSubscriber(way.address, [topics.STEP])) as subscriber,
    ):
        assert xpub.poll(5000)
        assert xpub.recv() == b"\x01step"
        xpub.send_multipart([topics.STEP, b"before"])
        assert subscriber.poll(5) == (topics.STEP, b"before")
        way.half_open()
        subscribed = 0
        for _ in range(TRIES):  # the broker repeats its state to each subscription
            subscribed += bool(xpub.poll(0)) and xpub.recv() == b"\x01step"
            if subscribed:
                xpub.send_multipart([topics.STEP, b"after"])
            if subscriber.poll(0.1) == (topics.STEP, b"after"):
                return
        pytest.fail("the subscriber still waits")


def _heard(publisher: Publisher, xsub: Socket, topic: bytes) -> bool:
    """Publish until an event of a topic arrives."""
    for _ in range(TRIES):
        publisher.publish(topic, DECISION)
        while xsub.poll(100):
            if xsub.recv_multipart() == [topic, codec.encode(DECISION)]:
                return True
    return False


def test_a_publisher_on_a_half_open_way_is_heard_again(context: Context) -> None:
    with (
        sockets.publish_xsub(context, 1 << 20) as xsub,
        Way(_port(xsub)) as way,
        Publisher(way.address) as publisher,
    ):
        xsub.send(b"\x01")
        assert _heard(publisher, xsub, topics.STEP)
        way.half_open()
        assert _heard(publisher, xsub, topics.POLICY)


def test_the_broker_drops_a_subscriber_behind_a_half_open_way(context: Context) -> None:
    """A client of another make that sends no heartbeats does not come back: the broker forgets its topics."""
    with (
        sockets.events_xpub(context) as xpub,
        Way(_port(xpub)) as way,
        context.socket(zmq.SUB) as silent,
    ):
        silent.setsockopt(zmq.SUBSCRIBE, b"step")
        silent.connect(way.address)
        assert xpub.poll(5000)
        assert xpub.recv() == b"\x01step"
        way.half_open()
        assert xpub.poll(TRIES * 100)
        assert xpub.recv() == b"\x00step"


def test_only_events_by_tcp_have_heartbeats(context: Context, tmp_path: Path) -> None:
    """On `ingest` a heartbeat would wait behind the groups of a producer that the broker makes wait, and end it."""
    here, there = f"ipc://{tmp_path}/s", "tcp://127.0.0.1:9"
    made = {
        "local": [sockets.subscriber(context, here, [b"x"]), sockets.publisher(context, here)],
        "asked": [sockets.client_dealer(context, there), sockets.producer_push(context, there)],
        "heard": [sockets.subscriber(context, there, [b"x"]), sockets.publisher(context, there)],
    }
    bound = [sockets.events_xpub(context), sockets.publish_xsub(context, 1 << 20)]
    groups = sockets.ingest_pull(context, 1 << 20)
    for number, one in enumerate((*bound, groups)):
        sockets.bind_local(one, f"ipc://{tmp_path}/{number}")
        assert not one.getsockopt(zmq.HEARTBEAT_IVL)
        _port(one)
    assert all(one.getsockopt(zmq.HEARTBEAT_IVL) == 100 for one in (*made["heard"], *bound))
    for one in (*made["local"], *made["asked"], groups):
        assert one.getsockopt(zmq.HEARTBEAT_IVL) in {0, -1}
    for one in (*made["local"], *made["asked"], *made["heard"], *bound, groups):
        one.close(0)
