"""The page that `up` starts: at the first look, again after a crash, and at no cost for the run."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.services.dashboard.browser import Browser

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.dashboard import on_demand
from rolloutmq.services.dashboard.on_demand import PageOnDemand, page_of
from rolloutmq.services.process.identity import find_marked

WAIT_S = 60.0
MARKER = f"page-{os.getpid()}"


@pytest.fixture
def config(run_dir: Path) -> RunConfig:
    config = validate({"run": {"dir": str(run_dir), "name": "mine"}})
    write_json(RunLayout(run_dir).config, config)
    return config


@asynccontextmanager
async def listening(config: RunConfig) -> AsyncIterator[PageOnDemand]:
    """The page of a run, as its launcher has it."""
    with page_of(config, RunLayout(config.run.dir), MARKER) as page:
        assert page is not None
        task = asyncio.create_task(page.run())
        try:
            yield page
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert servers() == []


def servers() -> list[int]:
    """Return the processes of the page."""
    return list(find_marked(f"{MARKER}/"))


async def asked(call: Callable[..., Any], *words: Any) -> Any:
    return await asyncio.to_thread(call, *words)


async def test_no_process_until_somebody_looks(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    async with listening(config) as page:
        assert capsys.readouterr().out == f"dashboard {page.link}\n"
        assert servers() == []
        browser = Browser(page.link)
        assert (await asked(browser.enter)).status == 204
        assert (await asked(browser.state))["run"]["name"] == "mine"
        assert len(servers()) == 1


async def test_a_killed_server_comes_again_and_the_page_goes_on(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "FIRST_PAUSE_S", 0.01)
    async with listening(config) as page:
        browser = Browser(page.link)
        await asked(browser.enter)
        (first,) = servers()
        os.kill(first, signal.SIGKILL)
        assert (await asked(browser.state))["run"]["name"] == "mine"
        assert servers() not in ([], [first])
        other = Browser(page.link)
        assert (await asked(other.enter)).code == "token", "the link was used in the first life"


async def test_after_a_restart_of_the_run_its_new_link_opens_the_page(config: RunConfig) -> None:
    """At a fixed port a browser still sends the cookie of the earlier life, which counts no more."""
    async with listening(config) as page:
        browser = Browser(page.link)
        assert (await asked(browser.enter)).status == 204
    again = config.model_copy(
        update={"dashboard": config.dashboard.model_copy(update={"port": browser.port})}
    )
    async with listening(again) as page:
        assert (await asked(browser.get, "/api/state")).code == "session"
        assert (await asked(browser.enter)).code == "token", "the old link"
        browser.token = Browser(page.link).token
        assert (await asked(browser.enter)).status == 204
        assert (await asked(browser.state))["run"]["name"] == "mine"


async def test_a_server_that_always_crashes_is_tried_seldom(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "FIRST_PAUSE_S", 0.2)
    started: list[float] = []

    def failing(*_: object) -> Any:
        started.append(time.monotonic())
        raise OSError("no memory")

    monkeypatch.setattr(on_demand, "spawn", failing)
    async with listening(config) as page:
        with socket.create_connection(("127.0.0.1", Browser(page.link).port)):
            deadline = time.monotonic() + WAIT_S
            while len(started) < 4:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
    assert started[3] - started[2] > 2 * (started[1] - started[0])


async def test_after_a_server_that_ended_the_next_look_starts_another(config: RunConfig) -> None:
    async with listening(config) as page:
        browser = Browser(page.link)
        await asked(browser.enter)
        (first,) = servers()
        os.kill(first, signal.SIGTERM)  # as at its end by itself: exit code 0
        deadline = time.monotonic() + WAIT_S
        while servers():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert (await asked(browser.state))["run"]["name"] == "mine"


async def test_an_open_page_hears_that_the_run_has_ended(config: RunConfig) -> None:
    async with listening(config) as page:
        browser = Browser(page.link)
        await asked(browser.enter)
        stream = browser.stream()
        await asked(stream.until, "state")
        events = stream.events()
    told = [(name, data) for name, data in await asked(list, events) if name == "leave"]
    again = f"rolloutmq dashboard {config.run.dir}"
    assert told == [("leave", {"text": f"The run has ended; `{again}` shows how.", "over": True})]
    stream.__exit__()


def test_a_used_port_is_told_and_the_run_goes_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = validate({"dashboard": {"port": taken.getsockname()[1]}})
        with page_of(config, RunLayout(run_dir), MARKER) as page:
            assert page is None
    told = capsys.readouterr()
    assert "warning: no page for this run: address 127.0.0.1" in told.err
    assert told.out == ""


def test_off_is_off(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with page_of(validate({"dashboard": {"enabled": False}}), RunLayout(run_dir), MARKER) as page:
        assert page is None
    assert capsys.readouterr() == ("", "")


def test_a_server_without_a_launcher_says_what_to_use(run_dir: Path) -> None:
    words = ("-m", "rolloutmq.launch.service_process", "serve-dashboard", "--run-dir", str(run_dir))
    ended = subprocess.run(
        (sys.executable, "-P", *words), capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "use `rolloutmq dashboard`" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_orphan_ends_once_nobody_looks(config: RunConfig) -> None:
    """A launcher that is killed leaves no server behind for long."""
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from rolloutmq.bus.rundir import read_run\n"
        "from rolloutmq.services.dashboard.on_demand import page_of\n"
        "config, layout = read_run(Path(sys.argv[1]))\n"
        "async def main():\n"
        f"    with page_of(config, layout, {MARKER!r}) as page:\n"
        "        sys.stdout.flush()\n"
        "        await page.run()\n"
        "asyncio.run(main())\n"
    )
    launcher = subprocess.Popen(
        (sys.executable, "-c", script, str(config.run.dir)), stdout=subprocess.PIPE, text=True
    )
    with launcher:
        assert launcher.stdout is not None
        browser = Browser(launcher.stdout.readline().split()[1])
        browser.enter()
        launcher.kill()
    assert len(servers()) == 1
    deadline = time.monotonic() + WAIT_S
    while servers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
