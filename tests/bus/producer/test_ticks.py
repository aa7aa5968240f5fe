"""One timer for all producers of an event loop."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from rolloutmq.bus.producer import connection
from rolloutmq.bus.producer.connection import _Ticks


class Counter:
    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1

    def fail(self) -> None:
        self.ticks += 1
        raise OSError("no memory")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TICK_S", 0.001)


async def until(counter: Counter, ticks: int) -> None:
    async with asyncio.timeout(30.0):
        while counter.ticks < ticks:  # noqa: ASYNC110 - an event would need a tick of its own
            await asyncio.sleep(0.001)


async def test_one_that_fails_takes_no_tick_from_the_others() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: told.append(about))
    ticks, broken, sound = _Ticks.here(), Counter(), [Counter() for _ in range(20)]
    ticks.begin(broken.fail)
    for one in sound:
        ticks.begin(one.tick)
    for one in sound:
        await until(one, 3)
    for one in sound:
        ticks.end(one.tick)
    ticks.end(broken.fail)
    assert "no memory" in str(told[0]["exception"])


async def test_no_tick_follows_the_end() -> None:
    ticks, ended, other = _Ticks.here(), Counter(), Counter()
    ticks.begin(ended.tick)
    await until(ended, 2)
    ticks.end(ended.tick)
    ticks.begin(other.tick)
    ticks_then = ended.ticks
    await until(other, 3)
    assert ended.ticks == ticks_then
    ticks.end(other.tick)


def test_neither_the_loop_nor_the_object_lives_on() -> None:
    counter, loop = Counter(), asyncio.new_event_loop()

    async def begin(counter: Counter) -> None:
        _Ticks.here().begin(counter.tick)

    loop.run_until_complete(begin(counter))
    loop.close()
    gone = weakref.ref(counter), weakref.ref(loop)
    del counter, loop
    gc.collect()
    assert [one() for one in gone] == [None, None]
