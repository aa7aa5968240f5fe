"""Requests: one reply each, repetition, time limits, and refusals as exceptions."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import zmq

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.request_client import BlockingClient, BrokerClient, granted
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ClosedError,
    LeaseLostError,
    MalformedError,
    RefusedError,
    SessionFencedError,
)
from rolloutmq.schemas.wire.control import WorkerBeat, WorkerBeatReply, WorkerState
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.replies import ErrorReply, NoBatch, Ok, Reply, Wait
from rolloutmq.schemas.wire.requests import ConsumerBeat, GetInfo, Request, Settle, Sync

LIMIT_S = 60.0
Answer = Callable[[Request], list[bytes] | None]
"""Frames behind the empty one, or None for silence."""


def _ok(_: Request) -> list[bytes]:
    return [codec.encode(Ok())]


def _echo_progress(request: Request) -> list[bytes]:
    assert isinstance(request, ConsumerBeat)
    return [codec.encode(NoBatch(wait=Wait.NO_BATCH, queued_sequences=request.progress))]


@contextmanager
def broker(address: str, answer: Answer) -> Iterator[list[Request]]:
    """Run a ROUTER in a thread with scripted answers; yield its requests in order."""
    context = sockets.make_context()
    router = sockets.serve_router(context, 1 << 20)
    router.bind(address)
    ended = threading.Event()
    seen: list[Request] = []

    def serve() -> None:
        while not ended.is_set():
            if not router.poll(20):
                continue
            *route, empty, frame = router.recv_multipart()
            request = codec.decode_request(frame)
            seen.append(request)
            frames = answer(request)
            if frames is not None:
                router.send_multipart([*route, empty, *frames])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
        router.close(0)
        context.term()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/serve"


async def test_many_requests_at_once_get_each_its_own_answer(address: str) -> None:
    with broker(address, _echo_progress):
        async with BrokerClient(address) as client:
            beats = [ConsumerBeat(consumer="c", progress=number) for number in range(200)]
            replies = await asyncio.gather(*(client.request(beat) for beat in beats))
    assert [r.queued_sequences for r in replies if isinstance(r, NoBatch)] == list(range(200))


async def test_payload_frames_follow_the_reply(address: str) -> None:
    with broker(address, lambda _: [codec.encode(Ok()), b"", bytes(200_000), b"abc"]):
        async with BrokerClient(address) as client:
            reply, frames = await client.request_frames(GetInfo())
    assert reply == Ok()
    assert [frame.nbytes for frame in frames] == [0, 200_000, 3]
    assert bytes(frames[2]) == b"abc"


async def test_unanswered_request_is_sent_again(address: str) -> None:
    count = iter(range(10))
    with broker(address, lambda r: None if next(count) < 2 else _ok(r)) as seen:
        async with BrokerClient(address) as client:
            assert await client.request(GetInfo(), resend_s=0.05) == Ok()
    assert len(seen) == 3


async def test_the_pauses_between_repetitions_double(address: str) -> None:
    """A fleet that repeats at a fixed pace keeps an overloaded broker overloaded."""
    with broker(address, lambda _: None) as seen:
        async with BrokerClient(address) as client:
            with pytest.raises(BrokerUnavailableError):
                await client.request(GetInfo(), 1.0, 0.1)
    assert 2 <= len(seen) <= 4


async def test_patience_is_twice_the_last_wait(address: str) -> None:
    answers = iter([None, None, [codec.encode(Ok())], [codec.encode(Ok())]])
    with broker(address, lambda _: next(answers)):
        async with BrokerClient(address) as client:
            assert client.patience_s == 0.0
            with pytest.raises(BrokerUnavailableError):
                await client.request(GetInfo(), 0.2, 1.0)
            assert client.patience_s == pytest.approx(0.4)
            began = time.monotonic()
            await client.request(GetInfo(), LIMIT_S, 0.2)  # answered once it is repeated
            assert 0.0 < client.patience_s <= 2 * (time.monotonic() - began - 0.2)
            await client.request(GetInfo(), LIMIT_S, LIMIT_S)
            assert client.patience_s == 0.0


async def test_each_of_several_requests_is_repeated_after_its_own_pause(address: str) -> None:
    def answer(request: Request) -> list[bytes] | None:
        return _echo_progress(request) if [r for r in seen if r == request][2:] else None

    with broker(address, answer) as seen:
        async with BrokerClient(address) as client:
            beats = [ConsumerBeat(consumer="c", progress=number) for number in range(4)]
            pauses = 60.0, 0.2, 0.05, 0.1
            asked = [
                asyncio.create_task(client.request(beat, 60.0, pause_s))
                for beat, pause_s in zip(beats, pauses, strict=True)
            ]
            replies = await asyncio.gather(*asked[1:])
            asked[0].cancel()
            await asyncio.wait(asked[:1])
    assert [r.queued_sequences for r in replies if isinstance(r, NoBatch)] == [1, 2, 3]
    assert seen.count(beats[0]) == 1


async def test_broker_that_comes_late_answers(address: str) -> None:
    async with BrokerClient(address) as client:
        asked = asyncio.create_task(client.request(GetInfo()))
        await asyncio.sleep(0)
        with broker(address, _ok):
            assert await asked == Ok()


async def test_broker_that_comes_back_answers(address: str) -> None:
    async with BrokerClient(address) as client:
        with broker(address, _ok):
            await client.request(GetInfo())
        asked = asyncio.create_task(client.request(GetInfo(), resend_s=0.1))
        await asyncio.sleep(0)
        with broker(address, _ok):
            assert await asked == Ok()


@pytest.mark.parametrize("present", [False, True])
async def test_silence_ends_at_the_deadline(address: str, present: bool) -> None:
    started = time.monotonic()
    with broker(address, lambda _: None) if present else nullcontext():
        async with BrokerClient(address) as client:
            with pytest.raises(BrokerUnavailableError) as caught:
                await client.request(GetInfo(), timeout_s=0.3)
    assert caught.value.address == address
    assert 0.3 <= time.monotonic() - started < 30.0


async def test_cancelled_request_leaves_the_others_alone(address: str) -> None:
    held = threading.Event()

    def answer(request: Request) -> list[bytes] | None:
        assert isinstance(request, ConsumerBeat)
        if request.progress == 1:
            held.set()
            return None
        return _echo_progress(request)

    with broker(address, answer):
        async with BrokerClient(address) as client:
            silent = asyncio.create_task(client.request(ConsumerBeat(consumer="c", progress=1)))
            while not held.is_set():
                await client.request(ConsumerBeat(consumer="c", progress=0))
            silent.cancel()
            with pytest.raises(asyncio.CancelledError):
                await silent
            reply = await client.request(ConsumerBeat(consumer="c", progress=2))
    assert reply == NoBatch(wait=Wait.NO_BATCH, queued_sequences=2)


async def test_close_ends_requests_that_wait(address: str) -> None:
    loop, seen = asyncio.get_running_loop(), asyncio.Event()

    def answer(_: Request) -> None:
        loop.call_soon_threadsafe(seen.set)

    with broker(address, answer):
        client = BrokerClient(address)
        async with client:
            asked = asyncio.create_task(client.request(GetInfo()))
            await seen.wait()
            await client.close()
            with pytest.raises(ClosedError):
                await asked
            with pytest.raises(ClosedError):
                await client.request(GetInfo())


async def test_close_while_no_broker_is_there(address: str) -> None:
    async with BrokerClient(address) as client:
        asked = asyncio.create_task(client.request(GetInfo()))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ClosedError):
            await asked


async def test_clients_may_share_a_context(address: str) -> None:
    context = sockets.make_context()
    with broker(address, _ok):
        async with BrokerClient(address, context) as one, BrokerClient(address, context) as two:
            assert await one.request(GetInfo()) == await two.request(GetInfo()) == Ok()
        assert not context.closed
    context.term()


async def test_bytes_that_are_no_reply_are_an_error(address: str) -> None:
    with broker(address, lambda _: [b"\xc1"]):
        async with BrokerClient(address) as client:
            with pytest.raises(MalformedError):
                await client.request(GetInfo())


def test_blocking_client_asks_again_and_gets_its_answer(address: str) -> None:
    count = iter(range(10))
    with (
        broker(address, lambda r: None if next(count) == 0 else _ok(r)) as seen,
        BlockingClient(address) as client,
    ):
        assert client.request(GetInfo(), resend_s=0.05) == Ok()
        assert client.request_frames(GetInfo()) == (Ok(), [])
    assert len(seen) == 3


def test_blocking_client_drops_a_late_answer_to_an_older_request(address: str) -> None:
    def answer(request: Request) -> list[bytes]:
        assert isinstance(request, ConsumerBeat)
        if request.progress == 1:
            time.sleep(0.15)  # the answer itself is late: that is the case
        return _echo_progress(request)

    with broker(address, answer), BlockingClient(address) as client:
        with pytest.raises(BrokerUnavailableError):
            client.request(ConsumerBeat(consumer="c", progress=1), timeout_s=0.05)
        reply = client.request(ConsumerBeat(consumer="c", progress=2))
    assert reply == NoBatch(wait=Wait.NO_BATCH, queued_sequences=2)


def test_blocking_client_gives_up_in_time(address: str) -> None:
    started = time.monotonic()
    with BlockingClient(address) as client, pytest.raises(BrokerUnavailableError):
        client.request(GetInfo(), timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started < 30.0
    with pytest.raises(ClosedError):
        client.request(GetInfo())


def test_req_with_correlation_speaks_the_same_protocol(address: str) -> None:
    context = sockets.make_context()
    with broker(address, _ok), context.socket(zmq.REQ) as req:
        req.setsockopt(zmq.REQ_RELAXED, 1)
        req.setsockopt(zmq.REQ_CORRELATE, 1)
        req.setsockopt(zmq.LINGER, 0)
        req.connect(address)
        for _ in range(2):
            req.send(codec.encode(GetInfo()))
            assert req.poll(5000)
        assert codec.decode_reply(req.recv()) == Ok()
    context.term()


def test_refusals_become_the_exceptions_of_their_code() -> None:
    def refused(code: ErrorCode, request: Request) -> Reply:
        return granted(ErrorReply(code=code, detail="why"), request)

    settle = Settle(consumer="c", lease=7, generation=1, version=PolicyVersion())
    with pytest.raises(SessionFencedError) as fenced:
        refused(ErrorCode.FENCED, Sync(producer="p", session=3))
    assert (fenced.value.producer, fenced.value.session) == ("p", 3)
    with pytest.raises(LeaseLostError) as lost:
        refused(ErrorCode.LEASE_LOST, settle)
    assert (lost.value.lease, lost.value.why) == (7, "why")
    for code in set(ErrorCode) - {ErrorCode.FENCED, ErrorCode.LEASE_LOST}:
        with pytest.raises(RefusedError) as caught:
            refused(code, GetInfo())
        assert (caught.value.code, caught.value.detail) == (code, "why")
    reply = WorkerBeatReply(draining=True)
    assert granted(reply, WorkerBeat(worker="w", env="e", state=WorkerState.READY)) is reply
