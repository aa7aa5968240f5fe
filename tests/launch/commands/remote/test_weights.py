"""A relay and an engine join a run that streams its weights: from another home, by loopback TCP, with keys."""

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.commands.remote.hosts import LIMIT_S, Hosts, end, hosts_at, wait_until

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.rundir import load_run, read_json, write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.transport.keys.bundle import load_bundle, load_keys
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.launch.end_notice import until_joined_end
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.errors import RefusedError
from rolloutmq.schemas.files import EndNotice, RunLayout, StreamAddress
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.process import python_command
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.joining import GetWeightsTicket
from rolloutmq.services.http_server.access import authorization
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare

V = PolicyVersion
SEALED = pytest.param(
    "tcp://0.0.0.0:0",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("cryptography") is None,
        reason="encrypted weights need the extra cluster: cryptography is missing",
    ),
)


class Run:
    """A run whose trainer is this process; its broker and its relay are processes."""

    def __init__(self, hosts: Hosts, listen: str) -> None:
        self.hosts = hosts
        self._listen = listen
        self._begin()

    def _begin(self) -> None:
        hosts, listen = self.hosts, self._listen
        config = validate(
            {
                "run": {"name": "streamed"},
                "broker": {"listen": f"tcp://127.0.0.1:{hosts.port}", "keys": "keys"},
                "weights": {"backend": "stream", "listen": listen},
            }
        )
        layout = hosts.layout
        write_json(layout.config, config.model_copy(update={"base_dir": hosts.root}))
        self.policy = build_policy(config.model, 0)
        write_identity(self.policy, config.model, layout.model)
        self.share = WeightShare.create_or_adopt(
            self.policy, layout.weights, version=V(0, 0), tokenizer=directory_fingerprint(layout.model)
        )
        self.broker = hosts.broker()
        self.start_relay()

    def begin_fresh(self) -> None:
        """Kill the run, and begin another one of its name, configuration and address, as `up` without --resume does."""
        self.broker.kill()
        self.broker.wait()
        self.relay.kill()
        self.relay.wait()
        self.share.close(unlink=True)
        root = self.hosts.layout.root
        root.rename(root.with_name("gone"))
        root.mkdir(mode=0o700)
        self._begin()

    def start_relay(self) -> None:
        """Start the relay of the run's host, and wait until it serves."""
        root = self.hosts.layout.root
        self.hosts.layout.stream.unlink(missing_ok=True)
        words = python_command(
            sys.executable, "rolloutmq.launch.service_process", "relay", "--run-dir", str(root)
        )
        with (self.hosts.root / "relay.log").open("ab") as log:
            self.relay = subprocess.Popen(words, stdout=log, stderr=log, env=dict(os.environ))
        wait_until(self.hosts.layout.stream.exists, "the relay of the run")

    def step(self, number: int) -> None:
        with self.share.writing(V(0, number)), torch.no_grad():
            next(iter(self.policy.parameters())).add_(0.5)

    def way(self, role: Role, name: str = "") -> tuple[str, ...]:
        key = self.hosts.key(name or role.value, role)
        return "--connect", self.hosts.address, "--key", str(key), "--run-dir", str(self.mirror.root)

    @property
    def mirror(self) -> RunLayout:
        """Directory of the other host."""
        return RunLayout(self.hosts.home / "mirror")

    @property
    def second(self) -> RunLayout:
        """Directory of a third host."""
        return RunLayout(self.hosts.home / "second")

    def received(self, version: PolicyVersion, layout: RunLayout | None = None) -> None:
        wait_until(lambda: self.version(layout) == version, f"{version} on the other host")

    def version(self, layout: RunLayout | None = None) -> PolicyVersion | None:
        layout = layout or self.mirror
        address = segment_file.read_address(layout.weights)
        if address is None:
            return None
        with torch.device("meta"):
            model = build_policy(load_run(layout.root)[0].model, 0)
        tokenizer = directory_fingerprint(layout.model)
        share = WeightShare.attach(model, layout.weights, tokenizer=tokenizer)
        try:
            return share.version
        finally:
            share.close()

    def close(self) -> None:
        self.relay.kill()
        self.relay.wait()
        self.hosts.close()
        self.share.close(unlink=True)
        del self.policy, self.share
        gc.collect()
        segment_file.sweep(kind="stage")


@contextmanager
def streamed(root: Path, listen: str = "tcp://127.0.0.1:0") -> Iterator[Run]:
    with hosts_at(root) as hosts:
        run = Run(hosts, listen)
        others = [run.mirror.weights, run.second.weights]
        try:
            yield run
        finally:
            saved = [one.read_bytes() for one in others if one.exists()]
            try:
                run.close()
            finally:
                for number, address in enumerate(saved):
                    left = root / f"weights-{number}.json"
                    left.write_bytes(address)
                    segment_file.sweep(left)


def sampled(url: str, token: str) -> list[dict[str, Any]]:
    """Return the versions with which an engine sampled; none while it has no weights."""
    body = json.dumps({"model": "policy", "prompt": [1, 5, 6], "max_tokens": 3}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json", **authorization(token)}
    )
    with (
        contextlib.suppress(urllib.error.HTTPError),
        urllib.request.urlopen(request, timeout=LIMIT_S) as reply,
    ):
        return [span["version"] for span in json.load(reply)["choices"][0]["weight_versions"]]
    return []


def samples(url: str, token: str, wanted: list[dict[str, Any]]) -> bool:
    return sampled(url, token) == wanted


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", SEALED])
def test_a_joined_engine_samples_with_the_newest_version(tmp_path: Path, listen: str) -> None:
    with streamed(tmp_path, listen) as run:
        address = read_json(run.hosts.layout.stream, StreamAddress)
        assert address is not None
        assert address.sealed == (listen != "tcp://127.0.0.1:0")
        relay = run.hosts.start("relay", *run.way(Role.TRAINER), log="joined-relay.log")
        engine = run.hosts.start("engine", *run.way(Role.ENGINE), "--name", "far", log="engine.log")
        wait_until(
            lambda: [one.name for one in engines_of(run.hosts.layout)] == ["inference.far"], "the engine"
        )
        url = engines_of(run.hosts.layout)[0].url
        token = load_bundle(run.hosts.key("worker", Role.WORKER)).token
        for number in (1, 2):
            run.step(number)
            wanted = [{"incarnation": 0, "step": number}]
            wait_until(partial(samples, url, token, wanted), f"step {number}")
        assert "name=trainer " in run.hosts.log("relay.log"), "the sender knows the name of the key"
        assert end(engine) == 0
        assert end(relay) == 0


def test_engine_and_relay_end_with_the_run(tmp_path: Path) -> None:
    with streamed(tmp_path) as run:
        relay = run.hosts.start("relay", *run.way(Role.TRAINER), log="joined-relay.log")
        engine = run.hosts.start("engine", *run.way(Role.ENGINE), "--name", "far", log="engine.log")
        wait_until(
            lambda: [one.name for one in engines_of(run.hosts.layout)] == ["inference.far"], "the engine"
        )
        write_json(run.hosts.layout.ending, EndNotice("ending", over=True))
        asyncio.run(until_joined_end(run.hosts.layout, lambda: False))
        wait_until(lambda: not engines_of(run.hosts.layout), "the last heartbeat of the engine")
        for process, log in ((engine, "engine.log"), (relay, "joined-relay.log")):
            assert process.wait(LIMIT_S) == 0, run.hosts.log(log)
            assert "the run has ended run=streamed" in run.hosts.log(log)


def test_engine_and_relay_have_nothing_of_the_run_before_in_a_fresh_one(tmp_path: Path) -> None:
    """They went on with its weights: groups of version 0.5 were trained as fresh ones while the trainer was at 0.0."""
    with streamed(tmp_path) as run:
        relay = run.hosts.start("relay", *run.way(Role.TRAINER), log="joined-relay.log")
        engine = run.hosts.start("engine", *run.way(Role.ENGINE), "--name", "far", log="engine.log")
        run.step(5)
        run.received(V(0, 5))
        wait_until(lambda: engines_of(run.hosts.layout), "the engine")
        run.begin_fresh()
        assert not engines_of(run.hosts.layout)
        (found,) = wait_until(lambda: engines_of(run.hosts.layout), "the engine in the fresh run")
        assert found.run_id == run_id_of(run.hosts.layout) != ""
        token = load_bundle(run.hosts.key("worker", Role.WORKER)).token
        wait_until(
            partial(samples, found.url, token, [{"incarnation": 0, "step": 0}]), "step 0 of the fresh run"
        )
        assert run.version() == V(0, 0)
        run.step(1)
        run.received(V(0, 1))
        for log in ("joined-relay.log", "engine.log"):
            assert "the run is gone, a fresh one of its name is there" in run.hosts.log(log)
        assert [end(one) for one in (engine, relay)] == [0, 0]


def test_a_relay_behind_a_relay_gets_the_weights_from_it(tmp_path: Path) -> None:
    """The broker gives tickets for a relay of another host, which tells it address and secret."""
    with streamed(tmp_path) as run:
        first = run.way(Role.ENGINE, "engine-b")
        key = run.hosts.key("engine-c", Role.ENGINE)
        second = ("--connect", run.hosts.address, "--key", str(key), "--run-dir", str(run.second.root))
        serves = ("--listen", "tcp://127.0.0.1:0", "--name", "b")
        relays = [run.hosts.start("relay", *first, *serves, log="b.log")]
        relays.append(run.hosts.start("relay", *second, "--behind", "relay.b", "--name", "c", log="c.log"))
        run.step(1)
        run.received(V(0, 1), run.second)
        assert "name=engine-c" in run.mirror.log("relay").read_text()
        assert "name=engine-c" not in run.hosts.log("relay.log")
        watch = run.hosts.key("eye", Role.MONITOR)

        def told() -> str:
            shown = run.hosts.run("status", "--connect", run.hosts.address, "--key", str(watch))
            assert shown.returncode == 0, shown.stderr
            return shown.stdout

        def tells(words: str) -> bool:
            return words in told()

        host = os.uname().nodename
        for name in ("b", "c"):  # the next heartbeat tells the version
            words = f"relay.{name} on {host}, key engine-{name}: version 0.1"
            wait_until(partial(tells, words), words)
        lines = told().splitlines()
        assert any("serves tcp://127.0.0.1:" in line for line in lines)
        assert any("engine-b, role engine from 127.0.0.1, heard now" in line for line in lines), lines
        assert end(relays[0]) == 0
        wait_until(lambda: "no relay relay.b is heard" in told(), "what the second relay waits for")
        run.step(2)
        relays[0] = run.hosts.start("relay", *first, *serves, log="b.log")
        run.received(V(0, 2), run.second)
        assert [end(one) for one in relays] == [0, 0]


@pytest.mark.parametrize("listen", [SEALED])
def test_a_relay_without_the_extra_ends_and_names_it(
    tmp_path: Path, listen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed(tmp_path, listen) as run:
        absent = tmp_path / "absent" / "cryptography"
        absent.mkdir(parents=True)
        (absent / "__init__.py").write_text("raise ImportError('absent')\n")
        monkeypatch.setenv("PYTHONPATH", f"{absent.parent}:{os.environ.get('PYTHONPATH', '')}")
        ended = run.hosts.run("relay", *run.way(Role.ENGINE))
        assert ended.returncode == 3, ended.stderr
        assert "run pip install 'rolloutmq[cluster]'" in ended.stderr.splitlines()[-1]
        assert not run.mirror.weights.exists()


def test_a_key_of_another_role_gets_no_weights(tmp_path: Path) -> None:
    said = "key worker-7 (role worker) may not get the weights; use a key of role admin or engine or trainer"
    with streamed(tmp_path) as run:
        refused = run.hosts.run("relay", *run.way(Role.WORKER, "worker-7"))
        assert refused.returncode
        assert said in " ".join(refused.stderr.split())
        keys = load_keys(run.hosts.root / "worker-7.key")
        with BlockingClient(run.hosts.address, keys=keys) as client, pytest.raises(RefusedError) as broker:
            client.request(GetWeightsTicket(), LIMIT_S)
        assert said in str(broker.value)


def test_the_broker_restarts_and_a_revoked_key_gets_no_ticket(tmp_path: Path) -> None:
    with streamed(tmp_path) as run:
        way = run.way(Role.ENGINE, "engine-7")
        relay = run.hosts.start("relay", *way, log="joined-relay.log")
        run.received(V(0, 0))
        end(run.broker, signal.SIGTERM)
        run.step(1)
        run.received(V(0, 1))  # the connection of the weights needs no broker
        run.relay.send_signal(signal.SIGTERM)
        assert run.relay.wait(LIMIT_S) == 0
        run.hosts.broker()
        run.start_relay()
        run.step(2)
        run.received(V(0, 2))  # with a ticket of the new broker for the new relay
        run.hosts.keys.revoke("engine-7")
        run.relay.kill()
        run.relay.wait()
        run.start_relay()
        run.step(3)
        log = run.mirror.log("relay")
        wait_until(
            lambda: "revoked or unknown" in run.hosts.log("joined-relay.log") + log.read_text(), "the refusal"
        )
        assert run.version() == V(0, 2), "engines keep the version that they have"
        assert "name=engine-7" not in run.hosts.log("relay.log").rpartition("serving weights")[2]
        end(relay)
