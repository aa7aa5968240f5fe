"""The one way to live, seen from outside: real processes, real signals, and the last line they write."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import ConfigError, MissingError
from rolloutmq.services.runner import (
    Stop,
    load_run,
    read_json,
    signals,
    wait_json,
    write_json,
)

PREAMBLE = """
import asyncio, signal, sys, time
from rolloutmq.schemas.errors import MissingError, WorkersFailedError
from rolloutmq.services.runner import run_service
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
    assert log.endswith("error: environment env: all its workers failed; env-0: always raises\n")


def test_handlers_and_mask_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        seen: list[str] = []
        with signals(seen.append):
            assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == ["SIGUSR1"]
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_a_drain_that_came_too_early_arrives_when_the_handler_stands() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        # To this thread alone: another one may not block the signal, and the process would die.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        drained: list[bool] = []
        with signals(lambda _: None, lambda: drained.append(True)):
            pass
        assert drained == [True]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


async def test_only_the_first_reason_counts() -> None:
    stop = Stop()
    stop.request("one")
    stop.request("two")
    assert await stop.wait() == "one"


def test_a_run_is_read_back_as_it_was_written(run_dir: Path) -> None:
    config = RunConfig.model_validate({"run": {"seed": 7}})
    write_json(run_dir / "config.json", config)
    found, layout = load_run(run_dir)
    assert found == config
    assert layout.root == run_dir


def test_a_directory_without_a_run_says_what_is_missing(run_dir: Path) -> None:
    with pytest.raises(MissingError, match=r"config\.json is missing"):
        load_run(run_dir)


def test_a_wrong_configuration_is_named_by_its_dotted_path(run_dir: Path) -> None:
    (run_dir / "config.json").write_text('{"broker": {"high_bytes": "many"}}')
    with pytest.raises(ConfigError, match=r"^broker\.high_bytes: "):
        load_run(run_dir)


def test_json_is_replaced_whole(run_dir: Path) -> None:
    path = run_dir / "x.json"
    assert read_json(path, dict[str, int]) is None
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path, dict[str, int]) == {"a": 2}
    assert [entry.name for entry in run_dir.iterdir()] == ["x.json"]
    path.write_text('{"a"')
    with pytest.raises(msgspec.DecodeError):
        read_json(path, dict[str, int])


async def test_a_file_of_another_process_is_waited_for(run_dir: Path) -> None:
    path = run_dir / "x.json"
    waiting = asyncio.create_task(wait_json(path, list[int]))
    await asyncio.sleep(0)
    assert not waiting.done()
    write_json(path, [1])
    assert await waiting == [1]
