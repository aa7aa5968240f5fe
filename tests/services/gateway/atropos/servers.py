"""The two servers that must answer alike, Atropos' own and the gateway, and a client that changes no byte."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import psutil

from benchmarks.queues.atropos import RIVAL

Side = Literal["theirs", "ours"]
T = TypeVar("T")

PYTHON: Final = RIVAL / "bin" / "python"
"""The interpreter of Atropos' environment."""
LIMIT_S: Final = 60.0
"""Longest wait for anything; a busy machine needs a part of it."""
POLL_S: Final = 0.02
GATEWAY_FILE: Final = "gateway.json"


@dataclass(frozen=True)
class Answer:
    """What a server said."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Api:
    """A server, asked as its clients ask it: one connection for each request.

    Attributes:
        side: Whose server it is.
        deliberate: Why the two differ in what is being tested, or None if they must not.
    """

    def __init__(self, side: Side, url: str, deliberate: str | None = None) -> None:
        self.side = side
        self.url = url
        self.deliberate = deliberate
        self.differed = False

    def get(self, path: str, headers: Mapping[str, str] | None = None, **body: Any) -> Answer:
        """GET a path, with a JSON body if there are names and values."""
        return self.ask("GET", path, json.dumps(body).encode() if body else None, headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """POST a value as JSON."""
        return self.ask("POST", path, json.dumps(body).encode(), headers)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send exactly these bytes."""
        address = urlsplit(self.url)
        line = http.client.HTTPConnection(str(address.hostname), address.port, timeout=LIMIT_S)
        said = {"Accept-Encoding": "identity", **({"Content-Type": "application/json"} if body else {})}
        with contextlib.closing(line):
            line.request(method, path, body, {**said, **(headers or {})})
            with line.getresponse() as response:
                return Answer(response.status, response.headers, response.read())

    def either(self, *, theirs: T, ours: T) -> T:
        """Return what this side does, in a test that says why they differ."""
        assert self.deliberate, "only a test marked `differs` may expect different things"
        self.differed = True
        return theirs if self.side == "theirs" else ours


@contextlib.contextmanager
def their_server() -> Iterator[str]:
    """Run Atropos' server on a free port, and yield its address."""
    port = free_port()
    command = [str(PYTHON), "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    with ended(command) as process:
        _wait_until_it_listens(port, process)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def our_server(run_dir: Path, *arguments: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run a gateway with its broker; yield its address, and the process that keeps them running."""
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "gateway", "--run-dir", str(run_dir)]
    command += ["--host", "127.0.0.1", *(arguments or ("--port", "0"))]
    with ended(command) as process:
        address = run_dir / GATEWAY_FILE
        wait_for(lambda: _told(address), process, "the gateway")
        yield _told(address), process


def _told(address: Path) -> str:
    try:
        return str(json.loads(address.read_bytes())["url"])
    except (FileNotFoundError, ValueError):
        return ""


@contextlib.contextmanager
def ended(
    command: list[str], log: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command; end it as Ctrl-C does when the block is left, or kill it if that does nothing."""
    with contextlib.ExitStack() as stack:
        out = subprocess.DEVNULL if log is None else stack.enter_context(log.open("ab"))
        environ = None if env is None else {**os.environ, **env}
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environ)
        stack.enter_context(process)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(LIMIT_S / 2)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def part(launcher: int, name: str) -> psutil.Process:
    """Return the process of the gateway that plays a part."""
    found: list[psutil.Process] = []

    def runs() -> bool:
        children = psutil.Process(launcher).children(recursive=True)
        found[:] = [child for child in children if name in _command(child)]
        return bool(found)

    wait_for(runs, what=name)
    return found[0]


def _command(process: psutil.Process) -> list[str]:
    """Return its command line; nothing for a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def wait_for(condition: Any, process: "subprocess.Popen[bytes] | None" = None, what: str = "") -> None:
    """Return when the condition holds; fail when the process ends first, or after too long."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process is None or process.poll() is None, (
            f"{what} ended with {process and process.returncode}"
        )
        assert time.monotonic() < deadline, f"{what or condition} took too long"
        time.sleep(POLL_S)


def free_port() -> int:
    """Return a port that nobody had a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _wait_until_it_listens(port: int, process: "subprocess.Popen[bytes]") -> None:
    def listens() -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_for(listens, process, "Atropos' server")
