"""Probes of a command that joined: it lives while it waits for its run, and is ready while its workers are at work."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.commands.remote.hosts import Hosts, end, hosts_at, wait_until

from rolloutmq.schemas.network.keys import Role


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with hosts_at(tmp_path, liveness_s=5.0) as hosts:
        yield hosts


def join(hosts: Hosts, address: str) -> tuple[str, ...]:
    way = ("--connect", address, "--key", str(hosts.root / "w.key"), "--code", str(hosts.code))
    return ("worker", "own", *way, "--name", "far", "--probe-dir", str(hosts.home / "probe"))


def shown(hosts: Hosts) -> set[str]:
    return {path.name for path in (hosts.home / "probe").glob("*")}


def touched_at(hosts: Hosts) -> float:
    return (hosts.home / "probe" / "live").stat().st_mtime


def test_a_command_lives_without_its_broker_and_is_ready_with_it(hosts: Hosts) -> None:
    hosts.key("w", Role.WORKER)
    joined = hosts.start(*join(hosts, f"tcp://127.0.0.1:{hosts.port}"))
    wait_until(lambda: shown(hosts) == {"live"}, "the command")
    broker = hosts.broker()
    wait_until(lambda: shown(hosts) == {"live", "ready"}, "workers at work")
    assert end(broker) == 0
    wait_until(lambda: shown(hosts) == {"live"}, "the end of the readiness")
    before = touched_at(hosts)
    wait_until(lambda: touched_at(hosts) > before + 3.0, "a sign of life without a broker")
    assert joined.poll() is None
    again = hosts.broker()
    wait_until(lambda: shown(hosts) == {"live", "ready"}, "workers at work again")
    assert end(joined) == 0, hosts.log()
    assert shown(hosts) == set()
    assert end(again) == 0


def test_a_worker_that_hangs_is_not_ready_and_restarted_after_its_limit(hosts: Hosts) -> None:
    broker = hosts.broker()
    hosts.key("w", Role.WORKER)
    joined = hosts.start(*join(hosts, hosts.address))
    wait_until(lambda: shown(hosts) == {"live", "ready"}, "workers at work")
    first = hosts.ready("own-far.0")["own-far.0"].pid
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: shown(hosts) == {"live"}, "the end of the readiness")
    wait_until(lambda: "environment.own.liveness_s: 5" in hosts.log(), "the end of the worker")
    wait_until(lambda: shown(hosts) == {"live", "ready"}, "another worker")
    assert hosts.ready("own-far.0")["own-far.0"].pid != first
    assert end(joined) == 0, hosts.log()
    assert end(broker) == 0


def test_probes_of_a_worker_of_a_run_directory_are_refused(hosts: Hosts) -> None:
    found = hosts.run("worker", "--run-dir", "x", "--worker", "own-0", "--probe-dir", "p")
    assert found.returncode == 2
    assert "needs --connect" in found.stderr
