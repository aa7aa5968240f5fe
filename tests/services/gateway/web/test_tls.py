"""The gateway with a certificate: clients that trust it are served, plain HTTP is told, handshakes end in time."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from tests.services.gateway.site import Site, configured
from tests.services.http_server.authority import Pair, pair

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.config.run import RunSection
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.gateway.server import serve
from rolloutmq.services.process.runner import Stop

DEADLINE_S = 60.0


@pytest.fixture
def made(tmp_path: Path) -> Pair:
    return pair(tmp_path / "keys")


@contextlib.asynccontextmanager
async def secured(
    run_dir: Path, made: Pair, silent_s: float = 10.0
) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    """Run a gateway with TLS beside a broker; yield its URL and what a client must trust."""
    layout, stop, config = RunLayout(run_dir), Stop(), configured()
    run = RunSection(tls_cert=made.cert, tls_key=made.key)
    write_json(layout.config, config.model_copy(update={"run": run}))
    gateway = GatewayConfig(enabled=True, port=0, silent_s=silent_s)
    with running_broker(config, layout):
        serving = asyncio.create_task(serve(run_dir, stop, gateway))
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not layout.gateway.exists():
                    assert not serving.done(), serving.result()
                    await asyncio.sleep(0.01)
                url = json.loads(layout.gateway.read_text())["url"]
                yield url, ssl.create_default_context(cafile=made.ca)
        finally:
            stop.request("test")
            await serving


async def test_trusted_clients_are_served_and_plain_http_is_told(run_dir: Path, made: Pair) -> None:
    async with secured(run_dir, made) as (url, trust):
        assert url.startswith("https://127.0.0.1:")
        connector = aiohttp.TCPConnector(ssl=trust)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            site = Site(session, RunLayout(run_dir))
            await site.begin()
            await site.enrol()
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"{url}/info")
            async with session.get(f"{url.replace('https', 'http')}/info") as answer:
                assert answer.status == 400
                assert "use https://" in await answer.text()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00"])
async def test_a_stalled_handshake_ends_in_time(run_dir: Path, made: Pair, sent: bytes) -> None:
    async with secured(run_dir, made, silent_s=0.3) as (url, _):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()


async def test_a_connection_stays_open_for_further_requests(run_dir: Path, made: Pair) -> None:
    async with secured(run_dir, made) as (url, trust):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        for _ in range(3):
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 ")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
