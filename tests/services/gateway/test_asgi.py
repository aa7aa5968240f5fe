"""`uvicorn rolloutmq.services.gateway.asgi:app`, as a user would start it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.services.gateway.asgi import RUN_DIR, AsgiTarget


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def started(run_dir: Path, port: int) -> "subprocess.Popen[bytes]":
    command = (sys.executable, "-m", "uvicorn", "rolloutmq.services.gateway.asgi:app", "--port", str(port))
    with (run_dir.parent / "uvicorn.log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, RUN_DIR: str(run_dir)}, stdout=log, stderr=log)


def asked(port: int, path: str, patience_s: float = 30.0) -> Any:
    until = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def test_a_server_of_ones_own_brings_a_broker_and_is_the_only_one(run_dir: Path) -> None:
    port = free_port()
    server = started(run_dir, port)
    try:
        assert asked(port, "/health")["status"] == "ok"
        second = started(run_dir, free_port())
        assert second.wait(timeout=30) != 0
        assert "another gateway" in (run_dir.parent / "uvicorn.log").read_text()
        assert asked(port, "/health")["status"] == "ok"
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    assert not (run_dir / "run.json").exists(), "its broker has ended too"


async def test_without_a_lifespan_it_says_so(run_dir: Path) -> None:
    async def receive() -> Any:
        raise AssertionError

    async def send(_message: Any) -> None:
        raise AssertionError

    with pytest.raises(RuntimeError, match="lifespan"):
        await AsgiTarget(run_dir)({"type": "http"}, receive, send)


async def test_a_gateway_that_fails_beneath_its_server_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes an error of the lifespan for a target that has none, and would serve on without a gateway."""
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    target = AsgiTarget(tmp_path)

    async def fail() -> None:
        raise OSError("no space left")

    @asynccontextmanager
    async def failing() -> AsyncIterator[Any]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            yield object()

    monkeypatch.setattr(target, "_opened", failing)
    words = ["lifespan.startup"]

    async def receive() -> Any:
        return {"type": words.pop()} if words else await asyncio.Event().wait()

    async def send(_: Any) -> None:
        pass

    with pytest.raises(ExceptionGroup):
        await target({"type": "lifespan"}, receive, send)
    assert raised == [signal.SIGTERM]
    with pytest.raises(RuntimeError):
        await target({"type": "http"}, receive, send)


async def test_a_defect_at_the_start_is_logged_where_it_was_and_told_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def failing() -> AsyncIterator[Any]:
        yield os.environ["NO_SUCH_KEY"]

    target = AsgiTarget(tmp_path)
    monkeypatch.setattr(target, "_opened", failing)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    await target({"type": "lifespan"}, receive, send)
    assert sent == [{"type": "lifespan.startup.failed", "message": "'NO_SUCH_KEY'"}]
    assert "in failing" in caplog.text
