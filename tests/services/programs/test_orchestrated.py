"""The orchestrator with programs in place of our workers, against a broker that says what the test wants."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.services.orchestrator.children import argv, wait_up
from tests.services.orchestrator.fake_broker import TOKEN, broker, living, until

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import WorkersFailedError
from rolloutmq.schemas.files import GatewayAddress, RunLayout
from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.services.orchestrator import server
from rolloutmq.services.orchestrator.server import Orchestrator
from rolloutmq.services.process.runner import Stop

PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
print(sys.argv[1], os.environ["ROLLOUTMQ_WORKER"], "up", flush=True)
while True: signal.pause()
"""
"""Ends at SIGTERM. The broker of these tests passes a drain on by SIGUSR1, as if to a worker of ours."""


def config(layout: RunLayout, code: str = PROGRAM, port: int = 8123, **orchestrator: Any) -> RunConfig:
    environment = {"command": [*argv(code), "{gateway_url}"], "max_workers": 3}
    quick = {"tick_s": 0.02, "backoff_s": 0.01, "crash_limit": 3, "drain_deadline_s": 120.0}
    return validate(
        {
            "environment": {"env": environment},
            "gateway": {"enabled": True, "port": port},
            "orchestrator": {**quick, **orchestrator},
            "base_dir": str(layout.root),
        }
    )


class Life:
    """One life of an orchestrator."""

    def __init__(self, layout: RunLayout, settings: RunConfig) -> None:
        self.stop = Stop()
        self.orchestrator = Orchestrator(settings, layout, TOKEN)

    async def __aenter__(self) -> "Life":
        self.task = asyncio.create_task(self.orchestrator.run(self.stop))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop.request("the test ends")
        await asyncio.wait({self.task})


async def test_a_program_that_delivered_is_ended_long_before_the_deadline(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, Life(layout, config(layout)):
        fake.wanted = {"env": 3}
        await until(lambda: len(living(layout)) == 3)
        said = await asyncio.to_thread(wait_up, layout.log("env-2"))
        assert said.split() == ["http://127.0.0.1:8123/w/env-2", "env-2", "up"]
        fake.wanted = {"env": 1}
        await until(lambda: sorted(fake.drained) == ["env-1", "env-2"])
        fake.states["env-2"] = WorkerState.DRAINING
        fake.states["env-1"] = WorkerState.GONE
        await until(lambda: sorted(living(layout)) == ["env-0", "env-2"])
        fake.states["env-2"] = fake.states["env-0"] = (
            WorkerState.GONE
        )  # so that the end is not the deadline either
        await until(lambda: "env-2" not in living(layout))
    assert living(layout) == {}


async def kill(layout: RunLayout, number: signal.Signals) -> None:
    """Kill the first program, and wait for the next under its name."""
    before = living(layout)["env-0"]
    os.kill(before, number)
    await until(lambda: living(layout).get("env-0", before) != before)


async def test_a_killed_program_comes_back_and_so_does_one_that_ends(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, Life(layout, config(layout)):
        for number in (signal.SIGKILL, signal.SIGINT):
            await until(lambda: "env-0" in living(layout))
            await kill(layout, number)
        fake.states["env-0"] = WorkerState.GONE


async def test_a_program_that_drained_for_an_earlier_orchestrator_is_ended_too(run_dir: Path) -> None:
    """An adopted worker counts as running, whatever was asked of it before."""
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, Life(layout, config(layout)):
        await until(lambda: "env-0" in living(layout))
        fake.states["env-0"] = WorkerState.GONE
        await until(lambda: list(living(layout)) == ["env-1"])
        assert fake.drained == []
        fake.states["env-1"] = WorkerState.GONE


async def test_arguments_that_a_program_refuses_end_the_run_at_once(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with Life(layout, config(layout, "import sys; print('error: unrecognized'); sys.exit(2)")) as life:
        await asyncio.wait({life.task}, timeout=30)
        error = life.task.exception()
    assert isinstance(error, ExceptionGroup)
    assert isinstance(error.exceptions[0], WorkersFailedError)
    assert "exit code 2: error: unrecognized" in str(error.exceptions[0])


async def test_a_program_that_ends_at_once_again_and_again_is_given_up(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with Life(layout, config(layout, "print('all done')")) as life:
        await asyncio.wait({life.task}, timeout=30)
        error = life.task.exception()
    assert isinstance(error, ExceptionGroup)
    assert "crashed 3 times in a row" in str(error.exceptions[0])
    assert "exit code 0" in str(error.exceptions[0])


async def test_programs_wait_for_a_gateway_whose_port_the_system_chooses(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "WAITING_FIRST_S", 0.0)
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, Life(layout, config(layout, port=0)):
        with caplog.at_level(logging.WARNING):
            await until(lambda: "waiting for the gateway" in caplog.text)
        assert living(layout) == {}
        write_json(layout.gateway, GatewayAddress(url="http://127.0.0.1:7", pid=os.getpid()))
        said = await asyncio.to_thread(wait_up, layout.log("env-0"))
        assert said.startswith("http://127.0.0.1:7/w/env-0")
        fake.states["env-0"] = WorkerState.GONE
