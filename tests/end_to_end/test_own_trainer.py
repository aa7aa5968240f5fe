"""A trainer of one's own drives the shared weights: it learns, survives a kill unchanged, and every view agrees on it.

The trainer is the one that `rolloutmq init --trainer` writes.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.end_to_end.scenario import LiveRun
from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.launch.commands.init import write_project
from rolloutmq.launch.commands.records.ledger import check
from rolloutmq.launch.settings import load
from rolloutmq.schemas.errors import WireError
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.services.monitor.live.progress import describe
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.live.top import SHOWN
from rolloutmq.services.monitor.text.jsonl import read_lines

STEPS = 150
WITHIN_S = 540.0
SEQUENCES = 256


@contextmanager
def started(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def reported(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def last_step(layout: RunLayout) -> int:
    return max((line.version.step for line in read_lines(layout.settled, SettledBatch)), default=0)


async def watched(layout: RunLayout, board: RunState, run: "subprocess.Popen[bytes]") -> None:
    """Feed a board what `top` gets, until the run has ended."""
    loop = asyncio.get_running_loop()
    async with EventFeed(layout, SHOWN) as feed:
        while run.poll() is None:
            event = await feed.next(0.2)
            if event is not None:
                try:
                    board.feed(codec.decode_event(event[1]), loop.time())
                except WireError:
                    continue


@pytest.mark.extended
async def test_a_trainer_of_ones_own_learns_and_every_view_agrees_on_it(tmp_path: Path) -> None:
    project, layout = tmp_path / "mine", RunLayout(tmp_path / "run")
    write_project(project, "mine", trainer=True)
    cli = (sys.executable, "-m", "rolloutmq.launch.cli")
    up = (*cli, "up", str(project / "config.toml"), "--plain", "--run-dir", str(layout.root))
    train = (sys.executable, str(project / "trainer.py"), str(layout.root))
    board = RunState.of(load(project / "config.toml", environ={}, assignments=[f"trainer.steps={STEPS}"]))
    output = tmp_path / "up.out"
    with started(output, *up, "--set", f"trainer.steps={STEPS}") as run:
        async with asyncio.timeout(WITHIN_S) as limit:
            watching = asyncio.create_task(watched(layout, board, run))
            live = LiveRun(layout, run, limit.when() or 0.0)
            await asyncio.to_thread(live.wait_for, "a broker", layout.endpoints.exists)
            with started(tmp_path / "trainer.out", *train) as killed:
                await asyncio.to_thread(
                    live.wait_for, "half the steps", lambda: last_step(layout) >= STEPS // 2
                )
                killed.kill()
            with started(tmp_path / "trainer.out", *train) as again:
                assert await asyncio.to_thread(again.wait, WITHIN_S) == 0, (
                    tmp_path / "trainer.out"
                ).read_text()
            await watching
        assert run.wait() == 0, output.read_text()

    summary = json.loads(layout.summary.read_bytes())
    assert (summary["ended"], summary["steps"], summary["trainer_resumes"]) == (
        "the trainer is done",
        STEPS,
        1,
    )
    assert summary["reward_last"] > summary["reward_first"] + 0.15, "it learns"
    assert set(summary["learning"]) == {"loss", "entropy", "kl", "grad_norm"}
    # The ledger, the broker's log, the summary and the report count the same groups.
    groups = STEPS * SEQUENCES // 16
    ledger = await asyncio.to_thread(check, layout)
    assert not ledger.problems
    trained = [name for line in valid(layout) for name in line.trained]
    assert len(trained) == len(set(trained)) == groups
    assert (summary["groups_trained"], summary["groups_rewound"] > 0) == (groups, True)
    assert summary["staleness_max"] == max(max(line.staleness) for line in valid(layout)) <= 4
    assert summary["tokens"] >= groups * 16
    told = await asyncio.to_thread(reported, *cli, "report", str(layout.root))
    assert f"{groups} trained" in told
    assert f"in {STEPS} steps" in told
    assert "learning   loss " in told
    assert layout.report.stat().st_size > 20_000
    # What `top` showed at last: events may be lost, so its reward is of about the last steps.
    assert board.steps_done == STEPS
    assert board.reward(STEPS // 4) == pytest.approx(summary["reward_last"], abs=0.05)
    assert set(board.figures) == set(summary["learning"])
    assert f"step {STEPS}/{STEPS}  reward 0." in describe(board, asyncio.get_running_loop().time())


def valid(layout: RunLayout) -> list[SettledBatch]:
    """Return the batches behind the final policy."""
    kept: list[SettledBatch] = []
    for line in read_lines(layout.settled, SettledBatch):
        if line.resumed:
            kept = [one for one in kept if one.version.step <= line.version.step]
        else:
            kept.append(line)
    return kept
