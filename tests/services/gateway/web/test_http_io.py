import asyncio
import gzip
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.services.gateway.web import http_io
from rolloutmq.services.gateway.web.http_io import (
    AHEAD_PARTS,
    COMPRESS_BYTES,
    LONG_BYTES,
    LONG_CHECKSUM_BYTES,
    MEMBERS_LIMIT,
    SENT_BYTES,
    SMALL_BYTES,
    Answer,
    Message,
    Out,
    Part,
    Pool,
    Request,
    TooLargeError,
    in_turn,
    inflated,
    off,
    watch,
)

CONFIG = GatewayConfig(max_body_bytes=1000, max_inflated_bytes=100_000, cors_origins=("http://a",))


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(1) as made:
        yield made


def request(**headers: bytes) -> Request:
    named = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return Request("POST", "/", {}, named)


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


async def test_who_waits_hears_that_the_client_is_gone() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

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
async def test_answers_are_compressed_if_the_client_takes_that(size: int, pool: Pool) -> None:
    for takes in (b"", b"gzip, deflate"):
        sent = Sent()
        await Out(sent.send, request(accept_encoding=takes), CONFIG, pool).answer(Answer(b"x" * size))
        is_pressed = bool(takes) and size >= COMPRESS_BYTES
        assert (sent.headers.get(b"content-encoding") == b"gzip") == is_pressed
        body = gzip.decompress(sent.body) if is_pressed else sent.body
        assert body == b"x" * size
        assert int(sent.headers[b"content-length"]) == len(sent.body)


@pytest.mark.parametrize(("size", "at_once"), [(LONG_BYTES - 1, 2), (LONG_BYTES, 1)])
def test_what_takes_long_is_done_one_at_a_time(size: int, at_once: int) -> None:
    meeting = threading.Barrier(2)

    def met() -> bool:
        try:
            meeting.wait(timeout=0.2 if at_once == 1 else 10.0)
        except threading.BrokenBarrierError:
            return False
        return True

    with Pool(2) as pool:
        both = [pool.submit(in_turn, size, met) for _ in range(2)]
    assert [one.result() for one in both] == [at_once == 2] * 2


async def test_what_takes_a_little_is_done_in_turn(pool: Pool) -> None:
    """Who has less to do waits for one piece of work, not for all that came at once."""
    order: list[int] = []
    heavy = [
        asyncio.create_task(off(pool, SMALL_BYTES, partial(order.append, number), LONG_BYTES))
        for number in range(5)
    ]
    await asyncio.sleep(0)
    await off(pool, SMALL_BYTES - 1, partial(order.append, 99), LONG_BYTES)
    await asyncio.gather(*heavy)
    assert order == [0, 99, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, b"x" * 50, 50),
        ({"content_encoding": b"GZIP"}, gzip.compress(b"x" * 5000, mtime=0), 5000),
        ({"content_encoding": b"gzip"}, b"", 0),
        ({"content_encoding": b"gzip"}, b"none", 4),
    ],
)
def test_a_body_says_how_large_it_probably_is(headers: dict[str, bytes], body: bytes, expected: int) -> None:
    one = request(**headers)
    one.body = body
    assert one.probable_bytes == expected


def test_members_without_end_are_refused() -> None:
    with pytest.raises(TooLargeError, match="members"):
        inflated(gzip.compress(b"") * (MEMBERS_LIMIT + 1), 1000)


@given(
    st.lists(
        st.tuples(st.binary(max_size=300), st.integers(1, 2000), st.integers(0, 3)), min_size=1, max_size=5
    )
)
def test_members_come_out_as_they_went_in(members: list[tuple[bytes, int, int]]) -> None:
    plain = [data * times for data, times, _ in members]
    packed = b"".join(
        gzip.compress(data) + b"\0" * zeros for data, (_, _, zeros) in zip(plain, members, strict=True)
    )
    assert inflated(packed, sum(map(len, plain))) == b"".join(plain)


def parts(size: int = 50_000, count: int = 3) -> Iterator[Part]:
    for number in range(count):
        yield size, partial(bytes.__mul__, bytes([65 + number]), size)


@pytest.mark.parametrize("takes", [b"", b"gzip"])
@pytest.mark.parametrize("size", [1, 50_000, LONG_CHECKSUM_BYTES])
async def test_a_stream_is_whole_only_with_its_end(takes: bytes, size: int, pool: Pool) -> None:
    sent = Sent()
    out = Out(sent.send, request(accept_encoding=takes), CONFIG, pool)
    await out.stream(parts(size=size))
    assert all(message["more_body"] for message in sent.messages[1:])
    await out.end()
    assert not sent.messages[-1].get("more_body")
    press = zlib.decompressobj(wbits=31)  # as clients do who know of one member only
    body = press.decompress(sent.body) if takes else sent.body
    assert not takes or (press.eof and not press.unused_data)
    assert body == b"A" * size + b"B" * size + b"C" * size


async def test_a_stream_tells_of_a_part_that_cannot_be_made(pool: Pool) -> None:
    def broken() -> bytes:
        raise ValueError("no such group")

    sent = Sent()
    with pytest.raises(ValueError, match="no such group"):
        await Out(sent.send, request(), CONFIG, pool).stream([*parts(), (50_000, broken), *parts()])
    assert len(sent.body) == 150_000


async def test_a_stream_is_ahead_by_few_parts(pool: Pool) -> None:
    asked: list[Part] = []

    def asking() -> Iterator[Part]:
        for part in parts(count=20):
            asked.append(part)
            yield part

    ahead: list[int] = []

    async def send(message: Message) -> None:
        if "body" in message:
            ahead.append(len(asked) - len(ahead) - 1)

    await Out(send, request(), CONFIG, pool).stream(asking())
    assert max(ahead) == AHEAD_PARTS


async def test_a_stream_gives_up_a_client_that_takes_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_io, "STALLED_S", 0.01)

    async def stalled(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await Out(stalled, request(), CONFIG, pool).stream(parts())


async def test_a_large_answer_is_sent_in_parts_and_not_to_who_takes_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, sent = bytes(2 * SENT_BYTES + 1), Sent()
    await Out(sent.send, request(), CONFIG, pool).answer(Answer(body))
    assert [len(message["body"]) for message in sent.messages[1:]] == [SENT_BYTES, SENT_BYTES, 1]
    assert [message["more_body"] for message in sent.messages[1:]] == [True, True, False]
    monkeypatch.setattr(http_io, "STALLED_S", 0.01)

    async def stalled(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await Out(stalled, request(), CONFIG, pool).answer(Answer(body))


async def test_a_stream_stops_when_its_client_goes(pool: Pool) -> None:
    sent, one = Sent(), request()

    async def send(message: Message) -> None:
        await sent.send(message)
        if "body" in message:
            one.gone.set()

    await Out(send, one, CONFIG, pool).stream(parts(count=20))
    assert len(sent.body) == 50_000


@pytest.mark.parametrize(("origin", "allowed"), [(b"http://a", True), (b"http://b", False), (b"", False)])
async def test_other_origins_get_no_leave(origin: bytes, allowed: Any, pool: Pool) -> None:
    sent = Sent()
    await Out(sent.send, request(origin=origin), CONFIG, pool).answer(Answer(b"{}"))
    assert (b"access-control-allow-origin" in sent.headers) == allowed
