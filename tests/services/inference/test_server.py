"""The HTTP server of a model over real sockets, with a handler that only counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.http_server.access import HttpAccess
from rolloutmq.services.http_server.listening import listening
from rolloutmq.services.http_server.request_latencies import count_tokens
from rolloutmq.services.http_server.tokens import OWN, Holder, TokenStore
from rolloutmq.services.inference import server
from rolloutmq.services.inference.server import application, replied
from rolloutmq.services.process.latency_recorder import LatencyRecorder

TOKEN = "0123456789abcdef"
GUARDED = HttpAccess(tokens=TokenStore({TOKEN: Holder(OWN, Role.ADMIN)}))
DEADLINE_S = 30.0


class Counted:
    """A handler, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    async def handle(self, request: web.Request) -> web.Response:
        await request.read()
        self.calls += 1
        return replied(b"{}")


@asynccontextmanager
async def served(counted: Counted, access: HttpAccess = HttpAccess()) -> AsyncIterator[int]:
    app = application({"/v1/completions": ("POST", counted.handle)}, access)
    async with listening(app, "127.0.0.1", 0, None) as port:
        yield port


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
    ],
    ids=str,
)
async def test_a_foreign_page_samples_nothing(headers: dict[str, str]) -> None:
    counted = Counted()
    async with served(counted) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with session.post(url, data="{}", headers={"Content-Type": "text/plain", **headers}) as answer:
            assert answer.status == 403
            assert (await answer.json())["error"]["code"] == "refused"
        async with session.post(url, data="{}") as answer:
            assert answer.status == 200
    assert counted.calls == 1


async def test_a_token_is_asked_for_in_a_header_or_the_path() -> None:
    counted = Counted()
    async with served(counted, GUARDED) as port, aiohttp.ClientSession() as session:
        base = f"http://127.0.0.1:{port}"
        for path, headers, expected in (
            ("", {}, 401),
            ("", {"Authorization": f"Bearer {TOKEN}"}, 200),
            (f"/t/{TOKEN}", {}, 200),
            (f"/t/{TOKEN}x", {}, 401),
        ):
            async with session.post(f"{base}{path}/v1/completions", data="{}", headers=headers) as answer:
                assert answer.status == expected
                assert ("WWW-Authenticate" in answer.headers) == (expected == 401)
    assert counted.calls == 2


async def test_no_error_and_no_log_has_the_token_of_the_path(caplog: pytest.LogCaptureFixture) -> None:
    async def failing(_request: web.Request) -> web.Response:
        raise ValueError("for the test")

    app = application({"/v1/completions": ("POST", failing)}, GUARDED)
    async with listening(app, "127.0.0.1", 0, None) as port, aiohttp.ClientSession() as session:
        base = f"http://127.0.0.1:{port}/t/{TOKEN}"
        for path, expected in (("/v1/completions", 500), ("/v1/nothing", 404)):
            async with session.post(f"{base}{path}", data="{}") as answer:
                assert answer.status == expected
                told = await answer.text()
            assert TOKEN not in told
            assert expected != 404 or "/v1/nothing: no such path" in told
    assert "request failed path=/v1/completions" in caplog.text
    assert TOKEN not in caplog.text


async def test_bytes_that_are_no_utf_8_are_no_token(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted()
    async with served(counted, GUARDED) as port, asyncio.timeout(DEADLINE_S):
        for line in (b"POST /v1/completions HTTP/1.1", b"POST /t/%ff/v1/completions HTTP/1.1"):
            told = await asked(port, line, b"Authorization: Bearer \xff" + TOKEN.encode())
            assert told.startswith(b"HTTP/1.1 401 "), told
    assert not counted.calls
    assert not caplog.records


async def asked(port: int, line: bytes, *headers: bytes) -> bytes:
    """Send a request without a body as it is, and return the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\r\n".join([line, b"Host: localhost", *headers, b"Connection: close", b"", b""]))
    told = await reader.read()
    writer.close()
    await writer.wait_closed()
    return told


async def test_a_body_that_stops_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.1)
    counted = Counted()
    async with served(counted) as port, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        told = await reader.read()
        assert told.startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
    assert not counted.calls


async def test_requests_are_told_by_declared_path_and_class_of_status() -> None:
    recorder = LatencyRecorder("inference", 0.0)

    async def sampling(_request: web.Request) -> web.Response:
        count_tokens(12)
        return replied(b"{}")

    app = application({"/v1/completions": ("POST", sampling)}, HttpAccess(), recorder)
    async with listening(app, "127.0.0.1", 0, None) as port, aiohttp.ClientSession() as session:
        base = f"http://127.0.0.1:{port}"
        for _ in range(2):
            async with session.post(f"{base}/v1/completions", data="{}") as answer:
                assert answer.status == 200
        async with session.get(f"{base}/v1/completions") as answer:
            assert answer.status == 405
        async with session.get(f"{base}/a/secret/of/a/user") as answer:
            assert answer.status == 404
    (sample,) = recorder.samples(1.0)
    assert {(row.route, row.status): (row.durations.count, row.tokens) for row in sample.rows} == {
        ("/v1/completions", "2xx"): (2, 24),
        ("/v1/completions", "4xx"): (1, 0),
        ("other", "4xx"): (1, 0),
    }
