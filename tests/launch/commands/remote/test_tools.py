"""Commands of another host: they show a run, and change it, by its address and a key."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.commands.remote.hosts import Hosts, end, hosts_at, wait_until

from rolloutmq.bus.rundir import load_run
from rolloutmq.launch.commands.remote.view import MirroredView
from rolloutmq.schemas.errors import BrokerUnavailableError
from rolloutmq.schemas.files import Connection
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with hosts_at(tmp_path) as hosts:
        yield hosts


def test_commands_show_and_change_a_run(hosts: Hosts) -> None:
    broker = hosts.broker()
    way = ("--connect", hosts.address, "--key", str(hosts.key("a", Role.ADMIN)))
    status = hosts.run("status", "--json", *way)
    assert json.loads(status.stdout)["run"] == "sums", status.stderr
    for words, printed in (
        (("status",), "run      sums"),
        (("workers",), "no workers"),
        (("top", "--once", "--json"), '"sums"'),
        (("set", "env.own.weight=2"), "environment.own.weight = 2.0"),
        (
            ("scale", "own", "3"),
            "own: pinned to 3 workers: kept by the broker; the orchestrator of the run's host",
        ),
    ):
        found = hosts.run(*words, *way)
        assert found.returncode == 0, found.stderr
        assert printed in found.stdout
    with_drain = hosts.run("drain", "own-0", *way)
    assert (with_drain.returncode, "no such worker" in with_drain.stderr) == (1, True)
    tail = hosts.start("tail", "pressure", *way, log="tail.log")
    wait_until(lambda: '"topic":"pressure"' in hosts.log("tail.log"), "an event")
    end(tail, signal.SIGINT)
    assert not list(hosts.home.glob("rolloutmq-view-*")), "the directories of commands are removed"
    assert end(broker) == 0


def test_a_view_follows_the_run_until_it_is_closed(hosts: Hosts) -> None:
    broker = hosts.broker()
    key = hosts.key("a", Role.ADMIN)
    view = MirroredView(Connection(addresses=(hosts.address,), key=str(key)))
    try:
        config, layout = load_run(view.wait(30.0))
        assert config.run.name == "sums"
        fate = fate_of(layout)
        assert (fate.life, fate.broker) == (RunLiveness.LIVING, True)
        assert not layout.http_token.exists(), (
            "no server of the run gets a token that a command does not need"
        )
    finally:
        view.close()
    assert not layout.root.exists()
    assert end(broker) == 0


def test_a_run_that_does_not_answer_is_told() -> None:
    view = MirroredView(Connection(addresses=("tcp://127.0.0.1:1",)))
    try:
        with pytest.raises(BrokerUnavailableError, match=r"tcp://127\.0\.0\.1:1"):
            view.wait(0.2)
    finally:
        view.close()
