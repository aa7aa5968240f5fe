"""Connections to a real gateway, byte by byte: what their limits end, and what they let through."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from tests.services.gateway.site import Opened, Site, scored

from rolloutmq.services.gateway import server
from rolloutmq.services.gateway.web.protocol import AHEAD_REQUESTS, HEAD_BYTES

SILENT_S = 0.3
DEADLINE_S = 30.0
POST = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\n"


class Line:
    """A connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Return what comes until the gateway ends the connection."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionResetError):  # more was sent than the gateway read
                return await self.reader.read()
        return b""


@asynccontextmanager
async def connected(one: Site) -> AsyncIterator[Line]:
    address = urlsplit(str(one.session._base_url))
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield Line(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_whoever_says_nothing_is_not_waited_for(site: Opened) -> None:
    async with site(silent_s=SILENT_S) as one, connected(one) as silent, connected(one) as slow:
        await slow.send(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\n")
        assert await silent.rest() == b""
        assert await slow.rest() == b""


async def test_idle_connections_make_room(site: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "client_limit", lambda: 4)
    async with site() as one, contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(one)) for _ in range(8)]
        for line in silent[:3]:
            assert await line.rest() == b""
        fresh = await stack.enter_async_context(connected(one))
        await fresh.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 " in await fresh.rest()


async def test_a_body_that_stops_is_told_and_ended(site: Opened) -> None:
    async with site(silent_s=SILENT_S) as one, connected(one) as line:
        await line.send(POST + b"Content-Length: 100000\r\n\r\n{")
        told = await line.rest()
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b"of the body in 0.3 s" in told


async def test_four_silent_clients_stop_nobody(site: Opened) -> None:
    """Each announces as much as all bodies together may have, compressed, and sends one byte."""
    async with (
        site(max_in_hand_bytes=64 << 20, silent_s=3600.0) as one,
        connected(one) as first,
        connected(one) as second,
        connected(one) as third,
        connected(one) as fourth,
    ):
        await one.begin()
        for line in (first, second, third, fourth):
            await line.send(POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n\x1f" % (64 << 20))
        async with asyncio.timeout(DEADLINE_S):
            for tag in range(4):
                await one.post("/scored_data", scored(tag, images="x" * 36_000))
        assert (await one.get("/status"))["queue_size"] == 4


@pytest.mark.parametrize(
    "filling",
    [b"x" * (2 * HEAD_BYTES), b"".join(b"a%d: 1\r\n" % n for n in range(HEAD_BYTES))],
    ids=["one", "many"],
)
async def test_headers_have_a_limit(site: Opened, filling: bytes) -> None:
    async with site() as one, connected(one) as line:
        with contextlib.suppress(ConnectionError):
            await line.send(b"GET /info HTTP/1.1\r\nHost: localhost\r\nlong: " + filling)
        assert (await line.rest())[:13] in {b"HTTP/1.1 431 ", b""}


async def test_headers_up_to_the_limit_are_good(site: Opened) -> None:
    async with site() as one, connected(one) as line:
        await line.send(b"GET /info HTTP/1.1\r\nHost: localhost\r\nlong: ")
        await line.send(b"x" * (HEAD_BYTES - 1000) + b"\r\nConnection: close\r\n\r\n")
        assert (await line.rest()).startswith(b"HTTP/1.1 200 ")


async def test_the_reply_to_a_body_that_is_not_read_is_heard(site: Opened) -> None:
    """The rest of the body is dropped, and the connection goes on."""
    async with site(max_body_bytes=1 << 20) as one, connected(one) as line, asyncio.timeout(DEADLINE_S):
        size = 3 << 20
        await line.send(POST + b"Content-Length: %d\r\n\r\n" % size)
        assert (await line.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        await line.send(b"x" * size)
        await line.send(b"GET /info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200 " in await line.rest()


async def test_whoever_sends_no_rest_after_the_reply_is_not_waited_for(site: Opened) -> None:
    async with site(max_body_bytes=1 << 20, silent_s=SILENT_S) as one, connected(one) as line:
        await line.send(POST + b"Content-Length: 9999999\r\n\r\nx")
        assert (await line.rest()).startswith(b"HTTP/1.1 413 ")


async def test_few_requests_may_wait_behind_another(site: Opened) -> None:
    async with site() as one:
        async with connected(one) as line:
            with contextlib.suppress(ConnectionError):
                await line.send(b"GET / HTTP/1.1\r\n\r\n" * 1000)
            told = await line.rest()
            assert told.count(b"HTTP/1.1 200 ") <= 2 * AHEAD_REQUESTS
        async with connected(one) as line:
            await line.send(b"GET / HTTP/1.1\r\n\r\n" * 9 + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert (await line.rest()).count(b"HTTP/1.1 200 ") == 10


async def test_an_answer_takes_as_long_as_it_takes(site: Opened) -> None:
    """A post that waits for room is no silent client."""
    async with site(
        {"high_bytes": 4 << 20, "max_group_bytes": 1 << 20}, post_wait_s=4 * SILENT_S, silent_s=SILENT_S
    ) as one:
        await one.begin()
        tag = 0
        while True:
            async with one.session.post("/scored_data", json=scored(tag, images="x" * 500_000)) as answer:
                if answer.status != 200:
                    break
            tag += 1
        assert answer.status == 503
        assert tag >= 4


HELLO = b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "more", [b"no request\r\n\r\n", b"long: " + b"x" * (2 * HEAD_BYTES)], ids=["text", "head"]
)
async def test_bytes_that_are_no_request_wait_for_the_replies_to_those_before(
    site: Opened, more: bytes
) -> None:
    """A client takes the first reply for that of its first request: a refusal ahead of it would be believed."""
    async with site() as one, connected(one) as line:
        begin = b"GET / HTTP/1.1\r\n" if more.startswith(b"long") else b""
        with contextlib.suppress(ConnectionError):
            await line.send(HELLO + HELLO + begin + more)
        told = await line.rest()
        assert told.startswith(b"HTTP/1.1 200 ")
        assert told.count(b"HTTP/1.1 ") == 2
        assert b"connection: close" in told


@pytest.mark.parametrize("method", [b"PUT", b"HEAD"])
async def test_no_request_gets_two_replies(site: Opened, method: bytes) -> None:
    """The second one, for a body that is no body, would be taken for that of the next request."""
    async with site() as one, connected(one) as line:
        await line.send(method + b" /info HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        await line.reader.readuntil(b"\r\n\r\n") if method == b"PUT" else None
        await line.send(b"no chunk\r\n\r\n")
        assert b"HTTP/1.1 400 " not in await line.rest()


async def test_a_size_may_have_any_number_of_zeros(site: Opened) -> None:
    """Python reads no number of 5,000 digits."""
    async with site() as one, connected(one) as line:
        await line.send(POST + b"Connection: close\r\nContent-Length: " + b"0" * 5000 + b"2\r\n\r\n{}")
        assert (await line.rest()).startswith(b"HTTP/1.1 422 ")


async def test_a_header_behind_the_body_says_nothing(site: Opened) -> None:
    async with site() as one, connected(one) as line:
        await line.send(
            b"GET /info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\nHost: evil.example\r\n\r\n"
        )
        assert (await line.rest()).startswith(b"HTTP/1.1 200 ")
