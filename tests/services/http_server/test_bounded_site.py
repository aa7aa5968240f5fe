"""Idle connections make room for new ones, those at work stay, and what is no HTTP gets the headers too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from rolloutmq.services.http_server.listening import serving
from rolloutmq.services.http_server.sockets import bound_socket

DEADLINE_S = 30.0
LIMIT = 4
HEADERS = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'self'"}
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Site:
    """A site whose `/slow` answers once it is let go."""

    def __init__(self) -> None:
        self.port = 0
        self.started, self.go = asyncio.Semaphore(0), asyncio.Event()
        self.peers: list[Peer] = []

    async def connect(self) -> Peer:
        peer = await asyncio.open_connection("127.0.0.1", self.port)
        self.peers.append(peer)
        return peer

    async def slow(self, _request: web.Request) -> web.Response:
        self.started.release()
        await self.go.wait()
        return web.Response(text="slow")


@contextlib.asynccontextmanager
async def served(head_s: float = 60.0) -> AsyncIterator[Site]:
    site, app = Site(), web.Application()
    app.router.add_get("/slow", site.slow)
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(app, bound_socket("127.0.0.1", 0), LIMIT, HEADERS, head_s) as port,
    ):
        site.port = port
        try:
            yield site
        finally:
            site.go.set()
            for _, writer in site.peers:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def ask(peer: Peer, path: str = "/none") -> None:
    peer[1].write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await peer[1].drain()


async def status(peer: Peer) -> int:
    """Return the status of the next reply, and take its body."""
    head = (await peer[0].readuntil(b"\r\n\r\n")).decode()
    length = next(line for line in head.lower().split("\r\n") if line.startswith("content-length:"))
    await peer[0].readexactly(int(length.partition(":")[2]))
    return int(head.split()[1])


async def is_closed(peer: Peer) -> bool:
    with contextlib.suppress(ConnectionError):
        return await peer[0].read(1) == b""
    return True


async def test_the_oldest_idle_connection_makes_room() -> None:
    async with served() as site:
        peers = []
        for _ in range(LIMIT):
            peers.append(await site.connect())
            await ask(peers[-1])
            assert await status(peers[-1]) == 404
        newest = await site.connect()
        await ask(newest)
        assert await status(newest) == 404
        assert await is_closed(peers[0])
        for peer in (*peers[1:], newest):
            await ask(peer)
            assert await status(peer) == 404, "the others go on"


async def test_one_that_sends_nothing_is_idle() -> None:
    async with served() as site:
        silent = await site.connect()
        silent[1].write(b"GET / HT")
        await silent[1].drain()
        for _ in range(LIMIT):
            peer = await site.connect()
            await ask(peer)
            assert await status(peer) == 404
        assert await is_closed(silent)


async def test_headers_that_do_not_end_are_not_waited_for() -> None:
    async with served(head_s=0.2) as site:
        silent, half, second = [await site.connect() for _ in range(3)]
        half[1].write(b"GET / HTTP/1.1\r\nHost: 127")
        await ask(second)
        assert await status(second) == 404
        second[1].write(b"GET / HTTP/1.1\r\nHost: 127")
        assert [await is_closed(peer) for peer in (silent, half, second)] == [True] * 3


async def test_those_at_work_stay_and_a_further_one_is_closed() -> None:
    async with served() as site:
        peers = [await site.connect() for _ in range(LIMIT)]
        for peer in peers:
            await ask(peer, "/slow")
            await site.started.acquire()
        assert await is_closed(await site.connect())
        site.go.set()
        assert [await status(peer) for peer in peers] == [200] * LIMIT
        again = await site.connect()
        await ask(again)
        assert await status(again) == 404


@pytest.mark.parametrize(
    "sent", [b"\0\0\0\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\x01 HTTP/1.1\r\n\r\n"]
)
async def test_what_is_no_http_gets_the_headers(sent: bytes) -> None:
    async with served() as site:
        reader, writer = await site.connect()
        writer.write(sent)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.")
        assert " 400 " in head
        for name, value in HEADERS.items():
            assert f"{name}: {value}" in head


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /t/secret-token/\x01 HTTP/1.1\r\n\r\n",
        b"GET /t/secret-token/info HTTP/9.9\r\n\r\n",
        b"G\x00T /t/secret-token/info HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-token\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nsecret-token \x01\r\n\r\n",
        b"GET /t/secret-token/" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_no_reply_and_no_log_repeats_what_is_no_http(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as site:
        reader, writer = await site.connect()
        writer.write(sent)
        reply = await reader.read()
    assert b" 400 " in reply.partition(b"\r\n")[0]
    assert b"no valid HTTP request" in reply
    assert b"secret" not in reply
    assert "secret" not in caplog.text
