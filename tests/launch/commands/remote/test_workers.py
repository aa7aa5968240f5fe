"""Workers of another host: they join with an address, a key and their code, and leave in order."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.launch.commands.remote.hosts import ENVIRONMENT, Hosts, end, hosts_at, wait_until

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.schemas.network.keys import Role
from rolloutmq.testing.ledger import Ledger, read_ledger


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with hosts_at(tmp_path) as hosts:
        yield hosts


def join(hosts: Hosts, *words: str) -> tuple[str, ...]:
    key = hosts.root / "w.key"
    if not key.exists():
        hosts.key("w", Role.WORKER)
    way = ("--connect", hosts.address, "--key", str(key), "--code", str(hosts.code), "--name", "far")
    return ("worker", "own", *way, *words)


def trained(hosts: Hosts, steps: int) -> list[str]:
    """Train some batches on the run's host, and return the ids of their groups."""
    seen: list[str] = []
    with Consumer.blocking(hosts.layout.root, sequences=16, consumer="t") as consumer:
        for _, batch in zip(range(steps), consumer, strict=False):
            seen += [group.group_id for group in batch.groups]
            batch.ack()
    return seen


def exact(hosts: Hosts, seen: list[str]) -> Ledger:
    """Require that each group was trained once, and that the ledger has no contradiction."""
    ledger = read_ledger(hosts.layout.root)
    assert not ledger.problems
    assert len(seen) == len(set(seen))
    assert all(ledger.states[name] in {"trained", "committed"} for name in seen)
    return ledger


def test_a_worker_with_an_address_a_key_and_its_code_rolls_out_and_is_drained_by_name(hosts: Hosts) -> None:
    broker = hosts.broker()
    joined = hosts.start(*join(hosts, "--count", "2"))
    hosts.ready("own-far.0", "own-far.1")
    seen = trained(hosts, 5)
    admin = hosts.key("a", Role.ADMIN)
    shown = hosts.run("workers", "--connect", hosts.address, "--key", str(admin))
    assert shown.returncode == 0, shown.stderr
    assert re.search(rf"own-far\.0 +ready +{re.escape(os.uname().nodename[:24])} ", shown.stdout), (
        shown.stdout
    )
    for name, why in (
        ("own-far.0", "joined by itself from host"),
        ("nosuch", "no such worker or engine is heard"),
    ):
        refused = hosts.run("restart", name, "--connect", hosts.address, "--key", str(admin))
        assert refused.returncode != 0, refused.stdout
        assert why in " ".join(refused.stderr.split())
    for name in ("own-far.0", "own-far.1"):
        drained = hosts.run("drain", name, "--connect", hosts.address, "--key", str(admin))
        assert (drained.returncode, drained.stdout) == (0, f"draining {name}\n"), drained.stderr
    assert joined.wait(60.0) == 0, hosts.log()
    assert not hosts.workers()
    assert end(broker) == 0
    ledger = exact(hosts, seen)
    assert ledger.settled == len(seen)
    directory = next((hosts.home / ".local/state/rolloutmq").glob("*/sums@*"))
    assert directory.stat().st_mode & 0o077 == 0
    assert not list((directory / "spools").iterdir())


def test_sigterm_ends_the_workers_in_order_and_their_groups_arrive(tmp_path: Path) -> None:
    with hosts_at(tmp_path, options={"pause_s": 1.0}, concurrency=4) as hosts:
        broker = hosts.broker()
        joined = hosts.start(*join(hosts, "--grace", "30"))
        worker = hosts.ready("own-far.0")["own-far.0"]
        wait_until(lambda: hosts.workers()["own-far.0"].in_hand >= 4, "rollouts in hand")
        assert end(joined) == 0, hosts.log()
        assert "asked to end" in hosts.log()
        assert not hosts.workers()
        assert end(broker) == 0
        ledger = read_ledger(hosts.layout.root)
        assert not ledger.problems
        assert ledger.counts["queued"] >= worker.produced + 4
        log = next(hosts.home.rglob("own-far.0.log")).read_text()
        assert "abandoned=0" in log.splitlines()[-2], log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_ctrl_c_and_a_drain_end_the_workers_in_order_too(tmp_path: Path, number: signal.Signals) -> None:
    with hosts_at(tmp_path, options={"pause_s": 0.2}) as hosts:
        broker = hosts.broker()
        joined = hosts.start(*join(hosts, "--grace", "30"))
        hosts.ready("own-far.0")
        assert end(joined, number) == 0, hosts.log()
        assert not hosts.workers()
        log = next(hosts.home.rglob("own-far.0.log")).read_text()
        assert "abandoned=0" in log.splitlines()[-2], log
        assert end(broker) == 0
        assert not read_ledger(hosts.layout.root).problems


def test_a_worker_that_fails_while_it_ends_fails_the_command(hosts: Hosts) -> None:
    fails = "try:\n            await asyncio.sleep(1e6)\n        finally:\n            os._exit(1)"
    code = ENVIRONMENT.replace("await asyncio.sleep(self.pause_s)", fails).replace(
        "asyncio\n", "asyncio, os\n", 1
    )
    (hosts.code / "env.py").write_text(code)
    broker = hosts.broker()
    joined = hosts.start(*join(hosts, "--grace", "1"))
    wait_until(lambda: (one := hosts.workers().get("own-far.0")) and one.in_hand, "a rollout in hand")
    assert end(joined) == 1
    assert "own-far.0: failed while it ended: exit code 1" in hosts.log()
    assert end(broker) == 0


def test_a_second_signal_kills_the_workers(tmp_path: Path) -> None:
    with hosts_at(tmp_path, options={"pause_s": 1e6}) as hosts:
        broker = hosts.broker()
        joined = hosts.start(*join(hosts, "--grace", "1000"))
        wait_until(lambda: (one := hosts.workers().get("own-far.0")) and one.in_hand, "a rollout in hand")
        pid = hosts.workers()["own-far.0"].pid
        joined.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping reason=SIGINT" in hosts.log(), "the first signal")
        assert end(joined, signal.SIGINT) == 130
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the worker")
        assert end(broker) == 0


def test_a_name_of_another_key_is_refused_and_told(hosts: Hosts) -> None:
    broker = hosts.broker()
    joined = hosts.start(*join(hosts))
    hosts.ready("own-far.0")
    other = hosts.key("other", Role.WORKER)
    way = ("--connect", hosts.address, "--key", str(other), "--code", str(hosts.code), "--name", "far")
    refused = hosts.run("worker", "own", *way, "--run-dir", str(hosts.home / "second"))
    assert refused.returncode == 3, refused.stderr
    assert "belongs to another key (got own-far.0 with key other); use another name" in refused.stderr
    hosts.ready("own-far.0")
    assert end(joined) == 0
    assert end(broker) == 0


def test_a_worker_of_another_version_ends_with_its_reason(hosts: Hosts) -> None:
    """It was started again and again, and each one met the same refusal."""
    other = """
import functools
import rolloutmq.bus.producer.client as client
client.RegisterProducer = functools.partial(client.RegisterProducer, protocol=99)
"""
    (hosts.code / "env.py").write_text(other + ENVIRONMENT)
    broker = hosts.broker()
    refused = hosts.run(*join(hosts))
    assert refused.returncode == 3, refused.stderr
    assert "own-far.0: was given up: exit code 3: error: broker: request refused (version)" in refused.stderr
    assert "run the same version of RolloutMQ on both sides" in refused.stderr
    assert end(broker) == 0


def test_killed_workers_and_brokers_come_back_and_the_ledger_is_exact(hosts: Hosts) -> None:
    broker = hosts.broker()
    joined = hosts.start(*join(hosts))
    first = hosts.ready("own-far.0")["own-far.0"]
    seen = trained(hosts, 3)
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: hosts.workers()["own-far.0"].pid != first.pid, "another worker of that name")
    hosts.ready("own-far.0")
    seen += trained(hosts, 3)
    for _ in range(2):
        end(broker, signal.SIGKILL)
        broker = hosts.broker()
        hosts.ready("own-far.0")
        seen += trained(hosts, 3)
    assert end(joined) == 0, hosts.log()
    assert end(broker) == 0
    exact(hosts, seen)


def test_workers_outlive_their_holder_and_the_next_one_takes_them_over(hosts: Hosts) -> None:
    broker = hosts.broker()
    joined = hosts.start(*join(hosts))
    pid = hosts.ready("own-far.0")["own-far.0"].pid
    end(joined, signal.SIGKILL)
    again = hosts.start(*join(hosts), log="again.log")
    wait_until(lambda: "adopted name=own-far.0" in hosts.log("again.log"), "the adoption")
    refused = hosts.run(*join(hosts))
    assert refused.returncode == 4, refused.stderr
    assert (
        f"own-far in use by process {again.pid}" in refused.stderr.replace("is in use", "in use")
        or str(again.pid) in refused.stderr
    )
    assert "end that process with SIGTERM, or give this one another --name" in refused.stderr
    assert hosts.workers()["own-far.0"].pid == pid
    admin = hosts.key("a", Role.ADMIN)
    drained = hosts.run("drain", "own-far.0", "--connect", hosts.address, "--key", str(admin))
    assert drained.returncode == 0, drained.stderr
    assert again.wait(60.0) == 0, hosts.log("again.log")  # it was started again, as if it had crashed
    assert "started name=own-far.0" not in hosts.log("again.log")
    assert not hosts.workers()
    assert end(broker) == 0


def test_a_command_with_fewer_workers_ends_those_that_are_left(hosts: Hosts) -> None:
    broker = hosts.broker()
    joined = hosts.start(*join(hosts, "--count", "2"))
    pids = {name: one.pid for name, one in hosts.ready("own-far.0", "own-far.1").items()}
    end(joined, signal.SIGKILL)
    again = hosts.start(*join(hosts, "--count", "1"), log="again.log")
    wait_until(lambda: [*hosts.workers()] == ["own-far.0"], "the end of the other worker")
    assert hosts.workers()["own-far.0"].pid == pids["own-far.0"]
    wait_until(lambda: not psutil.pid_exists(pids["own-far.1"]), "the end of its process")
    assert end(again) == 0, hosts.log("again.log")
    assert end(broker) == 0


def test_another_configuration_of_the_run_restarts_the_workers(hosts: Hosts) -> None:
    broker = hosts.broker()
    joined = hosts.start(*join(hosts))
    pid = hosts.ready("own-far.0")["own-far.0"].pid
    assert end(broker) == 0
    section = {"entry": "env.py:Own", "group_size": 4, "pacing": False, "stale": "pass"}
    hosts.configure(section)
    broker = hosts.broker()
    wait_until(lambda: (one := hosts.workers().get("own-far.0")) and one.pid != pid, "another worker")
    hosts.ready("own-far.0")
    assert end(broker) == 0
    hosts.configure({**section, "entry": "os:system"})
    broker = hosts.broker()
    assert joined.wait(60.0) == 3, hosts.log()
    assert "error: environment.own.entry: the module os is not in" in hosts.log()
    assert not hosts.workers()
    assert end(broker) == 0


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"entry": "os:system"}, "environment.own.entry: the module os is not in"),
        ({"entry": "../env.py:Own"}, "environment.own.entry: must be a path below"),
        ({"options": {"pause_s": "env:HOME"}}, "`env:HOME` would read a variable of this host"),
    ],
)
def test_a_run_that_names_more_than_is_allowed_is_not_joined(
    tmp_path: Path, section: dict[str, object], problem: str
) -> None:
    with hosts_at(tmp_path, **section) as hosts:
        broker = hosts.broker()
        joined = hosts.run(*join(hosts))
        assert joined.returncode == 3, joined.stderr
        assert problem in joined.stderr.splitlines()[-1]
        assert not hosts.workers()
        assert end(broker) == 0


def test_a_variable_that_is_allowed_reaches_the_environment(tmp_path: Path) -> None:
    with hosts_at(tmp_path, options={"pause_s": "env:OMP_NUM_THREADS"}) as hosts:
        (hosts.code / "env.py").write_text(
            (hosts.code / "env.py").read_text().replace("= pause_s", "= float(pause_s) / 100")
        )
        broker = hosts.broker()
        joined = hosts.start(*join(hosts, "--allow-variable", "OMP_NUM_THREADS"))
        hosts.ready("own-far.0")
        assert end(joined) == 0, hosts.log()
        assert end(broker) == 0


def test_what_the_command_line_lacks_is_told(hosts: Hosts) -> None:
    for words, problem in (
        (("worker",), "--run-dir"),
        (("worker", "own", "--connect", "tcp://h:1"), "--code"),
        (("worker", "own", "--connect", "h:1", "--code", "."), "must be tcp://HOST:PORT"),
        (("worker", "own", "--connect", "tcp://h:1", "--code", "/none"), "there is no directory /none"),
        (("worker", "own", "--connect", "tcp://h:1", "--code", ".", "--name", "a-b"), "--name"),
        (("worker", "own", "--connect", "tcp://h:1", "--code", ".", "--key", "none"), "none is missing"),
        (("status", "--key", "x"), "--connect"),
        (("status", "somewhere", "--connect", "tcp://h:1"), "name one"),
        (("logs", "broker", "--connect", "tcp://h:1"), "logs are not sent"),
    ):
        found = hosts.run(*words)
        assert found.returncode in {1, 2}, (words, found.stderr)
        assert problem in found.stderr, (words, found.stderr)
