"""A run whose broker listens with keys, and processes that join it with an empty home and nothing of its directory."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.process import python_command
from rolloutmq.schemas.wire.control import GetStatus, StatusReply, WorkerStatus

LIMIT_S: Final = 60.0
T = TypeVar("T")

ENVIRONMENT: Final = """
import asyncio
from rolloutmq import Trajectory

class Own:
    def __init__(self, pause_s=0.01):
        self.pause_s = pause_s

    async def rollout(self, policy, size, rng):
        await asyncio.sleep(self.pause_s)
        words = [rng.randrange(1000) for _ in range(4)]
        return [
            Trajectory(token_ids=[*words, i], mask=[False] * 4 + [True], logprobs=[0.0] * 4 + [-0.5], score=float(i))
            for i in range(size)
        ]
"""


def wait_until(met: Callable[[], T], what: str) -> T:
    """Poll until a condition holds, and return its value."""
    until = time.monotonic() + LIMIT_S
    while not (found := met()):
        assert time.monotonic() < until, f"waited {LIMIT_S:.0f} s for {what}"
        time.sleep(0.05)
    return found


def free_ports() -> int:
    """Return the first of four free ports: a broker that has ended in order comes back on the same ones."""
    for _ in range(1000):
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + 4):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no four free ports")


class Hosts:
    """The run's host, and a home for another one. `close` ends all processes."""

    def __init__(self, root: Path, **environment: Any) -> None:
        self.root = root
        self.keys = KeyDirectory.create(root / "keys")
        self.layout = RunLayout(root / "run")
        self.layout.root.mkdir(mode=0o700)
        self.code = root / "code"
        self.code.mkdir()
        (self.code / "env.py").write_text(ENVIRONMENT)
        self.home = root / "home"
        self.home.mkdir(mode=0o700)
        section = {"entry": "env.py:Own", "group_size": 2, "pacing": False, "stale": "pass", **environment}
        self.port = free_ports()
        self.configure(section)
        self._processes: list[subprocess.Popen[bytes]] = []

    def configure(self, section: dict[str, Any]) -> None:
        """Write the configuration of the run."""
        config = validate(
            {
                "run": {"name": "sums"},
                "broker": {"listen": f"tcp://127.0.0.1:{self.port}", "keys": "keys", "silence_s": 2.0},
                "environment": {"own": section},
                "inference": {"kind": "none"},
                "trainer": {"enabled": False, "batch_sequences": 16},
            }
        )
        write_json(self.layout.config, config.model_copy(update={"base_dir": self.root}))

    def key(self, name: str, role: Role) -> Path:
        """Make a key; return the file of its client."""
        file = self.root / f"{name}.key"
        save_bundle(file, self.keys.new(name, role))
        return file

    def broker(self) -> "subprocess.Popen[bytes]":
        """Start the broker, and wait until it serves."""
        run_dir = str(self.layout.root)
        words = python_command(
            sys.executable, "rolloutmq.launch.service_process", "broker", "--run-dir", run_dir
        )
        process = self._started(words, self.root / "broker.log", dict(os.environ))
        wait_until(
            lambda: (found := read_endpoints(self.layout.root)) is not None and found.pid == process.pid,
            "the broker",
        )
        return process

    @property
    def address(self) -> str:
        """Address of the broker's listener."""
        found = read_endpoints(self.layout.root)
        assert found is not None
        return found.listen[0]

    def start(self, *words: str, log: str = "join.log") -> "subprocess.Popen[bytes]":
        """Start a command on the other host."""
        return self._started(self._command(words), self.root / log, self._environ())

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on the other host to its end."""
        return subprocess.run(
            self._command(words),
            env=self._environ(),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def log(self, name: str = "join.log") -> str:
        """Return the output of a process."""
        return (self.root / name).read_text()

    def workers(self) -> dict[str, WorkerStatus]:
        """Return the workers that the broker knows, except those that have gone."""
        found = read_endpoints(self.layout.root)
        assert found is not None
        with BlockingClient(found.serve) as client:
            reply = client.request(GetStatus(), LIMIT_S)
        assert isinstance(reply, StatusReply)
        return {one.worker: one for one in reply.pressure.workers if one.state != "gone"}

    def ready(self, *names: str) -> dict[str, WorkerStatus]:
        """Wait until workers are ready and have produced."""

        def works(name: str) -> bool:
            found = self.workers().get(name)
            return found is not None and found.state == "ready" and found.produced > 0

        wait_until(lambda: all(map(works, names)), f"workers {names}")
        return self.workers()

    def close(self) -> None:
        """Kill what is left, and the children that it left."""
        children = [child for one in self._processes for child in _children(one.pid)]
        for process in self._processes:
            process.kill()
            process.wait()
        for child in (*children, *_marked(self.home)):
            child.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def _command(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return python_command(sys.executable, "rolloutmq.launch.cli", *words)

    def _environ(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        return {**kept, "HOME": str(self.home), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.home)}

    def _started(
        self, words: tuple[str, ...], log: Path, environ: dict[str, str]
    ) -> "subprocess.Popen[bytes]":
        with log.open("ab") as output:
            process = subprocess.Popen(
                words, env=environ, cwd=self.home, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._processes.append(process)
        return process


def end(process: "subprocess.Popen[bytes]", number: signal.Signals = signal.SIGTERM) -> int:
    """Signal a process, and return its exit code."""
    process.send_signal(number)
    return process.wait(LIMIT_S)


@contextmanager
def hosts_at(root: Path, **environment: Any) -> Iterator[Hosts]:
    """Yield the hosts of a run of one environment, `own`; end their processes."""
    hosts = Hosts(root, **environment)
    try:
        yield hosts
    finally:
        hosts.close()


def _children(pid: int) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def _marked(home: Path) -> Iterator[psutil.Process]:
    """Yield the processes of the other host that their parents left."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                yield process
        except psutil.Error:
            continue
