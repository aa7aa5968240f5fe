"""`rolloutmq profile` names the bottleneck that was planted: runs of processes, each limited by one thing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from tests.faults.support.fleet import ENGINES, PacedTrainer, first_engine
from tests.faults.support.processes import LIMIT_S, wait_until
from tests.faults.support.staff import GROUP, Staffed

from rolloutmq.schemas.files import RunLayout

SLOTS: Final = 2
BATCH: Final = 8 * GROUP
FAST: Final = 1e6
"""Sequences a second of a trainer that takes no time."""
BATCHES: Final = 12
"""Batches after which a bottleneck shows in the sums, the first ones included."""
ROLLOUT_S: Final = 0.5
ANSWERS_PER_S: Final = 8.0


class Plant(NamedTuple):
    """A run with one bottleneck.

    Attributes:
        change: Beginning of the advice.
        env: Environment `e`.
        per_s: Sequences a second of the trainer.
        broker: Section `broker`.
        served: Rollouts need an inference server, which answers 8 requests a second.
        batches: Batches after which the bottleneck shows.
    """

    change: str
    env: dict[str, Any]
    per_s: float
    broker: dict[str, Any] = {}
    served: bool = False
    batches: int = BATCHES


def workers(
    count: int, entry: str = "envs.py:Slow", own_s: float = ROLLOUT_S, **about: Any
) -> dict[str, Any]:
    """Return an environment with so many workers, whose rollouts take so long."""
    options = {"own_s": own_s}
    fixed = {"min_workers": count, "max_workers": count, "concurrency": SLOTS}
    return {"entry": entry, "options": options, **fixed, **about}


PLANTS: Final = {
    "rollouts": Plant("more workers", workers(2), FAST),
    "trainer": Plant("a faster trainer", workers(4), 4.0),
    "inference": Plant(
        "more inference", workers(8, "envs.py:Served", max_workers=20), FAST, served=True, batches=50
    ),
    "mark": Plant("a larger mark", workers(8), BATCH / ROLLOUT_S, {"high_groups": 9}),
    "groups": Plant("smaller groups", workers(2, own_s=0.02, group_size=3), FAST, {"exact_wait_s": 1.0}),
}


@contextmanager
def telemetry(run_dir: Path) -> Iterator[None]:
    """Record the events of a run for as long as the block lasts."""
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "telemetry", "--run-dir", str(run_dir)]
    process = subprocess.Popen(command)
    try:
        wait_until(RunLayout(run_dir).metrics.exists, "the record of events")
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def profile(run_dir: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "profile", str(run_dir), "--json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(PLANTS))
def test_the_planted_bottleneck_is_named(staffed: Staffed, run_dir: Path, name: str) -> None:
    plant = PLANTS[name]
    program, about = (
        ((), {})
        if not plant.served
        else (
            ((*ENGINES, str(ANSWERS_PER_S)),),
            {"inference": {"kind": "tiny", "max_engines": 1}},
        )
    )
    with ExitStack() as stack:
        if plant.served:
            stack.enter_context(first_engine(run_dir, ANSWERS_PER_S))
        stack.enter_context(staffed(*program, e=plant.env, batch=BATCH, broker=plant.broker, **about))
        stack.enter_context(telemetry(run_dir))
        trainer = stack.enter_context(PacedTrainer(run_dir, BATCH, plant.per_s))
        wait_until(lambda: trainer.pulled >= plant.batches, "batches")
    found = profile(run_dir)
    first = found["advice"][0]
    assert first["change"].startswith(plant.change), found
    hops = {one["hop"]: one for one in found["hops"]}
    assert hops.keys() >= {"rollout", "queue", "train"}
    if plant.env["options"]["own_s"] == ROLLOUT_S and not plant.served:
        assert 0.8 * ROLLOUT_S <= hops["rollout"]["p50_s"] <= 2 * ROLLOUT_S
