"""Commands of another host: they show a run, and change it, by its address and a key."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.commands.remote.hosts import Hosts, end, hosts_at, wait_until
from typer.testing import CliRunner

from rolloutmq.bus.rundir import load_run
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.mirror import mirror
from rolloutmq.launch.cli import app
from rolloutmq.launch.commands.remote.view import LOCK, PREFIX, MirroredView
from rolloutmq.schemas.errors import BrokerUnavailableError, KeyRefusedError, RefusedError
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


def test_the_directory_of_a_killed_view_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nobody = Connection(addresses=("tcp://127.0.0.1:1",))
    killed, young, old, other = (tmp_path / f"{PREFIX}{name}" for name in ("killed", "young", "old", "other"))
    for directory in (killed, young, old):
        directory.mkdir()
    (killed / LOCK).touch()
    os.utime(old, (1.0, 1.0))
    other.write_text("a file")
    first, second = MirroredView(nobody), MirroredView(nobody)
    try:
        left = {path for path in tmp_path.iterdir() if path not in {young, other}}
        assert len(left) == 2, "those of living processes stay"
        assert not left & {killed, old}
    finally:
        first.close()
        second.close()
    assert {*tmp_path.iterdir()} == {young, other}


def test_a_view_says_why_its_key_was_refused(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "ANSWER_S", 1.0)
    broker = hosts.broker()
    revoked = hosts.key("gone", Role.MONITOR)
    hosts.keys.revoke("gone")
    other = hosts.root / "other.key"
    save_bundle(other, KeyDirectory.create(hosts.root / "others").new("lost", Role.MONITOR))
    for key, problem in (
        (str(revoked), "key gone was refused by .*: revoked or unknown"),
        (str(other), "key lost: it is the broker of other keys, or no broker"),
        ("", "it asks for a key"),
    ):
        view = MirroredView(Connection(addresses=(hosts.address,), key=key))
        try:
            with pytest.raises(KeyRefusedError, match=problem):
                view.wait(3.0)
        finally:
            view.close()
    assert end(broker) == 0


READ, REGISTER = "use a key of role admin or monitor", "use a key of role admin or "


@pytest.mark.parametrize(
    ("words", "role", "problem"),
    [
        (("status",), Role.WORKER, f"may not read the status; {READ}"),
        (("workers",), Role.TRAINER, f"may not read the status; {READ}"),
        (("top", "--once"), Role.ENGINE, f"may not read the status; {READ}"),
        (("tail",), Role.WORKER, f"may not read the status; {READ}"),
        (("drain", "own-0"), Role.WORKER, "may not drain workers; use a key of role admin"),
        (("restart", "own-0"), Role.MONITOR, "may not restart workers; use a key of role admin"),
        (("scale", "own", "3"), Role.MONITOR, "may not scale environments; use a key of role admin"),
        (("set", "env.own.weight=2"), Role.WORKER, "may not change settings; use a key of role admin"),
        (("cordon", "0"), Role.TRAINER, "may not cordon GPUs; use a key of role admin"),
        (("uncordon", "0"), Role.TRAINER, "may not uncordon GPUs; use a key of role admin"),
        (("worker", "own", "--code", "."), Role.MONITOR, f"may not register a producer; {REGISTER}worker"),
        (("trainer",), Role.WORKER, f"may not register a consumer; {REGISTER}trainer"),
        (("engine",), Role.WORKER, f"may not send heartbeats of an engine; {REGISTER}engine"),
        (("relay",), Role.WORKER, f"may not get the weights; {REGISTER}engine or trainer"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_with_a_key_of_another_role_is_refused_before_it_asks(
    tmp_path: Path, words: tuple[str, ...], role: Role, problem: str
) -> None:
    """Else it would start again and again, or show nothing for ever."""
    key = tmp_path / "k.key"
    save_bundle(key, KeyDirectory.create(tmp_path / "keys").new("k", role))
    done = CliRunner().invoke(app, [*words, "--connect", "tcp://127.0.0.1:1", "--key", str(key)])
    assert isinstance(done.exception, RefusedError), done.output
    assert str(done.exception).endswith(f"key k (role {role.value}) {problem}")


def test_a_run_that_does_not_answer_is_told() -> None:
    view = MirroredView(Connection(addresses=("tcp://127.0.0.1:1",)))
    try:
        with pytest.raises(BrokerUnavailableError, match=r"tcp://127\.0\.0\.1:1"):
            view.wait(0.2)
    finally:
        view.close()
