"""The one way to live, seen from outside: real processes, real signals, and the last line they write."""

import signal
import subprocess
import sys

import pytest

from rolloutmq.services.process.runner import Stop

PREAMBLE = """
import asyncio, signal, sys, time
from rolloutmq.schemas.errors import MissingError, WorkersFailedError
from rolloutmq.services.process.runner import run_service
def ready(): print("ready", flush=True)
"""
WAITING = """
async def main(stop):
    ready()
    print("reason", await stop.wait(), flush=True)
"""


class Service:
    """A service in a process of its own, with its output."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Service":
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, output and log."""
        output, log = self.process.communicate(timeout=10)
        return self.process.returncode, output, log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_a_service_in_order(number: signal.Signals) -> None:
    with Service(f"{WAITING}\nsys.exit(run_service('s', main))") as service:
        service.process.send_signal(number)
        code, output, log = service.end()
    assert code == 0
    assert output == f"reason {number.name}\n"
    assert "ended service=s" in log


def test_sigusr1_drains_where_there_is_something_to_drain() -> None:
    code = f"{WAITING}\nsys.exit(run_service('s', main, on_drain=lambda: print('drain', flush=True)))"
    with Service(code) as service:
        assert service.process.stdout is not None
        service.process.send_signal(signal.SIGUSR1)
        assert service.process.stdout.readline() == "drain\n"
        service.process.send_signal(signal.SIGTERM)
        assert service.end()[0] == 0


def test_a_second_signal_forces_even_where_the_loop_is_stuck() -> None:
    stuck = """
async def main(stop):
    ready()
    await stop.wait()
    print("stuck", flush=True)
    while True: time.sleep(0.01)
sys.exit(run_service("s", main, on_force=lambda: print("forced", flush=True)))
"""
    with Service(stuck) as service:
        assert service.process.stdout is not None
        service.process.send_signal(signal.SIGINT)
        assert service.process.stdout.readline() == "stuck\n"
        service.process.send_signal(signal.SIGTERM)
        assert service.end()[:2] == (130, "forced\n")


def test_a_defect_is_logged_whole_and_its_reason_comes_last() -> None:
    with Service(
        "async def main(stop):\n ready()\n raise ValueError('a  b\\nc')\nsys.exit(run_service('s', main))"
    ) as service:
        code, _, log = service.end()
    assert code == 1
    assert "Traceback" in log
    assert log.endswith("error: ValueError: a b c\n")


def test_an_error_of_ours_needs_no_traceback_even_from_a_task_group() -> None:
    failing = """
async def fail(): raise MissingError("x", "get it")
async def main(stop):
    ready()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())
        await stop.wait()
sys.exit(run_service("s", main))
"""
    with Service(failing) as service:
        code, _, log = service.end()
    assert code == 1
    assert "Traceback" not in log
    assert log.endswith("error: x is missing: get it\n")


def test_what_starting_again_cannot_help_has_its_own_exit_code() -> None:
    failing = """
async def main(stop):
    ready()
    raise WorkersFailedError("env", "env-0", "always raises")
sys.exit(run_service("s", main))
"""
    with Service(failing) as service:
        code, _, log = service.end()
    assert code == 3
    assert log.endswith("error: environment.env: all workers failed; env-0: always raises\n")


async def test_only_the_first_reason_counts() -> None:
    stop = Stop()
    stop.request("one")
    stop.request("two")
    assert await stop.wait() == "one"
