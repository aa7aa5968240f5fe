"""The generator beside other processes of its name: one that only evaluates, and one that has taken its place."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tests.trainer.integrations.skyrl.support import SIZE, Stage, config, missing, play, run, workers
from tests.trainer.integrations.skyrl.test_training import counts
from torch import nn

from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.server import running_broker
from rolloutmq.trainer.integrations.task_feed.feed import Feed
from rolloutmq.trainer.weights.disk import DiskShare

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

LIMIT_S = 120.0


class Silent(dict[str, str]):
    """Fates of tasks: none is answered behind the first answers, so the trainer waits."""

    def __init__(self, stage: Stage, answers: int) -> None:
        super().__init__()
        self._stage, self._answers = stage, answers

    def get(self, _uid: str, default: str = "") -> str:  # type: ignore[override]
        return "silent" if len(self._stage.answered) >= self._answers else default


def training(run_dir: Path, resume: PolicyVersion) -> AbstractAsyncContextManager[Feed]:
    return Feed.open(
        run_dir, training="skyrl", batch_sequences=SIZE, deadline_s=LIMIT_S, resume=resume, timeout_s=LIMIT_S
    )


async def test_a_process_that_only_evaluates_leaves_a_live_training_alone(run_dir: Path) -> None:
    stage = Stage(run_dir, run_dir.parent / "weights.json", {})
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    share = DiskShare.create(module, stage.weights, version=PolicyVersion())
    try:
        with running_broker(config(), RunLayout(run_dir)):
            async with workers(stage), training(run_dir, PolicyVersion()) as live:
                spec = {"run_dir": str(run_dir), "size": SIZE}
                code, output = await run(Path(__file__).with_name("evaluator.py"), spec)
                assert code == 0, output
                answer = await live.ask("1", "skyrl/train/e0/1", "mine", {"uid": "1"}, SIZE)
                assert answer.group is not None, answer
                await live.settle(["1"], (), PolicyVersion(0, 1))
    finally:
        share.close(unlink=True)
    evaluated, unstarted, empty, closed = json.loads(output.splitlines()[-1])
    assert evaluated == ["stop"]
    assert unstarted == closed == ["closed"]
    assert empty == []


async def test_a_step_for_which_nothing_came_ends_the_training_with_the_reason(run_dir: Path) -> None:
    """SkyRL would step on the masked rows, and publish what has become NaN."""
    stage = Stage(run_dir, run_dir.parent / "weights.json", {})
    stage.fates = Silent(stage, 8)
    with running_broker(config(durability="os"), RunLayout(run_dir)):
        async with workers(stage):
            plan = {"weights": str(stage.weights), "batch": 4, "rows": 40, "kind": "async", "deadline_s": 5.0}
            played = await play(run_dir, **plan)
    assert played.code != 0
    assert "generator.bus.deadline_s: step" in played.output, played.output[-4000:]
    assert f"(got {4 * SIZE} deadline); raise it" in played.output
    steps = played.of("step")
    assert len(steps) >= 2
    assert all("stop" in step["stop_reasons"] for step in steps)


async def test_a_trainer_whose_place_is_taken_takes_no_further_step(run_dir: Path) -> None:
    """SkyRL would take a step on the masked rows and publish its weights before the settlement fails."""
    stage = Stage(run_dir, run_dir.parent / "weights.json", {})
    stage.fates = Silent(stage, 8)
    with running_broker(config(durability="os"), RunLayout(run_dir)) as broker:
        async with workers(stage):
            plan = {"weights": str(stage.weights), "batch": 4, "rows": 40, "kind": "async"}
            playing = asyncio.create_task(play(run_dir, **plan))
            async with asyncio.timeout(LIMIT_S):
                while (await counts(broker)).pressure.ledger.trained < 8:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.1)
            async with training(run_dir, PolicyVersion(7, 0)):
                played = await playing
    assert played.code != 0
    assert "another process registered under this name" in played.output, played.output[-4000:]
    assert {reason for step in played.of("step") for reason in step["stop_reasons"]} == {"stop"}
