"""Real Ray: a cluster of three nodes on this machine, in a process of its own, and runs whose workers it places."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import psutil

from rolloutmq.bus.files import read_regular
from rolloutmq.schemas.files import RunLayout, Supervision
from rolloutmq.schemas.process import python_command

ROOT: Final = Path(__file__).parents[5]
LIMIT_S: Final = 240.0
T = TypeVar("T")

CLUSTER: Final = """
import json, os, signal, sys
from pathlib import Path
from ray.cluster_utils import Cluster

orders = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, orders)
node = {"object_store_memory": 80_000_000, "include_dashboard": False}
made = Cluster(initialize_head=True, head_node_args={**json.loads(sys.argv[2]), **node})
nodes = [made.add_node(num_cpus=2, **node) for _ in range(int(sys.argv[3]))]
raylets = [one.all_processes["raylet"][0].process.pid for one in nodes]
file = Path(sys.argv[1])
file.with_suffix(".tmp").write_text(json.dumps({"address": made.address, "raylets": raylets}))
file.with_suffix(".tmp").rename(file)
added = []
while (order := signal.sigwait(orders)) != signal.SIGTERM:
    if order == signal.SIGUSR1:
        added.append(made.add_node(num_cpus=2, **node))
    else:
        made.remove_node(added.pop())
        file.with_suffix(".removed").touch()
made.shutdown()
"""


def wait_until(met: Callable[[], T], what: str) -> T:
    """Poll until a condition holds, and return its value."""
    until = time.monotonic() + LIMIT_S
    while not (found := met()):
        assert time.monotonic() < until, f"waited {LIMIT_S:.0f} s for {what}"
        time.sleep(0.1)
    return found


class Nodes:
    """Nodes with two logical CPUs each, beside a head.

    Args:
        directory: Empty directory of theirs, with a short path.
        head: What the head has.
        count: Number of the others.
    """

    def __init__(self, directory: Path, head: dict[str, int] | None = None, count: int = 3) -> None:
        self.environ = {
            **os.environ,
            "RAY_TMPDIR": str(directory),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "150",
            "RAY_prestart_worker_first_driver": "0",  # a node would keep them, whoever has ended
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }
        told, log = directory / "cluster.json", directory / "cluster.log"
        self._removed = told.with_suffix(".removed")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CLUSTER, str(told), json.dumps(head or {"num_cpus": 0}), str(count)],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_until(lambda: told.exists() or self._process.poll() is not None, "the nodes")
            assert told.exists(), log.read_text()
        except BaseException:
            self.close()
            raise
        found = json.loads(told.read_text())
        self.address: str = found["address"]
        self.raylets: list[int] = found["raylets"]

    def add(self) -> None:
        """Add a node like the others; it appears some time later."""
        self._process.send_signal(signal.SIGUSR1)

    def remove(self) -> None:
        """Remove the node that was added last, and wait until its processes have ended."""
        self._process.send_signal(signal.SIGUSR2)
        wait_until(self._removed.exists, "the end of a node")
        self._removed.unlink()

    def asks(self, code: str, *words: str) -> str:
        """Run code in a process that is connected to the cluster as `ray`; return the last line of its output."""
        connect = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
        done = subprocess.run(
            [sys.executable, "-c", f"{connect}\n{code}", self.address, *words],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    def close(self) -> None:
        """End all nodes."""
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Run:
    """A run with its workers on the nodes, by default the quickstart."""

    def __init__(
        self, nodes: Nodes, root: Path, *settings: str, config: Path = ROOT / "examples/quickstart.toml"
    ) -> None:
        self.layout = RunLayout(root / "run")
        self._out = root / "up.log"
        self._nodes = nodes
        words = ["up", str(config), "--cluster", "ray", "--plain"]
        words += ["--run-dir", str(self.layout.root)]
        for setting in (f"cluster.address={nodes.address}", *settings):
            words += ["--set", setting]
        with self._out.open("wb") as output:
            self.process = subprocess.Popen(
                self._command(*words),
                env=nodes.environ,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def told(self) -> str:
        """Everything that the launcher has said."""
        return self._out.read_text()

    @property
    def step(self) -> int:
        """The last step that the trainer has settled."""
        try:
            return read_regular(self.layout.trained).count(b"\n")
        except FileNotFoundError:
            return 0

    def pid(self, name: str) -> int:
        """Return the process of a service or a worker; 0 while it has none."""
        for file in (self.layout.processes, self.layout.workers):
            for one in json.loads(file.read_text()) if file.exists() else ():
                if one["name"] == name:
                    return int(one["pid"])
        return 0

    def workers(self) -> dict[str, int]:
        """Return the pid of each worker, 0 while it has none."""
        file = self.layout.workers
        return {one["name"]: one["pid"] for one in json.loads(file.read_text())} if file.exists() else {}

    def engines(self) -> dict[str, int]:
        """Return the pid of each engine beyond the first, 0 while it has none."""
        file = self.layout.engines
        return {one["name"]: one["pid"] for one in json.loads(file.read_text())} if file.exists() else {}

    def engine_node(self, engine: str) -> str:
        """Return the node of an engine; empty while it has no process."""
        found = (one for one in self.supervision().engine_lives if one.worker == engine and one.pid)
        return next((one.node for one in found), "")

    def supervision(self) -> Supervision:
        """Return the report of the orchestrator."""
        return msgspec.json.decode(self.layout.supervision.read_bytes(), type=Supervision)

    def node(self, worker: str) -> str:
        """Return the node of a worker; empty while it has no process."""
        found = (one for one in self.supervision().workers if one.worker == worker and one.pid)
        return next((one.node for one in found), "")

    def running(self) -> dict[str, str]:
        """Return the node of each worker that is ready and is not being ended."""
        found = self.supervision().workers
        return {one.worker: one.node for one in found if one.ready and one.phase == "running"}

    def progresses(self, steps: int = 5) -> None:
        """Wait for further steps."""
        wanted = self.step + steps
        wait_until(lambda: self.step >= wanted or self.process.poll() is not None, f"step {wanted}")
        assert self.process.poll() is None, self.told

    def ends(self) -> int:
        """Wait for the end; return the exit code."""
        wait_until(lambda: self.process.poll() is not None, "the end of the run")
        return self.process.wait()

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on the run."""
        return subprocess.run(
            self._command(*words, "--run-dir", str(self.layout.root)),
            env=self._nodes.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run."""
        found: dict[str, Any] = json.loads(self.layout.summary.read_text())
        return found

    def close(self) -> None:
        """Kill what is left of the run on this host."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.layout.root.exists():
            self.command("down")

    def _command(self, *words: str) -> list[str]:
        return [*python_command(sys.executable, "rolloutmq.launch.cli", *words)]


def directories() -> set[Path]:
    """Return the directories of hosts that have a key in them."""
    return {path.parent for path in Path(tempfile.gettempdir()).glob("rolloutmq-*/key")}


def raylet_of(worker: int) -> int:
    """Return the raylet of a worker: the parent of its actor."""
    return int(psutil.Process(worker).parent().parent().pid)
