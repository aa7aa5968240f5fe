"""The fixture for pytest, in a project that has nothing else; and what the helpers load."""

import subprocess
import sys
from pathlib import Path

import rolloutmq.testing

TEST = """
from rolloutmq import Group, Producer
from rolloutmq.testing import LocalBroker, assert_nothing_lost


def test_mine(rolloutmq_broker: LocalBroker) -> None:
    with Producer.blocking(rolloutmq_broker.run_dir, env="e", timeout_s=60) as producer:
        producer.send(Group.build("g-1", tokens=[[1, 2]], mask=[[0, 1]], scores=[1.0]), timeout_s=60)
    assert_nothing_lost(rolloutmq_broker, ["g-1", "g-2"])
"""


def python(*command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_one_line_brings_the_fixture_and_a_failure_names_the_group(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["rolloutmq.testing.fixtures"]\n')
    (tmp_path / "test_mine.py").write_text(TEST)
    options = ("-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:asyncio", "--basetemp=runs")
    done = python("-m", "pytest", *options, cwd=tmp_path)
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    assert "AssertionError: 1 lost: g-2 (never accepted)" in done.stdout
    assert "ledger.py" not in done.stdout  # the test's own line is shown, not ours
    (tmp_path / "test_mine.py").write_text(TEST.replace(', "g-2"', ""))
    done = python("-m", "pytest", *options, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_test_of_an_environment_loads_no_broker_and_no_pytest(tmp_path: Path) -> None:
    code = (
        "import sys; from rolloutmq.testing import ScriptedPolicy, play; print('environment', *sys.modules); "
        "from rolloutmq.testing import *; print('all', *sys.modules)"
    )
    lines = {
        line.split()[0]: set(line.split()) for line in python("-c", code, cwd=tmp_path).stdout.splitlines()
    }
    assert not {"zmq", "aiohttp", "pydantic", "uvloop", "torch"} & lines["environment"]
    assert not {"pytest", "torch"} & lines["all"]


def test_every_name_is_there() -> None:
    for name in rolloutmq.testing.__all__:
        assert getattr(rolloutmq.testing, name).__doc__
    assert dir(rolloutmq.testing) == sorted(rolloutmq.testing.__all__)
