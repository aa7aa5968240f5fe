"""Whole runs, started as a user starts them: they learn, they end, they survive, and nothing is lost.

Every scenario is `rolloutmq up` in a process of its own, with real workers, a real policy and real signals.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun, steps_logged
from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.launch.commands.records.ledger import check
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.services.process.identity import alive, find_marked
from rolloutmq.services.rewards.window import SharedWindow

ENDED_WITHIN_S = 300.0
RUBRIC = Path(__file__).parents[2] / "examples" / "rubric" / "rubric.toml"
PROMISED = {
    *("reward_first", "reward_last", "steps", "wall_s", "groups_accepted", "groups_trained"),
    *("groups_filtered", "groups_expired", "groups_dead", "groups_in_flight", "groups_lost"),
    *("groups_trained_twice", "staleness_max", "staleness_bound", "workers_min", "workers_max"),
}
"""What everybody may rely on in `summary.json`."""
Summary = dict[str, Any]


def run(
    run_dir: Path,
    *assignments: str,
    fault: Callable[[LiveRun], None] | None = None,
    resume: bool = False,
    within_s: float = ENDED_WITHIN_S,
    config: Path = scenario.QUICKSTART,
) -> tuple[int, Summary]:
    """Run to the end; whatever it was, no group is lost and no process is left."""
    flags = ["--resume"] if resume else []
    tokens: list[str] = []

    def watched(live: LiveRun) -> None:
        tokens.append(live.wait_for_process("broker").marker.partition("/")[0])
        if fault is not None:
            fault(live)

    code, summary = scenario.run(
        run_dir, assignments, flags=flags, config=config, fault=watched, deadline_s=within_s
    )
    assert summary["groups_lost"] == 0
    assert summary["groups_trained_twice"] == 0
    assert not find_marked(f"{tokens[0]}/")
    assert not RunLayout(run_dir).weights.exists()
    assert not RunLayout(run_dir).versions.exists()
    assert not list(RunLayout(run_dir).sockets.glob("[!l]*"))
    return code, summary


def accounted_for(summary: Summary) -> int:
    """Return how many groups are in any of the states of which a group is in one."""
    states = ("trained", "filtered", "expired", "dead", "discarded", "in_flight")
    return sum(summary[f"groups_{state}"] for state in states)


@pytest.mark.extended
def test_it_learns_and_ends_by_itself(tmp_path: Path) -> None:
    code, summary = run(tmp_path / "run", "trainer.steps=250")
    assert code == 0
    assert summary.keys() >= PROMISED
    assert summary["steps"] == 250
    assert summary["reward_first"] < 0.4
    assert summary["reward_last"] > 0.85
    assert summary["staleness_max"] <= summary["staleness_bound"] == 2
    assert summary["groups_accepted"] == accounted_for(summary)
    layout = RunLayout(tmp_path / "run")
    assert layout.report.read_bytes().startswith(b"\x89PNG")
    topics = {json.loads(line)["topic"] for line in layout.metrics.read_text().splitlines()}
    assert {"pressure", "step"} <= topics
    assert {path.stem for path in layout.logs.iterdir()} >= {"broker", "trainer", "inference", "sort3-0"}


@pytest.mark.extended
def test_an_interrupted_run_is_saved_and_resumed(tmp_path: Path) -> None:
    def interrupt(live: LiveRun) -> None:
        live.wait_for_step(30)
        live.process.send_signal(signal.SIGINT)

    code, summary = run(tmp_path / "run", fault=interrupt)
    assert code == 130
    assert 30 <= summary["steps"] < 400
    saved = summary["groups_in_flight"]
    assert saved > 0
    steps = summary["steps"] + 20
    code, summary = run(tmp_path / "run", f"trainer.steps={steps}", resume=True)
    assert code == 0
    assert summary["steps"] == steps
    assert summary["trainer_resumes"] == 1


def test_killed_processes_cost_a_pause_and_no_group(tmp_path: Path) -> None:
    def kill_one_after_another(live: LiveRun) -> None:
        live.wait_for_step(25)
        for victim in ("sort3-0", "inference", "trainer", "telemetry"):
            live.kill(victim, signal.SIGKILL)
        live.kill("sort3-1", signal.SIGUSR1)

    code, summary = run(
        tmp_path / "run",
        "trainer.steps=80",
        "trainer.checkpoint_interval=10",
        fault=kill_one_after_another,
    )
    assert code == 0
    assert summary["steps"] == 80
    assert summary["trainer_resumes"] == 1


@pytest.mark.extended
def test_a_killed_rank_of_the_trainer_takes_the_others_along_and_no_group_is_lost(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")

    def kill_each(live: LiveRun) -> None:
        for step, victim in ((12, "trainer.rank1"), (25, "trainer")):
            live.wait_for_step(step)
            live.kill(victim, signal.SIGKILL)

    code, summary = run(
        layout.root,
        "trainer.ranks=2",
        "trainer.steps=40",
        "trainer.checkpoint_interval=5",
        fault=kill_each,
        within_s=2 * ENDED_WITHIN_S,  # three starts, of two ranks that wait for each other
    )
    assert code == 0
    assert (summary["steps"], summary["trainer_resumes"]) == (40, 2)
    assert summary["groups_accepted"] == accounted_for(summary)
    assert check(layout).problems == []
    lines = [
        msgspec.json.decode(line, type=SettledBatch) for line in layout.trained.read_bytes().splitlines()
    ]
    lives = {life: [line for line in lines if line.version.incarnation == life] for life in (0, 1, 2)}
    assert [life[0].resumed for life in lives.values()] == [False, True, True]
    for life in lives.values():
        steps = [line.version.step for line in life]
        assert steps == list(range(steps[0], steps[-1] + 1))
    # The groups know the policy that sampled them: behind the one that learns, and not too far.
    staleness = {one for line in lines for one in line.staleness}
    assert max(staleness) in (1, 2)
    for rank in ("trainer", "trainer.rank1"):
        assert "error: another rank of the trainer has ended; see its log" in layout.log(rank).read_text()


@pytest.mark.extended
def test_a_rank_of_the_trainer_that_hangs_is_missed_and_the_run_goes_on(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")

    def stop(live: LiveRun) -> None:
        live.wait_for_step(12)
        live.kill("trainer.rank1", signal.SIGSTOP)

    code, summary = run(
        layout.root,
        "trainer.ranks=2",
        "trainer.rank_patience_s=15",
        "trainer.steps=20",
        "trainer.checkpoint_interval=5",
        fault=stop,
        within_s=2 * ENDED_WITHIN_S,
    )
    assert code == 0
    assert (summary["steps"], summary["trainer_resumes"]) == (20, 1)
    missed = "error: another rank of the trainer did not respond within 15 s (trainer.rank_patience_s)"
    assert missed in layout.log("trainer").read_text()
    hangs = "ending name=trainer.rank1 step=SIGKILL reason=hangs: trainer gave up after waiting 15 s for it"
    assert hangs in layout.log("up").read_text()


@pytest.mark.extended
def test_weights_by_way_of_the_disk_reach_the_server_and_survive_the_trainer(tmp_path: Path) -> None:
    """Each step is a version that groups are stamped with; a trainer or a server that is killed is a pause."""
    layout = RunLayout(tmp_path / "run")
    told: list[list[dict[str, Any]]] = []

    def look_and_kill(live: LiveRun) -> None:
        live.wait_for_step(1)
        told.append(proven(layout))
        live.kill("trainer", signal.SIGKILL)
        live.wait_for("the next life", lambda: b'"resumed":true' in layout.trained.read_bytes())
        before = live.wait_for_process("inference").pid
        live.kill("inference", signal.SIGKILL)
        live.wait_for("the next server", lambda: live.wait_for_process("inference").pid != before)
        live.wait_for_step(steps_logged(layout) + 30)
        live.process.send_signal(signal.SIGINT)

    code, summary = run(
        layout.root,
        "weights.backend=disk",
        "trainer.steps=100000",
        "trainer.checkpoint_interval=10",
        fault=look_and_kill,
    )
    assert code == 130
    assert summary["trainer_resumes"] == 1
    assert summary["staleness_max"] <= summary["staleness_bound"] == 2
    assert "attached backend=disk" in layout.log("inference").read_text()
    assert [one["what"] for one in told[0]] == ["manifest", "aliasing", "nonce", "digests", "served"]
    assert not [one for one in told[0] if one["needed"] and not one["fine"]]
    assert len(steps_sampled_from(layout)) > 30


def steps_sampled_from(layout: RunLayout) -> set[int]:
    """Steps of the policies that trained groups were sampled from, as their tokens are stamped."""
    lines = [json.loads(line) for line in layout.trained.read_text().splitlines()]
    return {line["version"][1] - 1 - stale for line in lines for stale in line.get("staleness", ())}


def proven(layout: RunLayout) -> list[dict[str, Any]]:
    """What `rolloutmq doctor --weights` finds."""
    command = [
        sys.executable,
        "-m",
        "rolloutmq.launch.cli",
        "doctor",
        "--weights",
        str(layout.root),
        "--json",
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    rungs: list[dict[str, Any]] = json.loads(found.stdout)
    return rungs


@pytest.mark.extended
def test_an_environment_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import sys\n"
        "from rolloutmq import SingleTurn\n"
        "class Broken(SingleTurn):\n"
        "    def task(self, rng):\n"
        "        if 'examination' not in sys.argv[0]: raise RuntimeError('no such dataset')\n"  # not in the trial
        "    def prompt(self, task): return ''\n"
        "    def score(self, task, completion): return 0.0\n"
    )
    config = tmp_path / "run.toml"
    config.write_text('[environment.broken]\nentry = "broken.py:Broken"\nmax_workers = 2\n')
    code, summary = scenario.run(tmp_path / "run", config=config, deadline_s=ENDED_WITHIN_S)
    assert code == 1
    assert summary["ended"] == (
        "environment.broken: 20 rollouts in a row failed, the last with: RuntimeError: no such dataset"
    )
    assert "Traceback" in RunLayout(tmp_path / "run").log("broken-0").read_text()


@pytest.mark.extended
def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    def start_another(live: LiveRun) -> None:
        live.wait_for("an owner", lambda: live.layout.owner.exists())
        with pytest.raises(scenario.ScenarioError):
            scenario.run(tmp_path / "run", deadline_s=30.0)
        refused.append((tmp_path / "run.out").read_text())
        assert alive(live.wait_for_process("broker"))
        live.process.send_signal(signal.SIGTERM)

    code, _ = run(tmp_path / "run", fault=start_another)
    assert code == 130
    assert "is in use by process" in refused[0]


@pytest.mark.extended
def test_a_detached_run_is_looked_at_steered_and_ended(tmp_path: Path) -> None:
    def rolloutmq(*arguments: str) -> str:
        command = [sys.executable, "-m", "rolloutmq.launch.cli", *arguments]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    def ready() -> set[str]:
        workers = json.loads(rolloutmq("status", str(run_dir), "--json"))["pressure"]["workers"]
        return {worker["worker"] for worker in workers if worker["state"] == "ready"}

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENDED_WITHIN_S
        while not condition():
            assert time.monotonic() < deadline

    run_dir = tmp_path / "run"
    told = rolloutmq("up", str(scenario.QUICKSTART), "--detach", "--run-dir", str(run_dir))
    assert "\ndashboard http://127.0.0.1:" in told
    try:
        until(lambda: len(ready()) == 2)
        rolloutmq("scale", "sort3", "3", "--run-dir", str(run_dir))
        until(lambda: len(ready()) == 3)
        drained = min(ready())
        rolloutmq("drain", drained, "--run-dir", str(run_dir))
        until(lambda: drained not in ready() and len(ready()) == 3)
        assert "draining" in rolloutmq("logs", drained, "--run-dir", str(run_dir))
    finally:
        rolloutmq("down", str(run_dir))
    summary = json.loads(RunLayout(run_dir).summary.read_bytes())
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    assert summary["workers_max"] >= 3


@pytest.mark.extended
def test_a_second_engine_comes_and_goes_by_scale(tmp_path: Path) -> None:
    def rolloutmq(*arguments: str) -> str:
        command = [sys.executable, "-m", "rolloutmq.launch.cli", *arguments]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    def at_work() -> list[str]:
        """Names of the engines that were busy within the last seconds."""
        return [one.name for one in engines_of(layout) if one.busy > 0.0 and not one.draining]

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENDED_WITHIN_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(scenario.POLL_S)

    layout = RunLayout(tmp_path / "run")
    flags = ["--set", "inference.max_engines=2", "--set", "trainer.steps=100000"]
    rolloutmq("up", str(scenario.QUICKSTART), "--detach", "--run-dir", str(layout.root), *flags)
    try:
        until(lambda: at_work() == ["inference"])
        rolloutmq("scale", "inference", "2", "--run-dir", str(layout.root))
        until(lambda: at_work() == ["inference", "inference-1"])
        told = json.loads(rolloutmq("status", str(layout.root), "--json"))
        assert [one["name"] for one in told["engines"]] == ["inference", "inference-1"]
        rolloutmq("scale", "inference", "1", "--run-dir", str(layout.root))
        until(lambda: not layout.engine("inference-1").exists())
        produced = told["pressure"]["ledger"]["accepted"]
        told = json.loads(rolloutmq("status", str(layout.root), "--json"))
        assert told["pressure"]["ledger"]["accepted"] > produced
        assert sum(worker["abandoned"] for worker in told["pressure"]["workers"]) == 0
    finally:
        rolloutmq("down", str(layout.root))
    summary = json.loads(layout.summary.read_bytes())
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    events = [json.loads(line) for line in layout.metrics.read_text().splitlines()]
    targets = [one["target"] for one in events if one["topic"] == "telemetry.scale.inference"]
    assert {1, 2} <= set(targets)
    assert targets[-1] == 1
    assert {one["topic"] for one in events} >= {"telemetry.engine.inference", "telemetry.engine.inference-1"}


@pytest.mark.extended
def test_unhealthy_rewards_end_a_run_that_says_so(tmp_path: Path) -> None:
    settings = ("health.window_steps=3", "health.saturated=0.01", 'health.stop_on=["saturation"]')
    code, summary = run(tmp_path / "run", "trainer.steps=400", *settings)
    assert code == 1
    assert summary["ended"].startswith("health.stop_on: saturation of sort3: ")
    assert "sort3.saturation" in summary["findings"]
    assert 3 <= summary["steps"] < 400
    assert accounted_for(summary) == summary["groups_accepted"]


@pytest.mark.extended
def test_workers_share_the_window_of_their_raters_through_kills(tmp_path: Path) -> None:
    def kill_a_worker(live: LiveRun) -> None:
        live.wait_for_step(5)
        live.kill(live.workers()[0], signal.SIGKILL)

    settings = ("trainer.steps=40", "environment.rubric.max_workers=2")
    code, summary = run(tmp_path / "run", *settings, fault=kill_a_worker, config=RUBRIC)
    assert code == 0
    assert "rubric.window_restarted" not in summary["findings"]
    layout = RunLayout(tmp_path / "run")
    names, size = ("order", "digits", "end"), 512
    window = SharedWindow(layout.ratings / "rubric.rewards.window", names, size)
    state = window.append(np.empty((0, len(names))), lambda _, marks: marks)
    assert state is not None
    assert (state.restarted, len(state.ratings)) == ("", size)
    assert state.seen % 16 == 0  # whole groups only
    assert state.seen >= 16 * summary["groups_accepted"]
