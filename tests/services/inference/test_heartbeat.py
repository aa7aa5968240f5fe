"""The heartbeat of an engine."""

import asyncio
import os
from pathlib import Path

import pytest

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.services.inference import heartbeat
from rolloutmq.services.inference.heartbeat import BUSY_OVER_S, BusyTime, EngineHeartbeat


def test_busy_is_the_part_of_the_last_seconds() -> None:
    busy = BusyTime()
    assert busy.part(0.0, 100.0) == 0.0
    for second in range(1, 21):
        part = busy.part(0.25 * second, 100.0 + second)
        assert part == pytest.approx(0.25)
    for second in range(21, 21 + round(BUSY_OVER_S)):
        part = busy.part(5.0 + (second - 20), 100.0 + second)
    assert part == pytest.approx(1.0)  # what was before is out of the window
    assert busy.part(5.0 + BUSY_OVER_S, 121.0 + BUSY_OVER_S) < 1.0


def test_busy_is_a_part_whatever_the_clocks_say() -> None:
    busy = BusyTime()
    busy.part(0.0, 5.0)
    assert busy.part(3.0, 5.0) == 0.0
    assert busy.part(9.0, 6.0) == 1.0


async def test_it_says_how_it_is_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    path = tmp_path / "inference-1.json"
    in_hand = [3]
    one = EngineHeartbeat(path, "inference-1", "http://x", lambda: 0.0, lambda: in_hand[0], lambda: "torn")
    task = asyncio.create_task(one.run())
    try:
        async with asyncio.timeout(30):
            while (told := read_json(path, InferenceAddress)) is None or told.number < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (told.url, told.name, told.pid, told.in_hand) == ("http://x", "inference-1", os.getpid(), 3)
        assert (told.draining, told.trouble) == (False, "torn")
    finally:
        task.cancel()
        await asyncio.wait({task})
    in_hand[0], one.draining = 0, True
    one.publish()
    last = read_json(path, InferenceAddress)
    assert last is not None
    assert (last.in_hand, last.draining) == (0, True)


def test_a_disk_that_takes_nothing_is_said_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    EngineHeartbeat(
        tmp_path / "gone" / "inference.json", "inference", "http://x", lambda: 0.0, lambda: 0
    ).publish()
    assert "address file not written" in caplog.text
