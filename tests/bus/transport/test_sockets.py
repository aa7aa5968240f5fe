"""Sockets: the promises of the factories; a Channel loses neither messages nor wake-ups."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.sockets import Channel, Context, Scope, Socket
from rolloutmq.schemas.errors import ClosedError, ConfigError

LIMIT_S = 60.0


class _KeptContext(zmq.Context[Socket]):
    """Holds its sockets, so that none is collected, and thereby closed with a warning, in the middle of a test."""

    def socket(self, *args: Any, **kwargs: Any) -> Socket:
        socket = super().socket(*args, **kwargs)
        self.__dict__.setdefault("kept", []).append(socket)
        return socket


@pytest.fixture
def context() -> Iterator[Context]:
    context = _KeptContext(2)
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def _pull(context: Context, address: str, max_frame_bytes: int = 1 << 20) -> Socket:
    socket = sockets.ingest_pull(context, max_frame_bytes)
    socket.bind(address)
    return socket


def _option(socket: Socket, option: int) -> int:
    return int(socket.getsockopt(option))


def test_no_socket_waits_for_ever_or_queues_without_bound(context: Context, address: str) -> None:
    made = [
        sockets.ingest_pull(context, 1 << 20),
        sockets.serve_router(context, 1 << 20),
        sockets.events_xpub(context),
        sockets.publish_xsub(context, 1 << 20),
        sockets.producer_push(context, address),
        sockets.client_dealer(context, address),
        sockets.subscriber(context, address, [b"x"]),
        sockets.publisher(context, address),
    ]
    for socket in made:
        assert 0 <= _option(socket, zmq.LINGER) <= 1000
        assert 0 < _option(socket, zmq.SNDHWM) <= 1000
        assert 0 < _option(socket, zmq.RCVHWM) <= 1000
        assert _option(socket, zmq.RECONNECT_IVL_MAX) > _option(socket, zmq.RECONNECT_IVL) > 0
        assert 0 < _option(socket, zmq.HANDSHAKE_IVL) <= 10_000
    assert all(_option(socket, zmq.MAXMSGSIZE) > 0 for socket in made[:4])


def test_producer_blocks_when_nobody_reads(context: Context, address: str) -> None:
    _pull(context, address)
    push = sockets.producer_push(context, address)
    assert push.poll(5000, zmq.POLLOUT)
    sent = 0
    while sent < 5000 and push.poll(200, zmq.POLLOUT):
        push.send(bytes(1 << 16), zmq.NOBLOCK)
        sent += 1
    assert 2 * sockets.BULK_HWM <= sent < 1000


def test_producer_queues_nothing_for_a_broker_that_is_not_there(context: Context, address: str) -> None:
    push = sockets.producer_push(context, address)
    with pytest.raises(zmq.Again):
        push.send(b"x", zmq.NOBLOCK)


def test_frame_above_the_limit_never_arrives(context: Context, address: str) -> None:
    pull = _pull(context, address, max_frame_bytes=1000)
    for size in (1001, 1000):
        push = sockets.producer_push(context, address)
        assert push.poll(5000, zmq.POLLOUT)
        push.send(bytes(size))
    assert pull.poll(5000)
    assert len(pull.recv()) == 1000
    assert not pull.poll(50)


def test_reply_to_a_peer_that_left_is_an_error(context: Context, address: str) -> None:
    router = sockets.serve_router(context, 1 << 20)
    router.bind(address)
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody", b"", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_second_subscription_of_a_topic_is_reported_too(context: Context, address: str) -> None:
    xpub = sockets.events_xpub(context)
    xpub.bind(address)
    for _ in range(2):
        sockets.subscriber(context, address, [b"pressure"])
        assert xpub.poll(5000)
        assert xpub.recv() == b"\x01pressure"


def test_wrong_address_is_said_by_name(context: Context) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        sockets.client_dealer(context, "nowhere")


def test_scope_ends_its_own_context_and_no_other(context: Context) -> None:
    lent, own = Scope(context), Scope(None)
    lent.end()
    own.end()
    own.end()
    assert not context.closed
    assert own.context.closed


def test_scope_ends_if_the_socket_cannot_be_made() -> None:
    scope = Scope(None)
    with pytest.raises(ConfigError):
        scope.connect(sockets.client_dealer, "nowhere")
    assert scope.context.closed


async def test_cancelled_receives_lose_nothing(context: Context, address: str) -> None:
    pull = Channel(_pull(context, address))
    push = Channel(sockets.producer_push(context, address))
    total = 3000

    async def send() -> None:
        for number in range(total):
            await push.send([b"%d" % number])
            if number % 7 == 0:
                await asyncio.sleep(0)

    async def receive() -> list[int]:
        got: list[int] = []
        while len(got) < total:
            try:
                async with asyncio.timeout(0.0002):
                    frames = await pull.receive()
            except TimeoutError:
                continue
            got.append(int(frames[0]))
        return got

    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(send())
            received = group.create_task(receive())
        assert received.result() == list(range(total))
    finally:
        pull.close()
        push.close()


def test_both_directions_at_once_never_hang(tmp_path: Path) -> None:
    """A send takes the edge of a message that came in meanwhile: ping-pong with many in flight would stall."""

    async def talk() -> int:
        context = sockets.make_context()
        router = sockets.serve_router(context, 1 << 20)
        router.bind(f"ipc://{tmp_path}/s")
        server, client = (
            Channel(router),
            Channel(sockets.client_dealer(context, f"ipc://{tmp_path}/s")),
        )
        answered = 0

        async def serve() -> None:
            while True:
                await server.send(await server.receive())

        async def ask() -> None:
            for _ in range(2000):
                await client.send([b"", b"x"])

        async def collect() -> None:
            nonlocal answered
            while answered < 6000:
                await client.receive()
                answered += 1

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            serving = group.create_task(serve())
            for _ in range(3):
                group.create_task(ask())
            await group.create_task(collect())
            serving.cancel()
        server.close()
        client.close()
        context.term()
        return answered

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(talk()) == 6000


async def test_every_message_is_handed_over_however_many_come_at_once(context: Context, address: str) -> None:
    """One in each turn of the loop; sends of the same socket take the edge of messages that come in meanwhile."""
    router = sockets.serve_router(context, 1 << 20)
    router.bind(address)
    server, client = Channel(router), Channel(sockets.client_dealer(context, address))
    numbers: list[int] = []
    total, all_there = 320, asyncio.Event()

    def take(frames: list[zmq.Frame]) -> None:
        numbers.append(int(frames[0].bytes))
        if len(numbers) == total:
            all_there.set()

    try:
        async with asyncio.timeout(LIMIT_S):
            client.on_message(take)
            await client.send([b"hello"])
            way, _ = await server.receive()
            for number in range(total):
                await server.send([way, b"%d" % number])
                assert client.try_send([b"more"])
            await all_there.wait()
        assert numbers == list(range(total))
    finally:
        server.close()
        client.close()


async def test_what_takes_a_message_may_close_the_channel(context: Context, address: str) -> None:
    push = sockets.producer_push(context, address)
    pull = Channel(_pull(context, address))
    taken = asyncio.Event()

    def take(_: list[zmq.Frame]) -> None:
        pull.close()
        taken.set()

    pull.on_message(take)
    try:
        async with asyncio.timeout(LIMIT_S):
            sender = Channel(push)
            await sender.send([b"1"])
            sender.try_send([b"2"])
            await taken.wait()
        with pytest.raises(ClosedError):
            pull.try_receive()
    finally:
        sender.close()
        pull.close()


class _Counted(Channel):
    """Counts the turns of the loop that its socket takes."""

    turns = 0

    def _on_readable(self) -> None:
        self.turns += 1
        super()._on_readable()


async def _turns(channel: _Counted) -> int:
    """Return how many of many turns of the loop a channel takes once it is quiet."""
    for _ in range(200):
        await asyncio.sleep(0.001)
    before = channel.turns
    for _ in range(1000):
        await asyncio.sleep(0)
    return channel.turns - before


async def test_a_channel_for_which_nobody_waits_leaves_the_loop_alone(context: Context, address: str) -> None:
    pull = Channel(_pull(context, address))
    push = _Counted(sockets.producer_push(context, address))
    try:
        async with asyncio.timeout(LIMIT_S):
            assert await _turns(push) < 10  # connected, and nothing was sent
            await push.send([b"1"])
            assert await pull.receive() == [b"1"]
            assert await _turns(push) < 10
            pull.close()
            assert await _turns(push) < 10  # nobody is there
    finally:
        push.close()
        pull.close()


async def test_close_ends_whoever_waits(context: Context, address: str) -> None:
    channel = Channel(_pull(context, address))
    waiting = asyncio.create_task(channel.receive())
    await asyncio.sleep(0)
    channel.close()
    channel.close()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        channel.try_send([b"x"])


def test_the_shared_context_ends_with_the_last_who_uses_it() -> None:
    shared = sockets.Shared()
    first, second = shared.borrow(), shared.borrow()
    assert first is second
    shared.give_back(first)
    second.socket(zmq.PAIR).close()
    shared.give_back(second)
    with pytest.raises(zmq.ZMQError):
        first.socket(zmq.PAIR)
    again = shared.borrow()
    assert again is not first
    shared.give_back(first)
    again.socket(zmq.PAIR).close()
    shared.give_back(again)


def test_the_shared_context_has_room_for_the_sockets_of_a_thousand_producers() -> None:
    shared = sockets.Shared()
    context = shared.borrow()
    made = [context.socket(zmq.PAIR) for _ in range(1100)]
    for socket in made:
        socket.close()
    shared.give_back(context)


def test_another_process_makes_a_context_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a fork: the context of the parent has no threads in the child, and may not be ended there."""
    shared = sockets.Shared()
    inherited = shared.borrow()
    monkeypatch.setattr("os.getpid", lambda: 1 << 30)
    shared.give_back(inherited)
    own = shared.borrow()
    assert own is not inherited
    shared.give_back(own)
    assert own.closed
    assert not inherited.closed
    inherited.term()


def _sent_until_full(router: Socket, route: bytes) -> int:
    """Send replies of 256 KiB until there is no room; return how many found some."""
    for sent in range(sockets.CONTROL_HWM):
        try:
            router.send_multipart([route, bytes(1 << 18)], zmq.NOBLOCK)
        except zmq.Again:
            return sent
    return sockets.CONTROL_HWM


def test_few_replies_wait_for_a_client_of_another_host(context: Context) -> None:
    """One that reads nothing would else hold a thousand of them, and each may be a batch."""
    router = sockets.serve_router(context, 1 << 20)
    address = sockets.bind_remote(router, ["tcp://127.0.0.1:*"], "")
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(address)
    deaf.send(b"x")
    assert router.poll(int(LIMIT_S * 1e3))
    waiting = _sent_until_full(router, router.recv_multipart()[0])
    assert waiting <= sockets.REPLIES_HWM + 64, "the rest is in buffers of the system"
