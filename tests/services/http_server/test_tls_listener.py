"""TLS of a site: handshakes count as connections and end in time, plain HTTP is told, and nothing is left behind."""

import asyncio
import contextlib
import gc
import inspect
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from tests.services.http_server.authority import Pair, pair

from rolloutmq.services.http_server.listening import serving
from rolloutmq.services.http_server.sockets import bound_socket
from rolloutmq.services.http_server.tls import ServerTls

DEADLINE_S = 30.0
LIMIT = 4


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in the loop of asyncio, and in that of the services."""

    def runs(loop: Callable[[], asyncio.AbstractEventLoop], **given: Any) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(test(**given))

    own = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    runs.__signature__ = own.replace(parameters=[*own.parameters.values(), loop])  # type: ignore[attr-defined]
    runs.__name__ = test.__name__
    loops = [asyncio.new_event_loop, uvloop.new_event_loop]
    parametrized: Callable[..., None] = pytest.mark.parametrize("loop", loops, ids=["asyncio", "uvloop"])(
        runs
    )
    return parametrized


@pytest.fixture
def made(tmp_path: Path) -> Pair:
    return pair(tmp_path / "a")


@contextlib.asynccontextmanager
async def served(made: Pair, head_s: float = 60.0) -> AsyncIterator[int]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.scheme)

    app = web.Application()
    app.router.add_get("/", answer)
    bound, tls = bound_socket("127.0.0.1", 0), ServerTls(made.cert, made.key)
    async with asyncio.timeout(DEADLINE_S), serving(app, bound, LIMIT, head_s=head_s, tls=tls) as port:
        yield port


def trusting(made: Pair) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=made.ca)


async def asked(made: Pair, port: int, host: str = "127.0.0.1") -> str:
    url, trust = f"https://{host}:{port}/", trusting(made)
    async with aiohttp.ClientSession() as session, session.get(url, ssl=trust) as answer:
        return await answer.text()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection ends."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


@on_both_loops
async def test_a_client_that_trusts_the_authority_is_answered(made: Pair) -> None:
    async with served(made) as port:
        assert await asked(made, port) == "https"
        assert await asked(made, port, "localhost") == "https"


@on_both_loops
async def test_a_client_that_does_not_trust_it_sends_nothing(made: Pair) -> None:
    async with served(made) as port, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"https://127.0.0.1:{port}/")
        assert await asked(made, port) == "https", "and the server goes on"


@on_both_loops
async def test_plain_http_is_told_to_use_tls(made: Pair) -> None:
    async with served(made) as port, aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/") as answer:
            assert answer.status == 400
            assert await answer.text() == "this server speaks TLS alone: use https://\n"
        assert await asked(made, port) == "https"


@pytest.mark.parametrize(
    "sent", [b"\x00\x01\x02", b"\x16\x03\x01\xff\xff" + bytes(100), b"\x16garbage garbage"]
)
@on_both_loops
async def test_what_is_no_tls_is_closed(made: Pair, sent: bytes) -> None:
    async with served(made, head_s=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert b"HTTP/" not in await ended(reader)
        writer.close()
        assert await asked(made, port) == "https"


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
@on_both_loops
async def test_a_handshake_that_stalls_ends_in_time(made: Pair, sent: bytes) -> None:
    async with served(made, head_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await ended(reader)
        writer.close()
        assert await asked(made, port) == "https"


@on_both_loops
async def test_headers_that_stall_behind_the_handshake_end_in_time(made: Pair) -> None:
    async with served(made, head_s=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(made))
        writer.write(b"GET / HTTP/1.1\r\nHost: 127")
        await ended(reader)
        writer.close()


@on_both_loops
async def test_stalled_handshakes_make_room(made: Pair) -> None:
    async with served(made) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(LIMIT)]
        for _, writer in silent[::2]:
            writer.write(b"\x16\x03\x01")
        for _ in range(LIMIT):
            assert await asked(made, port) == "https"
        await ended(silent[0][0])
        for _, writer in silent:
            writer.close()


@on_both_loops
async def test_an_open_connection_counts_once(made: Pair) -> None:
    """The place of a handshake is that of its connection: a full server drops nobody for it."""
    async with served(made) as port:
        kept = [await asyncio.open_connection("127.0.0.1", port, ssl=trusting(made)) for _ in range(LIMIT)]
        for reader, writer in kept:
            writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, writer in kept:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@on_both_loops
async def test_the_end_leaves_no_descriptor(made: Pair) -> None:
    async with served(made) as port:  # the loop keeps a descriptor of its own from here on
        assert await asked(made, port) == "https"
    gc.collect()
    before = descriptors()
    sockets = []
    async with served(made) as port:
        for sent in (b"", b"\x16", b"\x16\x03\x01\x02"):
            one = socket.create_connection(("127.0.0.1", port))
            one.send(sent)
            sockets.append(one)
        assert await asked(made, port) == "https"
    for one in sockets:
        one.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionError):
            while one.recv(4096):
                pass
        one.close()
    async with asyncio.timeout(DEADLINE_S):
        while descriptors() > before:  # transports close their sockets in a later turn of the loop
            gc.collect()
            await asyncio.sleep(0.01)
