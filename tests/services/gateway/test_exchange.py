import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from rolloutmq.schemas.gateway import GatewayConfig
from rolloutmq.services.gateway.exchange import (
    COMPRESS_BYTES,
    Answer,
    Message,
    Out,
    Request,
    TooLargeError,
    body_of,
    inflated,
    watch,
)

CONFIG = GatewayConfig(max_body_bytes=1000, max_inflated_bytes=100_000, cors_origins=("http://a",))


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def request(**headers: bytes) -> Request:
    named = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return Request("POST", "/", {}, named)


async def read(parts: list[bytes], one: Request, pool: Executor) -> bytes:
    messages = [
        {"type": "http.request", "body": part, "more_body": number + 1 < len(parts)}
        for number, part in enumerate(parts)
    ]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return await body_of(one, receive, CONFIG, pool)


class Sent:
    """What came out."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])


async def test_a_body_is_put_together_and_inflated(pool: Executor) -> None:
    assert await read([b"ab", b"", b"c"], request(), pool) == b"abc"
    pressed = gzip.compress(b"x" * 5000)
    assert await read([pressed[:9], pressed[9:]], request(content_encoding=b"GZIP"), pool) == b"x" * 5000
    assert await read([b""], request(content_encoding=b"gzip"), pool) == b""


async def test_bodies_beyond_a_bound_are_refused_before_they_are_read(pool: Executor) -> None:
    with pytest.raises(TooLargeError, match="1000 bytes"):
        await read([b""], request(content_length=b"1001"), pool)
    with pytest.raises(TooLargeError, match="1000 bytes"):
        await read([b"x" * 600, b"x" * 600], request(), pool)
    with pytest.raises(TooLargeError, match="inflate"):
        await read([gzip.compress(bytes(10_000_000))[:900]], request(content_encoding=b"gzip"), pool)


async def test_a_client_that_goes_while_it_sends_is_gone(pool: Executor) -> None:
    one = request()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    assert await body_of(one, receive, CONFIG, pool) == b""
    assert one.gone.is_set()
    gone = asyncio.Event()
    await watch(receive, gone)
    assert gone.is_set()


def test_inflating_stops_at_the_bound_and_takes_several_members() -> None:
    assert inflated(gzip.compress(b"ab") + gzip.compress(b"c") + b"\0\0", 3) == b"abc"
    with pytest.raises(TooLargeError):
        inflated(gzip.compress(bytes(101)), 100)
    assert len(inflated(gzip.compress(bytes(100)), 100)) == 100


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_what_cannot_be_inflated_is_said(cut: int) -> None:
    whole = gzip.compress(b"something that is long enough")
    broken = whole[: len(whole) - cut] if cut else b"no gzip at all"
    with pytest.raises(zlib.error):
        inflated(broken, 1000)


@pytest.mark.parametrize("size", [COMPRESS_BYTES - 1, COMPRESS_BYTES, 100_000])
async def test_answers_are_compressed_if_the_client_takes_that(size: int, pool: Executor) -> None:
    for takes in (b"", b"gzip, deflate"):
        sent = Sent()
        await Out(sent.send, request(accept_encoding=takes), CONFIG, pool).answer(Answer(b"x" * size))
        is_pressed = bool(takes) and size >= COMPRESS_BYTES
        assert (sent.headers.get(b"content-encoding") == b"gzip") == is_pressed
        body = gzip.decompress(sent.body) if is_pressed else sent.body
        assert body == b"x" * size
        assert int(sent.headers[b"content-length"]) == len(sent.body)


async def parts(gone: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for number in range(3):
        yield bytes([65 + number]) * 50_000
        if gone is not None:
            gone.set()


@pytest.mark.parametrize("takes", [b"", b"gzip"])
async def test_a_stream_is_whole_only_with_its_end(takes: bytes, pool: Executor) -> None:
    sent = Sent()
    out = Out(sent.send, request(accept_encoding=takes), CONFIG, pool)
    await out.stream(parts())
    assert all(message["more_body"] for message in sent.messages[1:])
    await out.end()
    assert not sent.messages[-1].get("more_body")
    body = gzip.decompress(sent.body) if takes else sent.body
    assert body == b"A" * 50_000 + b"B" * 50_000 + b"C" * 50_000


async def test_a_stream_stops_when_its_client_goes(pool: Executor) -> None:
    sent, one = Sent(), request()
    await Out(sent.send, one, CONFIG, pool).stream(parts(one.gone))
    assert len(sent.body) == 50_000


@pytest.mark.parametrize(("origin", "allowed"), [(b"http://a", True), (b"http://b", False), (b"", False)])
async def test_other_origins_get_no_leave(origin: bytes, allowed: Any, pool: Executor) -> None:
    sent = Sent()
    await Out(sent.send, request(origin=origin), CONFIG, pool).answer(Answer(b"{}"))
    assert (b"access-control-allow-origin" in sent.headers) == allowed
