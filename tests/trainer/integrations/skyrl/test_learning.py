"""Whole runs: workers, an inference server, and SkyRL's fully asynchronous loop: it learns, and survives kills."""

import json
import logging
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.integrations.skyrl.support import (
    ENDED_WITHIN_S,
    PYTHON,
    ROOT,
    environment,
    missing,
    verify,
)

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.inspect.verify import recount
from rolloutmq.services.monitor.text.jsonl import read_lines

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

EXAMPLE = ROOT / "examples" / "skyrl_sort"
LEARNER = Path(__file__).with_name("learner.py")
STEPS = 300
GROUPS = 16
WITHIN_S = 400.0


def test_a_policy_learns_in_skyrls_loop_from_workers_and_engines(run_dir: Path) -> None:
    output: list[str] = []

    def train(live: LiveRun) -> None:
        live.wait_for_process("broker")
        live.wait_for("address of the broker", RunLayout(run_dir).endpoints.exists)
        ended = subprocess.run(
            [str(PYTHON), str(EXAMPLE / "skyrl_sort.py"), str(run_dir), str(STEPS)],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ENDED_WITHIN_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        output.append(ended.stdout)
        live.process.send_signal(signal.SIGINT)

    _, summary = scenario.run(run_dir, config=EXAMPLE / "skyrl_sort.toml", fault=train, deadline_s=WITHIN_S)
    rewards = [float(one) for one in re.findall(r"^step \d+: reward ([\d.]+)", output[0], re.MULTILINE)]
    greedy = re.search(r"^greedy score of held-out tasks: ([\d.]+)$", output[0], re.MULTILINE)
    assert len(rewards) == STEPS // 20
    assert rewards[0] < 0.4
    assert greedy is not None
    assert float(greedy[1]) >= 0.8, output[0]
    assert summary["groups_trained"] == STEPS * GROUPS
    assert summary["tokens"] > STEPS * GROUPS, "told with each step, as `top` and `report` show"
    assert summary["groups_lost"] == summary["groups_filtered"] == summary["groups_trained_twice"] == 0
    verify(run_dir)


def test_thirty_steps_with_kills_of_everything_lose_no_group(run_dir: Path) -> None:
    """A worker, the broker, the trainer and the inference server are killed on the way, the broker twice."""
    steps = 30
    record, output = run_dir.parent / "record.jsonl", run_dir.parent / "learner.log"

    def life() -> subprocess.Popen[bytes]:
        words = [str(PYTHON), str(LEARNER), str(run_dir), str(record), str(steps)]
        with output.open("ab") as log:
            return subprocess.Popen(
                words, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def train(live: LiveRun) -> None:
        live.wait_for_process("broker")
        live.wait_for("address of the broker", RunLayout(run_dir).endpoints.exists)
        with life() as first:
            try:
                live.wait_for_step(3)
                live.kill("sort3-0", signal.SIGKILL)
                live.wait_for_step(8)
                live.kill("broker", signal.SIGKILL)
                live.wait_for_step(11)  # between two checkpoints: SkyRL cannot resume from half of one
            finally:
                first.kill()
        with life() as second:
            try:
                live.wait_for("second life", lambda: any(line.resumed for line in settled(run_dir)))
                live.wait_for_step(18)
                live.kill("inference", signal.SIGKILL)
                live.wait_for_step(23)
                live.kill("broker", signal.SIGKILL)
                assert second.wait(ENDED_WITHIN_S) == 0, output.read_text()
            finally:
                second.kill()
        live.process.send_signal(signal.SIGINT)

    assignments = ["evaluation.enabled=false"]
    _, summary = scenario.run(
        run_dir, assignments, config=EXAMPLE / "skyrl_sort.toml", fault=train, deadline_s=WITHIN_S
    )
    verdict = verify(run_dir)
    [resumed] = [line.version for line in settled(run_dir) if line.resumed]
    lived = [json.loads(line) for line in record.read_text().splitlines()]
    assert resumed.incarnation == 1
    assert resumed.step >= 10
    kept = kept_steps(lived, resumed.step)
    assert [one["step"] for one in kept] == list(range(1, steps + 1))
    learned = {name for one in kept for names in one["groups"].values() for name in names}
    prompts = [uid for one in kept for uid in (*one["groups"], *one["masked"])]
    assert sorted(prompts, key=int) == list(map(str, range(steps * GROUPS))), "each prompt once"
    assert len(learned) == sum(len(one["groups"]) for one in kept), "each group once"

    model = recount(RunLayout(run_dir).journal)
    assert len(model.states) == model.accepted, "the history names every group"
    trained = {
        model.ids[order]
        for order, state in model.states.items()
        if state in {GroupState.TRAINED, GroupState.COMMITTED}
    }
    assert trained == learned, "the ledger has as trained what the steps learned from, and nothing else"
    others = {state for state in model.states.values()} - {GroupState.TRAINED, GroupState.COMMITTED}
    assert others <= {GroupState.FILTERED, GroupState.QUEUED}, verdict
    assert summary["groups_lost"] == summary["groups_trained_twice"] == summary["groups_acked_twice"] == 0
    assert summary["groups_trained"] == len(learned)
    assert summary["trainer_resumes"] == 1
    masked = sum(len(one["masked"]) for one in kept)
    logging.getLogger(__name__).info("masked=%d resumed=%s summary=%s %s", masked, resumed, summary, verdict)


def settled(run_dir: Path) -> list[SettledBatch]:
    """Return the lines of the trainer's log."""
    return list(read_lines(RunLayout(run_dir).trained, SettledBatch))


def kept_steps(lived: list[dict[str, Any]], resumed: int) -> list[dict[str, Any]]:
    """Return the steps of the final policy: those of the first life up to its checkpoint, and those of the second."""
    numbers = [one["step"] for one in lived]
    second = max(place for place, number in enumerate(numbers) if number == resumed + 1)
    return [one for one in lived[:second] if one["step"] <= resumed] + lived[second:]
