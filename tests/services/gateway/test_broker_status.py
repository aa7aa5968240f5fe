import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.services.gateway.site import configured

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.discovery import reach
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.errors import BrokerUnavailableError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.replies import Reply
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.gateway import broker_status as module
from rolloutmq.services.gateway.broker_status import FRESH_S, BrokerStatus


class Asked:
    """The way to a broker, which lets questions through when it may, and counts them."""

    def __init__(self, client: BrokerClient) -> None:
        self.times = 0
        self.open = asyncio.Event()
        self.open.set()
        self.away = False
        self._client = client

    async def request(self, *words: Any) -> Reply:
        self.times += 1
        await self.open.wait()
        if self.away:
            raise BrokerUnavailableError("here", 0.0)
        return await self._client.request(*words)

    async def close(self) -> None:
        if not self.away:
            await self._client.close()


Opened = Callable[[], AbstractAsyncContextManager[tuple[BrokerStatus, Asked]]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> Opened:
    @asynccontextmanager
    async def watching() -> AsyncIterator[tuple[BrokerStatus, Asked]]:
        config = configured()
        ways: list[tuple[Asked, Any]] = []

        async def counted(*words: Any) -> tuple[Asked, Any]:
            if not ways:
                client, about = await reach(*words)
                ways.append((Asked(client), about))
            return ways[0]

        monkeypatch.setattr(module, "reach", counted)
        write_json(RunLayout(run_dir).config, config)
        with running_broker(config, RunLayout(run_dir)):
            async with BrokerStatus(run_dir) as watch:
                await watch.connected()
                yield watch, ways[0][0]

    return watching


async def test_what_is_known_is_told_without_a_question(opened: Opened) -> None:
    async with opened() as (watch, asked):
        await watch.refresh()
        known = await watch.refresh(time.monotonic() - FRESH_S)
        assert known is watch.status
        assert asked.times == 1


async def test_what_the_caller_did_is_seen(opened: Opened) -> None:
    async with opened() as (watch, asked):
        asked.open.clear()
        before = asyncio.create_task(watch.refresh())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asked.times == 1
        after = [asyncio.create_task(watch.refresh(time.monotonic())) for _ in range(5)]
        asked.open.set()
        await asyncio.gather(before, *after)
        assert asked.times == 2


async def test_what_gets_old_is_asked_for_while_it_is_told(opened: Opened) -> None:
    async with opened() as (watch, asked):
        await watch.refresh()
        asked.open.clear()
        async with asyncio.timeout(10 * FRESH_S):
            while asked.times == 1:
                assert await watch.refresh(0.0) is watch.status
                await asyncio.sleep(0.01)
        asked.open.set()


async def test_while_the_broker_is_away_the_newest_that_is_known_counts(opened: Opened) -> None:
    async with opened() as (watch, asked):
        known = await watch.refresh()
        asked.away = True
        assert await watch.refresh() is known
        asked.away = False
        await watch.connected()
        assert await watch.refresh() is not known
