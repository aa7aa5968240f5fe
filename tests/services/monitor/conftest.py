"""Events of a made-up run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import (
    LaneStatus,
    LedgerCounts,
    Pressure,
    StepDone,
    WorkerState,
    WorkerStatus,
)
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.training import BatchSettled


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    """An empty run directory."""
    return RunLayout(run_dir)


@pytest.fixture
def make_worker() -> Callable[..., WorkerStatus]:
    def make(name: str, **fields: Any) -> WorkerStatus:
        usual: dict[str, Any] = {
            "env": "sort3",
            "state": WorkerState.READY,
            "pid": 1,
            "host": "h",
            "in_hand": 8,
            "produced": 12,
            "abandoned": 0,
            "blocked_s": 0.0,
            "silent_s": 0.2,
            "draining": False,
            "error": "",
        }
        return WorkerStatus(worker=name, **(usual | fields))

    return make


@pytest.fixture
def make_lane() -> Callable[..., LaneStatus]:
    def make(env: str = "sort3", **fields: Any) -> LaneStatus:
        usual: dict[str, Any] = {"split": Split.TRAIN, "weight": 1.0, "min_share": 0.0, "max_staleness": 4}
        return LaneStatus(env=env, **(usual | fields))

    return make


@pytest.fixture
def make_pressure() -> Callable[..., Pressure]:
    def make(**fields: Any) -> Pressure:
        usual: dict[str, Any] = {
            "epoch": 1,
            "number": 1,
            "at": 0.0,
            "rollout_pressure": 1.5,
            "queued_sequences": 384,
            "batch_sequences": 256,
            "queued_groups": 24,
            "queued_bytes": 3 << 20,
            "leased_bytes": 1 << 20,
            "high_bytes": 256 << 20,
            "step": 7,
            "consumed_per_s": 2500.0,
            "produced_per_s": 2400.0,
            "staleness_max": 3,
            "trainer_wait": "",
            "ledger": LedgerCounts(accepted=50, queued=24, leased=16, trained=6, committed=4),
            "lanes": (),
            "workers": (),
        }
        return Pressure(**(usual | fields))

    return make


@pytest.fixture
def make_step() -> Callable[..., StepDone]:
    def make(step: int, reward: float = 0.5, **fields: Any) -> StepDone:
        usual: dict[str, Any] = {
            "run": "r",
            "incarnation": 0,
            "at": 0.0,
            "loss": 0.0,
            "tokens": 100,
            "groups": 16,
            "filtered": 0,
            "staleness_max": 2,
            "staleness_mean": 1.0,
            "pull_s": 0.0,
            "step_s": 0.1,
        }
        return StepDone(step=step, reward=reward, **(usual | fields))

    return make


@pytest.fixture
def make_settled() -> Callable[..., BatchSettled]:
    def make(step: int, reward: float = 0.5, **fields: Any) -> BatchSettled:
        usual: dict[str, Any] = {
            "run": "run",
            "incarnation": 0,
            "at": 0.0,
            "stepped": True,
            "sequences": 16,
            "tokens": 100,
            "trained": 4,
            "filtered": 0,
            "rejected": 0,
            "staleness_max": 2,
            "staleness_mean": 1.0,
        }
        return BatchSettled(step=step, reward=reward, **(usual | fields))

    return make
