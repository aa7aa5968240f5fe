"""Groups of every lane come through, and each lane has a CPU of its own."""

import pytest

from benchmarks.broker import throughput
from benchmarks.harness import stage
from benchmarks.sdk import lockstep


def test_groups_of_every_lane_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "WARM_UP_BLOCKS", 1)
    about = stage.config(durability="memory")
    played = lockstep.blocks([about, about], throughput.SMALL, 2)
    assert [len(block) for block in played] == [2, 2]
    assert all(us > 0 for block in played for us in block)
