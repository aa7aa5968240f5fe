"""Groups of every lane come through, and each lane has a CPU of its own."""

import asyncio
import random

import pytest

from benchmarks.broker import throughput
from benchmarks.harness import stage
from benchmarks.sdk import lockstep
from rolloutmq.schemas.config.run import RunConfig


def test_groups_of_every_lane_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "WARM_UP_BLOCKS", 1)
    about = stage.config(durability="memory")
    played = lockstep.blocks([about, about], throughput.SMALL, 2)
    assert [len(block) for block in played] == [2, 2]
    assert all(us > 0 for block in played for us in block)


def test_an_idle_lane_publishes_no_more_for_each_group_than_a_busy_broker() -> None:
    about = stage.config()
    alone = lockstep._as_if_alone(about, 3)
    assert alone.telemetry.interval_s == 3 * about.telemetry.interval_s
    assert RunConfig.model_validate(alone.model_dump()) == alone


def test_neighbors_of_a_lane_change() -> None:
    played: list[int] = []

    class Lane:
        def __init__(self, number: int) -> None:
            self.number = number

        async def cycle(self) -> None:
            played.append(self.number)

        def group_us(self) -> float:
            return 1.0 + self.number

    async def blocks() -> list[tuple[float, ...]]:
        rng = random.Random(0)
        return [await lockstep._block([Lane(0), Lane(1), Lane(2)], rng) for _ in range(20)]  # type: ignore[list-item]

    assert set(asyncio.run(blocks())) == {(1.0, 2.0, 3.0)}
    halves = [tuple(played[at : at + 3]) for at in range(0, len(played), 3)]
    assert len(set(halves)) == 6
    assert halves[1::2] == [one[::-1] for one in halves[::2]]
