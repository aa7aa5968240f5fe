"""A feed follows a broker that moves or starts late."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.bus.transport.pubsub import Published
from rolloutmq.bus.transport.way import route
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.files import Endpoints, RunLayout


def say_where(layout: RunLayout, address: str) -> None:
    write_json(
        layout.endpoints,
        Endpoints(ingest="", serve="", events=address, publish="", pid=1, epoch=1),
    )


@contextlib.asynccontextmanager
async def publishing(address: str, topic: bytes) -> AsyncIterator[None]:
    """Publish again and again: a subscriber may join at any time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind(address)

    async def publish() -> None:
        while True:
            socket.send_multipart([topic, address.encode()])
            await asyncio.sleep(0.01)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        socket.close(linger=0)
        context.term()


async def first(feed: EventFeed) -> Published:
    async with asyncio.timeout(30):
        while (event := await feed.next(0.1)) is None:
            pass
        return event


async def test_feed_opened_before_there_is_a_broker_waits_for_it(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    address = f"ipc://{run_dir}/events"
    async with EventFeed(layout, (b"step",)) as feed:
        assert await feed.next(0.01) is None
        say_where(layout, address)
        async with publishing(address, b"step"):
            assert await first(feed) == (b"step", address.encode())


async def test_feed_follows_a_broker_that_moved(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    old, new = f"ipc://{run_dir}/old", f"ipc://{run_dir}/new"
    say_where(layout, old)
    async with EventFeed(layout, (b"step",)) as feed:
        async with publishing(old, b"step"):
            assert (await first(feed))[1] == old.encode()
        say_where(layout, new)
        async with publishing(new, b"step"), asyncio.timeout(30):
            while (await first(feed))[1] != new.encode():
                pass


async def test_wait_ends_in_time_where_nothing_is_published(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    say_where(layout, f"ipc://{run_dir}/nobody")
    async with EventFeed(layout, (b"step",)) as feed, asyncio.timeout(30):
        assert await feed.next(0.05) is None
        assert feed.try_next() is None


def test_half_written_or_missing_address_is_no_address(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    assert endpoints_of(layout) is None

    layout.endpoints.write_text('{"ingest":')

    assert endpoints_of(layout) is None


def refused(number: int) -> OSError:
    return OSError(number, "refused")


async def test_want_of_descriptors_costs_a_look_and_not_the_feed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = RunLayout(run_dir)
    looks = 0

    def short(asked: RunLayout) -> Endpoints | None:
        nonlocal looks
        looks += 1
        if looks <= 3:
            raise refused(errno.EMFILE)
        return endpoints_of(asked)

    monkeypatch.setattr(route, "endpoints_of", short)
    address = f"ipc://{run_dir}/events"
    say_where(layout, address)
    async with publishing(address, b"step"), asyncio.timeout(30), EventFeed(layout, [b"step"]) as feed:
        while await feed.next(0.05) is None:
            pass
    assert "broker not looked for" in caplog.text


async def test_another_error_of_the_endpoints_is_raised(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: RunLayout) -> Endpoints | None:
        raise refused(errno.EACCES)

    monkeypatch.setattr(route, "endpoints_of", denied)
    async with EventFeed(RunLayout(run_dir), [b"step"]) as feed:
        with pytest.raises(PermissionError):
            await feed.next(0.05)
