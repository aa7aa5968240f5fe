"""The endpoint over real sockets: formats, access, bounds, and a port that another process uses."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.services.http_server.authority import pair
from tests.services.telemetry.export.events import every_kind
from tests.services.telemetry.export.prometheus.pages import key, metrics_of, samples_of

from rolloutmq.schemas.config.run import RunConfig, RunSection, TelemetryConfig
from rolloutmq.services.http_server.access import HttpAccess
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.export.prometheus import endpoint
from rolloutmq.services.telemetry.export.prometheus.endpoint import Endpoint, Pages, serve_metrics
from rolloutmq.services.telemetry.export.prometheus.families import Families
from rolloutmq.services.telemetry.export.prometheus.run_metrics import SelfCounts

DEADLINE_S = 30.0
OPEN_METRICS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Source:
    """The metrics of a run with every kind of event; counts how often a page was made."""

    def __init__(self) -> None:
        self.made = 0
        self._metrics = metrics_of(every_kind())

    def __call__(self) -> Families:
        self.made += 1
        return self._metrics.families(0.0, SelfCounts())


@contextlib.asynccontextmanager
async def served(run: RunConfig, source: Source | None = None) -> AsyncIterator[str]:
    """Serve for the duration of the block, once it answers; yield the URL."""
    stop = Stop()
    task = asyncio.create_task(serve_metrics(run, source or Source(), stop, retry_s=0.05))
    url = f"http://127.0.0.1:{run.telemetry.metrics_port}"
    try:
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    await (await session.get(f"{url}/up")).read()
                    break
                assert not task.done()
                await asyncio.sleep(0.01)
        yield url
    finally:
        stop.request("test")
        await asyncio.wait_for(task, DEADLINE_S)


async def get(
    url: str, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, str, str]:
    timeout = aiohttp.ClientTimeout(DEADLINE_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, url, headers=headers) as answer,
    ):
        return answer.status, answer.headers.get("content-type", ""), await answer.text()


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await check():
                return
            await asyncio.sleep(0.01)


def config(**fields: Any) -> RunConfig:
    return RunConfig(telemetry=TelemetryConfig(metrics_port=free_port(), **fields))


async def test_prometheus_gets_the_format_that_it_asks_for() -> None:
    async with served(config()) as url:
        status, kind, text = await get(f"{url}/metrics", {"Accept": OPEN_METRICS})
        assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")
        status, kind, text = await get(f"{url}/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert samples_of(text)[key("up")] in {0, 1}


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=x.y", "x" * 4000, ";;;,,,", "\xff"])
async def test_a_strange_accept_header_gets_a_page(accept: str) -> None:
    async with served(config()) as url:
        status, _, text = await get(f"{url}/metrics", {"Accept": accept})
    assert status == 200
    assert "rolloutmq_up" in text


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"Host": "evil.example.com"}, "host: unknown name"),
        ({"Origin": "http://evil.example.com"}, "origin: no page of this server"),
        ({"Sec-Fetch-Site": "cross-site"}, "sec-fetch-site: a foreign web page"),
    ],
)
async def test_foreign_web_pages_are_refused(headers: dict[str, str], reason: str) -> None:
    async with served(config()) as url:
        status, _, text = await get(f"{url}/metrics", headers)
    assert status == 403
    assert text.startswith(reason)


async def test_a_token_is_asked_for(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef\n")
    run = RunConfig(
        run=RunSection(http_token_file=token), telemetry=TelemetryConfig(metrics_port=free_port())
    )
    async with served(run) as url:
        assert (await get(f"{url}/metrics"))[0] == 401
        assert (await get(f"{url}/metrics", {"Authorization": "Bearer 0123456789abcdef"}))[0] == 200
        assert (await get(f"{url}/t/0123456789abcdef/metrics"))[0] == 200


async def test_other_paths_and_methods_are_refused() -> None:
    async with served(config()) as url:
        status, _, text = await get(f"{url}/elsewhere")
        assert (status, text) == (404, "/elsewhere: no such path; GET /metrics has the metrics\n")
        assert (await get(f"{url}/metrics", method="POST"))[0] == 405
        assert (await get(f"{url}/metrics", method="HEAD"))[0] == 200


def test_a_page_is_made_once_for_many_requests() -> None:
    source = Source()
    pages = Pages(source, page_s=1.0)
    first = pages.page("", 0.0)
    assert [pages.page(accept, 0.5) for accept in ("", "text/plain", "x")] == [first] * 3
    assert source.made == 1
    pages.page(OPEN_METRICS, 0.5)
    pages.page(f"{OPEN_METRICS},more", 0.9)
    assert source.made == 2
    pages.page("", 1.0)
    assert source.made == 3


async def test_a_port_in_use_is_told_once_and_taken_when_it_is_free(caplog: pytest.LogCaptureFixture) -> None:
    run = config()

    async def told() -> bool:
        return bool(caplog.records)

    with socket.socket() as other:
        other.bind(("127.0.0.1", run.telemetry.metrics_port))
        other.listen()
        stop = Stop()
        task = asyncio.create_task(serve_metrics(run, Source(), stop, retry_s=0.01))
        await until(told)
        await asyncio.sleep(0.1)  # several further tries
        stop.request("test")
        await asyncio.wait_for(task, DEADLINE_S)
    (record,) = [one for one in caplog.records if one.name == endpoint.__name__]
    assert "metrics endpoint not listening" in record.getMessage()
    assert "telemetry.metrics_port chooses another" in record.getMessage()
    async with served(run) as url:
        assert (await get(f"{url}/metrics"))[0] == 200


class Large(Source):
    """A page that fills the buffers of a socket many times."""

    def __call__(self) -> Families:
        families = Families()
        for number in range(100_000):
            families.add("figure", 1.0, f"{'x' * 100}-{number}")
        return families


@contextlib.asynccontextmanager
async def large(send_s: float) -> AsyncIterator[tuple[str, int]]:
    """Serve a page that fills the buffers of a socket many times; yield the URL and the port."""
    pages, run = Pages(Large(), page_s=1000.0), config()
    pages.page("", asyncio.get_running_loop().time())
    application = Endpoint(pages, HttpAccess(), send_s).application()
    async with endpoint._listening(application, run) as url:
        yield f"{url}/metrics", run.telemetry.metrics_port


async def ask(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a page, and read no more than the status line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return reader, writer


async def test_young_answers_stay_and_a_further_request_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "STUCK_S", 600.0)
    async with large(send_s=60.0) as (url, port):
        slow = [await ask(port) for _ in range(endpoint.CONNECTIONS)]
        for reader, _ in slow:
            assert await asyncio.wait_for(reader.readline(), DEADLINE_S) == b"HTTP/1.1 200 OK\r\n"
        status, _, text = await get(url)
        assert (status, text) == (503, "too many requests\n")
        for _, writer in slow:
            writer.transport.abort()

        async def answered() -> bool:
            return (await get(url))[0] == 200

        await until(answered)


async def test_slow_readers_that_ask_ahead_make_room_and_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint, "STUCK_S", 0.0)
    async with large(send_s=60.0) as (url, port):
        slow = [await ask(port) for _ in range(endpoint.CONNECTIONS + 18)]
        for _, writer in slow:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        for reader, _ in slow[-endpoint.CONNECTIONS :]:
            assert await asyncio.wait_for(reader.readline(), DEADLINE_S) == b"HTTP/1.1 200 OK\r\n"
        assert (await get(url))[0] == 200
        for _, writer in slow:
            writer.transport.abort()
    assert "metrics have slow or too many readers" in caplog.text


async def test_a_client_that_takes_too_long_loses_its_connection() -> None:
    async with large(send_s=0.1) as (_, port):
        reader, writer = await ask(port)
        await reader.readline()
        await asyncio.sleep(0.5)
        received = 0
        with contextlib.suppress(ConnectionError):
            while chunk := await asyncio.wait_for(reader.read(1 << 16), DEADLINE_S):
                received += len(chunk)
        assert received < len(Pages(Large()).page("", 0.0).body)
        writer.transport.abort()


async def test_every_reply_has_the_headers_also_of_what_is_no_http(run_dir: Path) -> None:
    run = RunConfig(telemetry=TelemetryConfig(metrics_port=free_port()), run=RunSection(dir=run_dir))
    async with served(run) as url, aiohttp.ClientSession() as session:
        for path, method in (("/metrics", "GET"), ("/none", "GET"), ("/metrics", "POST")):
            async with session.request(method, url + path) as answer:
                assert endpoint.HEADERS.items() <= dict(answer.headers).items()
        reader, writer = await asyncio.open_connection("127.0.0.1", run.telemetry.metrics_port)
        writer.write(b"GARBAGE\r\n\r\n")
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)).decode()
        writer.close()
        await writer.wait_closed()
        assert " 400 " in head
        for name, value in endpoint.HEADERS.items():
            assert f"{name}: {value}" in head


async def test_with_a_certificate_it_speaks_tls(tmp_path: Path) -> None:
    made, plain = pair(tmp_path / "keys"), config()
    run = plain.model_copy(update={"run": RunSection(tls_cert=made.cert, tls_key=made.key)})
    trust = ssl.create_default_context(cafile=made.ca)
    async with served(run) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/metrics") as answer:
            assert answer.status == 400
        async with session.get(f"{url.replace('http', 'https')}/metrics", ssl=trust) as answer:
            assert answer.status == 200
