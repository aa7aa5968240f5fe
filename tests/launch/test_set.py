"""`rolloutmq set`: the real command against a real broker, which is killed and keeps what was set."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.support.processes import BrokerProcess, config, status

from rolloutmq.launch.commands import steer
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.wire.control import Setting


def rolloutmq(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rolloutmq.launch.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def changes(run_dir: Path) -> dict[str, tuple[Setting, Setting]]:
    return {one.key: (one.configured, one.now) for one in status(run_dir).changed}


def test_what_is_set_outlives_kill_9_and_status_shows_it(run_dir: Path) -> None:
    with BrokerProcess(run_dir, config()) as broker:
        done = rolloutmq("set", "env.e.weight=2", "broker.lease_s=60", "--run-dir", run_dir)
        assert (done.returncode, done.stdout) == (0, "environment.e.weight = 2.0\nbroker.lease_s = 60.0\n")
        broker.kill_and_start()
        told = changes(run_dir)
        assert told == {"environment.e.weight": (1.0, 2.0), "broker.lease_s": (120.0, 60.0)}
        shown = rolloutmq("status", run_dir).stdout
        assert "set      environment.e.weight = 2.0, configured 1.0\n" in shown

        refused = rolloutmq("set", "env.e.weight=5", "env.e.stale=keep", "--run-dir", run_dir)
        assert refused.returncode == 2
        assert refused.stderr.startswith("rolloutmq: environment.e.stale: must be 'drop' or 'pass'")
        assert changes(run_dir) == told
        broker.kill_and_start()
        assert changes(run_dir) == told


@pytest.mark.parametrize(
    ("assignments", "problem"),
    [
        (["weight"], "must be key=value"),
        (["env.e.weight=[1]"], r"env\.e\.weight: must be a number, a string, true or false"),
        (["env.e.weight=1", "env.e.weight=2"], "is given twice"),
    ],
)
def test_what_is_no_assignment_is_refused_before_anybody_is_asked(
    assignments: list[str], problem: str, run_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        steer.set_values(run_dir, assignments)
