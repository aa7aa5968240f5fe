"""What the containers run, run for real with paths and ports of this machine: probes, keys, drain and resume."""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.launch.commands.remote.hosts import free_ports
from tests.launch.commands.remote.kubernetes.manifests import DIRECTORY, ROOT, Pod, pod_specs

from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.network.keys import Role
from rolloutmq.testing import assert_nothing_lost
from rolloutmq.testing.ledger import read_ledger

PATIENCE_S = 240.0
"""Longest wait for one thing, since a run begins with the import of torch on a machine that is shared."""
TARGET = 'rolloutmq_workers_target{env="sort3"}'


def wait_until(met: Callable[[], bool], what: str, log: Path) -> None:
    """Poll until a condition holds; fail with the end of a log."""
    until = time.monotonic() + PATIENCE_S
    while not met():
        if time.monotonic() >= until:
            raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}: {log.read_text()[-2000:]}")
        time.sleep(0.2)


class Cluster:
    """The pods of the manifests, each with places of its own below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._processes: list[subprocess.Popen[bytes]] = []
        self.keys = KeyDirectory.create(root / "keys")
        self._worker_key = root / "worker.key"
        save_bundle(self._worker_key, self.keys.new("workers", Role.WORKER))
        self.token = self.keys.new("prometheus", Role.MONITOR).token
        self.code = root / "examples"
        shutil.copytree(ROOT / "examples", self.code)
        first = free_ports()
        self.metrics_port = free_ports()
        self._ports = {
            "7760": str(first),
            "port = 8000": "port = 0",
            "port = 9464": f"port = {self.metrics_port}",
        }
        run = self.pod("run")
        config = run.here((DIRECTORY / "run.toml").read_text())
        (self.code / "kubernetes.toml").write_text(config)

    def pod(self, name: str) -> Pod:
        """Return a pod whose secrets are as Kubernetes mounts them: readable by the group."""
        home = self.root / name
        if not home.exists():
            (home / "secret").mkdir(parents=True)
            (home / "state").mkdir()
            (home / "data").mkdir()
            (home / "own").mkdir()
            secrets = [*self.keys.path.iterdir()] if name == "run" else [self._worker_key]
            for path in secrets:
                shutil.copy(path, home / "secret" / path.name)
                (home / "secret" / path.name).chmod(0o440)
            for place in ("data", "state", "own"):
                (home / place).chmod(0o2775)  # as fsGroup leaves a volume
        places = {
            "/secret": str(home / "secret"),
            "/run/rolloutmq": str(home / "own"),
            "/data/": f"{home}/data/",
            "/state/": f"{home}/state/",
            "/home/rolloutmq/examples": str(self.code),
            "tcp://rolloutmq:": "tcp://127.0.0.1:",
            **self._ports,
        }
        return Pod(pod_specs()[name], home, places)

    def metrics(self) -> str:
        """Return the metrics as Prometheus gets them, by the name of the service; empty while nobody answers."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.metrics_port}/metrics")
        request.add_header("Host", f"rolloutmq.default.svc:{self.metrics_port}")
        request.add_header("Authorization", f"Bearer {self.token}")
        with (
            suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(request, timeout=10) as reply,
        ):
            return str(reply.read().decode())
        return ""

    def start(self, pod: Pod, log: str) -> "subprocess.Popen[bytes]":
        """Start the process of a pod, with its output in a file of this name."""
        self._processes.append(pod.start(self.root / log))
        return self._processes[-1]

    def close(self) -> None:
        """Kill what is left of the pods."""
        for started in self._processes:
            started.kill()
            started.wait()
        homes = {str(self.root / name) for name in ("run", "worker")}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("HOME") in homes:
                    process.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def stop(process: "subprocess.Popen[bytes]") -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE_S)


def broker_of(process: "subprocess.Popen[bytes]") -> psutil.Process:
    return next(one for one in psutil.Process(process.pid).children() if "broker" in one.cmdline())


@pytest.mark.extended
def test_pods_start_are_probed_drain_and_resume(cluster: Cluster) -> None:
    worker, run = cluster.pod("worker"), cluster.pod("run")
    worker.initialize()
    run.initialize()
    log, worker_log, again = (cluster.root / f"{name}.log" for name in ("run", "worker", "again"))
    joined = cluster.start(worker, "worker.log")
    wait_until(lambda: worker.passes("liveness"), "the worker to live without a broker", worker_log)
    assert not worker.passes("readiness")
    up = cluster.start(run, "run.log")
    wait_until(lambda: run.passes("readiness") and run.passes("liveness"), "the run", log)
    wait_until(lambda: worker.passes("readiness"), "the worker", worker_log)
    wait_until(lambda: TARGET in cluster.metrics(), "the metric for KEDA", log)
    run_dir = cluster.root / "run" / "data" / "run"
    wait_until(lambda: read_ledger(run_dir).settled > 0, "a batch of the worker's groups", log)
    assert not list((run_dir / "logs").glob("sort3-*")), "a worker on the host of the run"

    os.kill(joined.pid, signal.SIGSTOP)
    wait_until(lambda: not worker.passes("readiness"), "the end of the readiness", worker_log)
    wait_until(lambda: not worker.passes("liveness"), "the hang", worker_log)
    os.kill(joined.pid, signal.SIGCONT)
    wait_until(lambda: worker.passes("readiness"), "the worker again", worker_log)

    began = time.monotonic()
    assert stop(joined) == 0, worker_log.read_text()
    assert time.monotonic() - began < worker.spec["terminationGracePeriodSeconds"]
    assert stop(up) == 130, log.read_text()
    assert_nothing_lost(run_dir)
    before = json.loads((run_dir / "identity.json").read_text())
    up = cluster.start(run, "again.log")
    wait_until(lambda: run.passes("readiness"), "the resumed run", again)
    assert json.loads((run_dir / "identity.json").read_text()) == before
    stop(up)


@pytest.mark.extended
def test_a_run_does_not_live_while_its_broker_hangs(cluster: Cluster) -> None:
    run, log = cluster.pod("run"), cluster.root / "run.log"
    run.initialize()
    up = cluster.start(run, "run.log")
    wait_until(lambda: run.passes("readiness"), "the run", log)
    broker = broker_of(up)
    broker.suspend()
    wait_until(lambda: not run.passes("readiness"), "the end of the readiness", log)
    wait_until(lambda: not run.passes("liveness"), "the hang", log)
    broker.resume()
    wait_until(lambda: run.passes("readiness") and run.passes("liveness"), "the run again", log)
    up.send_signal(signal.SIGSTOP)
    wait_until(lambda: not run.passes("readiness") and not run.passes("liveness"), "the hang of `up`", log)
    up.send_signal(signal.SIGCONT)
    assert stop(up) == 130


def test_a_secret_is_closed_to_others_once_it_is_copied(cluster: Cluster) -> None:
    for name, copied in (("run", "keys/server.key"), ("worker", "worker.key")):
        pod = cluster.pod(name)
        pod.initialize()
        path = cluster.root / name / "own" / copied
        assert path.stat().st_mode & 0o077 == 0
        pod.initialize()  # as in a pod that starts again
    assert KeyDirectory(cluster.root / "run" / "own" / "keys").server() == cluster.keys.server()
