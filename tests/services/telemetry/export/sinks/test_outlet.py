"""A sink that is slow, hangs, ends or refuses costs its own points, and telemetry nothing."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.export.sinks import outlet as module
from rolloutmq.services.telemetry.export.sinks.outlet import SinkOutlet
from rolloutmq.services.telemetry.export.sinks.points import Point

DEADLINE_S = 60.0
TAKES = """
import json, sys
with open({path!r}, "a") as file:
    for line in sys.stdin:
        file.write(line)
        file.flush()
        {each}
        print(json.dumps({{"why": ""}}), flush=True)
    file.write('"end"\\n')
"""
SLOW = "import time; time.sleep(3600)"


def sink(code: str, **options: Any) -> SinkOutlet:
    return SinkOutlet("fake", (sys.executable, "-c", code), **options)


def point(step: int) -> Point:
    return Point(step, 0.0, {"train/reward": 0.5})


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if check():
                return
            await asyncio.sleep(0.01)


async def ended(task: "asyncio.Task[None]", stop: Stop) -> float:
    """End a sink; return how long that took."""
    began = time.monotonic()
    stop.request("test")
    await asyncio.wait_for(task, DEADLINE_S)
    return time.monotonic() - began


def written(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(path: Path) -> list[int]:
    return [one["step"] for one in written(path) if one != "end"]


async def test_points_arrive_in_order_and_the_last_ones_at_the_end(tmp_path: Path) -> None:
    path, stop = tmp_path / "points", Stop()
    outlet = sink(TAKES.format(path=str(path), each="pass"))
    task = asyncio.create_task(outlet.run(stop))
    for number in range(300):
        outlet.put(point(number))
    await until(lambda: outlet.taken >= 100)
    outlet.put(point(300))
    await ended(task, stop)
    assert steps(path) == [*range(301)]
    assert written(path)[-1] == "end"  # it saw the end of its input
    assert (outlet.taken, outlet.dropped) == (301, 0)


async def test_a_sink_that_hangs_holds_a_bounded_number_of_points_and_is_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = Stop()
    outlet = sink(SLOW, capacity=10, finish_s=0.2)
    task = asyncio.create_task(outlet.run(stop))
    for number in range(1000):
        outlet.put(point(number))
        if number % 100 == 0:
            await asyncio.sleep(0.01)
    await until(lambda: len(outlet._queue) == 10)
    await ended(task, stop)
    assert outlet.taken == 0
    assert outlet.dropped == 1000
    assert [record.getMessage() for record in caplog.records].count(
        "sink troubled sink=fake reason=points are dropped: it is too slow"
    ) == 1


async def test_a_sink_that_hangs_is_started_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path, stop = tmp_path / "points", Stop()
    hung = tmp_path / "hung"
    once = f"import os, time; os.path.exists({str(hung)!r}) or (open({str(hung)!r}, 'w'), time.sleep(3600))"
    outlet = sink(TAKES.format(path=str(path), each=once), restart_s=(0.01,), hang_s=0.3)
    task = asyncio.create_task(outlet.run(stop))
    for number in range(2 * module.IN_HAND):
        outlet.put(point(number))
    await until(lambda: outlet.taken == module.IN_HAND)
    await ended(task, stop)
    assert outlet.dropped == module.IN_HAND
    assert "its process took no point for 0.3 s" in caplog.text


async def test_a_sink_that_ends_is_started_again_and_told_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path, stop = tmp_path / "points", Stop()
    outlet = sink(TAKES.format(path=str(path), each="sys.exit(3)"), restart_s=(0.01,))
    task = asyncio.create_task(outlet.run(stop))
    for number in range(5):
        outlet.put(point(number))
        await until(lambda: outlet.dropped > number)  # noqa: B023 - awaited in this round
    await ended(task, stop)
    assert steps(path)[0] == 0
    assert len(steps(path)) > 1
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "sink troubled sink=fake reason=points are dropped: its process ended with them",
        "sink troubled sink=fake reason=its process ended with exit code 3; it is started again",
    ]


async def test_points_that_a_tracker_refuses_are_dropped_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = 'import sys\nfor _ in sys.stdin: print(\'{"why": "no login"}\', flush=True)'
    stop, outlet = Stop(), sink(code)
    task = asyncio.create_task(outlet.run(stop))
    for number in range(5):
        outlet.put(point(number))
    await until(lambda: outlet.dropped == 5)
    await ended(task, stop)
    assert [record.getMessage() for record in caplog.records] == [
        "sink troubled sink=fake reason=points are dropped: no login"
    ]


async def test_what_a_library_prints_is_no_outcome() -> None:
    code = "import sys\nprint('hello', flush=True)\nfor _ in sys.stdin: print('{}', flush=True)"
    stop, outlet = Stop(), sink(code)
    task = asyncio.create_task(outlet.run(stop))
    outlet.put(point(1))
    await until(lambda: outlet.taken)
    await ended(task, stop)
    assert (outlet.taken, outlet.dropped) == (1, 0)


async def test_a_program_that_cannot_be_started_is_told(caplog: pytest.LogCaptureFixture) -> None:
    stop = Stop()
    outlet = SinkOutlet("fake", ("/nowhere/python",), restart_s=(0.01,))
    task = asyncio.create_task(outlet.run(stop))
    outlet.put(point(1))
    await until(lambda: "FileNotFoundError" in caplog.text)
    await ended(task, stop)
    assert (outlet.taken, outlet.dropped) == (0, 1)


async def test_a_sink_that_finishes_slowly_has_its_time(tmp_path: Path) -> None:
    path, stop = tmp_path / "points", Stop()
    done = tmp_path / "done"
    slow_end = f"import time; time.sleep(2); open({str(done)!r}, 'w')"
    outlet = sink(TAKES.format(path=str(path), each="pass") + slow_end)
    task = asyncio.create_task(outlet.run(stop))
    outlet.put(point(1))
    await until(lambda: outlet.taken)
    await ended(task, stop)
    assert done.exists()
