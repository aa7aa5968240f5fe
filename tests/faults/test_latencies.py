"""Latencies of a run of processes: without a journal, and with workers whose host has another clock."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from tests.faults.support.fleet import PacedTrainer
from tests.faults.support.processes import LIMIT_S, wait_until
from tests.faults.support.staff import GROUP, Staffed
from tests.faults.test_profile import telemetry

BATCH: Final = 4 * GROUP
ROLLOUT_S: Final = 0.2
AHEAD_S: Final = 100.0
"""Seconds that the broker's clock is ahead of that of the other host."""
ELSEWHERE: Final = f"""
import os

if "worker" in open("/proc/self/cmdline").read().split("\\0"):
    import socket, time

    true = time.time
    time.time = lambda: true() - {AHEAD_S}
    socket.gethostname = lambda: "elsewhere"
"""
"""Gives the workers another host's name and clock."""


def told(run_dir: Path, *options: str) -> str:
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "profile", str(run_dir), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(run_dir: Path, by: str) -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[str, Any] = json.loads(told(run_dir, "--by", by, "--json"))
    return {(one[by], one["hop"]): one for one in found["rows"]}


def hops(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {one["hop"]: one for one in json.loads(told(run_dir, "--json"))["hops"]}


def run_until(staffed: Staffed, run_dir: Path, until: Callable[[], bool], durability: str) -> None:
    """Let two workers roll out and a trainer train until the record has what is waited for."""
    env = {
        "entry": "envs.py:Slow",
        "options": {"own_s": ROLLOUT_S},
        "min_workers": 2,
        "max_workers": 2,
        "concurrency": 2,
    }
    with ExitStack() as stack:
        stack.enter_context(staffed(e=env, batch=BATCH, broker={"durability": durability}))
        stack.enter_context(telemetry(run_dir))
        stack.enter_context(PacedTrainer(run_dir, BATCH, 1e6))
        wait_until(until, "latencies of a run")


def recorded(run_dir: Path, *words: str) -> bool:
    """Return whether the record has a line of latencies with all of these words."""
    lines = (
        (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").exists() else []
    )
    return any('"latency_sample"' in line and all(word in line for word in words) for line in lines)


def test_without_a_journal_hops_and_rates_come_from_the_samples(staffed: Staffed, run_dir: Path) -> None:
    def both() -> bool:
        workers = all(recorded(run_dir, f'"name":"e-{number}"') for number in range(2))
        return workers and recorded(run_dir, '"name":"broker"', '"train"')

    run_until(staffed, run_dir, both, "memory")
    found = hops(run_dir)
    assert found.keys() >= {"rollout", "send", "queue", "train"}
    rollout = found["rollout"]
    assert 0.75 * ROLLOUT_S <= rollout["p50_s"] <= 3 * ROLLOUT_S
    assert rollout["slowest"].startswith("e-")
    assert 0 < rollout["groups_per_s"] <= 4 / (0.8 * ROLLOUT_S)
    assert rollout["tokens_per_s"] == pytest.approx(rollout["groups_per_s"] * GROUP * 8)
    assert "sampled" in told(run_dir, "--json")
    assert "no hops" not in told(run_dir)
    of_workers = rows(run_dir, "worker")
    assert of_workers.keys() == {("e-0", "rollout"), ("e-1", "rollout")}
    # Each side counts every rollout; a sample or a group may have been under way at the end.
    of_all = sum(one["count"] for one in of_workers.values())
    assert 0 < of_all <= rollout["groups"] + 40
    assert len({label for label, _ in rows(run_dir, "host")}) == 1


def test_the_way_from_a_host_with_another_clock_is_corrected(
    staffed: Staffed, run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def both() -> bool:
        return recorded(run_dir, '"clock_error_s":0.') and recorded(run_dir, '"name":"e-', '"rollout"')

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ELSEWHERE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run_until(staffed, run_dir, both, "os")
    send = hops(run_dir)["send"]
    assert 0 < send["clock_error_s"] < AHEAD_S / 10
    assert send["slowest_s"] < AHEAD_S / 2  # by the clocks alone each took longer than AHEAD_S
    assert ("elsewhere", "rollout") in rows(run_dir, "host")
