"""Programs of somebody else's on real Ray: they reach the gateway from their nodes, and are workers like ours."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.services.orchestrator.cluster.ray.nodes import ROOT, Run, directories, raylet_of, wait_until

from rolloutmq.services.process.identity import MARKER, find_marked, runs

Start = Callable[..., Run]

pytestmark = [pytest.mark.rival, pytest.mark.timeout(900)]

CONFIG = """
[run]
name = "programs"

[environment.counter]
command = [
    "sh", "-c", 'setsid sleep 1200 & exec "$@"', "sh",
    "{python}", "counter.py", "{{gateway_url}}", "{record}/{{worker}}", "0.05", "10",
]
group_size = 2
concurrency = 1
min_workers = 2
max_workers = 2
drain_quiet_s = 0.5

[gateway]
enabled = true
port = 0

[inference]
kind = "none"

[trainer]
batch_sequences = 4
"""


def test_programs_deliver_from_their_nodes(start: Start, tmp_path: Path) -> None:
    before = directories()
    code, record = tmp_path / "code", tmp_path / "record"
    code.mkdir()
    record.mkdir()
    shutil.copy(ROOT / "tests/services/programs/counter.py", code)
    (code / "run.toml").write_text(CONFIG.format(python=sys.executable, record=record))
    run = start("trainer.steps=400", "orchestrator.stable_s=3", config=code / "run.toml")
    run.progresses()
    first = run.workers()
    assert sorted(first) == ["counter-0", "counter-1"]
    assert raylet_of(first["counter-0"]) != os.getpid()
    (url,) = [word for word in psutil.Process(first["counter-0"]).cmdline() if "/w/counter-0" in word]
    assert "127.0.0.1" not in url
    assert (run.layout.root / "http_token").read_text().strip() not in url
    os.kill(first["counter-0"], signal.SIGKILL)
    wait_until(lambda: run.workers().get("counter-0", 0) not in {0, first["counter-0"]}, "its next life")
    run.progresses()
    killed = psutil.Process(run.workers()["counter-0"])
    marker = killed.environ()[MARKER]
    wait_until(lambda: len(find_marked(marker)) == 2, "the program and its helper")
    killed.parent().kill()
    wait_until(lambda: not find_marked(marker), "the end of what the killed actor had")
    wait_until(lambda: run.workers().get("counter-0", 0) not in {0, killed.pid}, "its next life")
    run.progresses()
    second = run.workers()
    assert second["counter-1"] == first["counter-1"]
    assert run.ends() == 0, run.told
    assert "step=SIGKILL" not in run.layout.log("orchestrator").read_text(), "SIGTERM is enough"
    summary = run.summary()
    assert (summary["steps"], summary["groups_lost"], summary["groups_trained_twice"]) == (400, 0, 0)
    assert all(file.read_text() for file in record.iterdir())
    assert not any(map(runs, second.values()))
    assert directories() <= before
