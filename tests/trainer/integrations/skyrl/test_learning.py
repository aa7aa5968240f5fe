"""A whole run: workers, an inference server, and SkyRL's fully asynchronous loop, which learns to sort."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.trainer.integrations.skyrl.support import ENDED_WITHIN_S, PYTHON, ROOT, missing, verify

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from rolloutmq.schemas.files import RunLayout

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

EXAMPLE = ROOT / "examples" / "skyrl_sort"
STEPS = 300
GROUPS = 16


def test_a_policy_learns_in_skyrls_loop_from_workers_and_engines(run_dir: Path) -> None:
    output: list[str] = []

    def train(live: LiveRun) -> None:
        live.wait_for_process("broker")
        live.wait_for("address of the broker", RunLayout(run_dir).endpoints.exists)
        ended = subprocess.run(
            [str(PYTHON), str(EXAMPLE / "skyrl_sort.py"), str(run_dir), str(STEPS)],
            env=os.environ
            | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "LOG_LEVEL": "WARNING"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ENDED_WITHIN_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        output.append(ended.stdout)
        live.process.send_signal(signal.SIGINT)

    _, summary = scenario.run(run_dir, config=EXAMPLE / "skyrl_sort.toml", fault=train, deadline_s=400.0)
    rewards = [float(one) for one in re.findall(r"^step \d+: reward ([\d.]+)", output[0], re.MULTILINE)]
    greedy = re.search(r"^greedy score of held-out tasks: ([\d.]+)$", output[0], re.MULTILINE)
    assert len(rewards) == STEPS // 20
    assert rewards[0] < 0.4
    assert greedy is not None
    assert float(greedy[1]) >= 0.8, output[0]
    assert summary["groups_trained"] == STEPS * GROUPS
    assert summary["tokens"] > STEPS * GROUPS, "told with each step, as `top` and `report` show"
    assert summary["groups_lost"] == summary["groups_filtered"] == 0
    verify(run_dir)
