"""A run whose workers are programs of somebody else's, and a trainer that knows Atropos' HTTP interface."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.files import GatewayAddress, RunLayout
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import GetStatus, Pressure, StatusReply
from rolloutmq.schemas.wire.requests import Request
from rolloutmq.services.process.identity import alive

LIMIT_S: Final = 90.0
"""Longest wait for anything; a busy machine needs a part of it."""
POLL_S: Final = 0.02


def wait_for(
    condition: Callable[[], Any],
    what: str,
    process: "subprocess.Popen[bytes] | None" = None,
    limit_s: float = LIMIT_S,
) -> None:
    """Return once the condition holds; AssertionError if it takes too long, or if a process ends first."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process is None or process.poll() is None, f"the run ended before {what}"
        assert time.monotonic() < deadline, f"{what} took too long"
        time.sleep(POLL_S)


class ProgramRun:
    """A running `rolloutmq up`."""

    def __init__(self, run_dir: Path, process: "subprocess.Popen[bytes]") -> None:
        self.layout = RunLayout(run_dir)
        self.process = process

    @property
    def url(self) -> str:
        """The address of the gateway."""
        wait_for(self.layout.gateway.exists, "the gateway", self.process)
        address = read_json(self.layout.gateway, GatewayAddress)
        assert address is not None
        return address.url

    def workers(self) -> dict[str, int]:
        """Return name and process of the living workers."""
        found = read_json(self.layout.workers, list[ProcessIdentity]) or []
        return {one.name: one.pid for one in found if alive(one)}

    def service(self, name: str) -> int:
        """Return the process of a service, or 0."""
        found = read_json(self.layout.processes, list[ProcessIdentity]) or []
        return next((one.pid for one in found if one.name == name and alive(one)), 0)

    def pressure(self) -> Pressure:
        """Return what the broker says."""
        reply = self.ask(GetStatus())
        assert isinstance(reply, StatusReply)
        return reply.pressure

    def ready(self) -> set[str]:
        """Return the workers that the broker calls ready and that live."""
        living, workers = self.workers(), self.pressure().workers
        return {one.worker for one in workers if one.state == "ready" and living.get(one.worker) == one.pid}

    def ask(self, request: Request) -> Any:
        """Send a request to the broker, which may just start again."""
        with BlockingClient(resolve_blocking(self.layout.root, LIMIT_S).serve) as client:
            return client.request(request, LIMIT_S)

    def wait(self, condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait for something that the run does."""
        wait_for(condition, what, self.process, limit_s)

    def log(self, name: str) -> str:
        """Return a log."""
        path = self.layout.log(name)
        return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def running(config: Path, run_dir: Path) -> Iterator[ProgramRun]:
    """Start a run; end it as Ctrl-C does, or kill it if that does nothing."""
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "up", str(config), "--plain"]
    with (config.parent / "up.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    with process:
        try:
            yield ProgramRun(run_dir, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


class Trainer(threading.Thread):
    """A trainer that asks for batches by HTTP, and writes down the first token of each group.

    Attributes:
        step_s: Seconds that a step takes.
    """

    def __init__(self, url: str, batch: int) -> None:
        super().__init__(name="trainer", daemon=True)
        self.step_s = 0.0
        self.arrived: Counter[int] = Counter()
        self._url = url
        self._batch = batch
        self._over = threading.Event()

    def __enter__(self) -> "Trainer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(LIMIT_S)

    def run(self) -> None:
        """Register, and eat until ended."""
        self._ask("/register", {**REGISTRATION, "batch_size": self._batch})
        while not self._over.is_set():
            batch = (self._ask("/batch") or {}).get("batch")
            for group in batch or ():
                self.arrived[group["tokens"][0][0]] += 1
            self._over.wait(self.step_s if batch else 0.02)

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        while not self._over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    return json.load(answer)
            self._over.wait(0.1)
        return None


REGISTRATION: Final = {
    "wandb_group": "g",
    "wandb_project": "p",
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 1_000_000,
}
