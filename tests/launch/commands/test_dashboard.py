"""`rolloutmq dashboard`: it prints one link, serves a run in any state, and ends at Ctrl-C."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.services.dashboard.browser import Browser

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout


@pytest.fixture
def run(run_dir: Path) -> RunLayout:
    layout = RunLayout(run_dir)
    write_json(layout.config, validate({"run": {"dir": str(run_dir), "name": "mine"}}))
    return layout


def command(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "rolloutmq.launch.cli", "dashboard", *words)


@contextmanager
def started(*words: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_link_and_an_end_in_order(run: RunLayout, number: signal.Signals) -> None:
    with started(str(run.root)) as process:
        assert process.stdout is not None
        browser = Browser(process.stdout.readline().strip())
        assert f"no broker runs in {run.root}; Ctrl-C ends the page" in process.stdout.readline()
        browser.enter()
        assert browser.state()["run"]["name"] == "mine"
        with browser.stream() as stream:
            stream.until("state")
            process.send_signal(number)
            assert stream.until("leave")["text"]
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")


def test_the_port_that_was_asked_for(run: RunLayout) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            command(str(run.root), "--port", str(port)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"address 127.0.0.1:{port} is in use" in ended.stderr
    with started(str(run.root), "--port", str(port)) as process:
        assert process.stdout is not None
        assert Browser(process.stdout.readline().strip()).port == port


def test_an_address_of_another_machine(run: RunLayout) -> None:
    ended = subprocess.run(
        command(str(run.root), "--host", "192.0.2.1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "cannot bind 192.0.2.1" in ended.stderr


def test_beyond_loopback_it_says_that_nothing_is_encrypted(run: RunLayout) -> None:
    with started(str(run.root), "--host", "0.0.0.0") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert f"http://{socket.gethostname()}:" in process.stdout.readline()
        assert "plain HTTP is not encrypted" in process.stderr.readline()
