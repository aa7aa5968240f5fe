"""Code that holds the event loop of a worker is told while it does, also code that holds the interpreter lock."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from rolloutmq.schemas.files import Hang, RunLayout
from rolloutmq.services.process.stacks import hang_of
from rolloutmq.services.worker.user_code import loop_watch
from rolloutmq.services.worker.user_code.failures import UserFiles
from rolloutmq.services.worker.user_code.loop_watch import LoopWatch

LIMIT_S: Final = 60.0
USERS: Final = """
import time


def score(task, found, deadline):
    while (hang := found()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return hang
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "HELD_S", 0.2)
    monkeypatch.setattr(loop_watch, "LOOK_S", 0.05)


def users(base_dir: Path) -> dict[str, Any]:
    """Return the names of a file of the user."""
    file = base_dir / "sums.py"
    file.write_text(USERS)
    names: dict[str, Any] = {}
    exec(compile(USERS, str(file), "exec"), names)
    return names


def hang(layout: RunLayout) -> Callable[[], Hang | None]:
    return lambda: hang_of(layout, "add-0", os.getpid())


async def test_place_and_task_are_told_until_the_loop_runs_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout, score = RunLayout(tmp_path / "run"), users(tmp_path)["score"]
    layout.root.mkdir()
    with caplog.at_level(logging.WARNING), LoopWatch(layout, "add-0", UserFiles(tmp_path), 600.0):
        told = score((3, 4), hang(layout), time.monotonic() + LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while hang(layout)() is not None:  # noqa: ASYNC110 - another thread writes it
                await asyncio.sleep(0.01)
    assert isinstance(told, Hang)
    assert told.where in {"sums.py:6", "sums.py:7"}
    assert told.task == "(3, 4)"
    assert f"environment holds the event loop env=add held_s=0 at={told.where} task=(3, 4): " in caplog.text
    assert [*layout.hangs.iterdir()] == []


async def test_a_loop_that_runs_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = RunLayout(tmp_path)
    with caplog.at_level(logging.WARNING), LoopWatch(layout, "add-0", UserFiles(tmp_path), 600.0) as watch:
        until = watch.ticks + 10
        async with asyncio.timeout(LIMIT_S):
            while watch.ticks < until:  # noqa: ASYNC110 - a timer of the loop counts
                await asyncio.sleep(0.01)
        assert hang(layout)() is None
        assert layout.stack("add-0").read_bytes() == f"{os.getpid()} {tmp_path}\n".encode()


LOCKED: Final = """
import asyncio
import re
import sys
from pathlib import Path

from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.worker.user_code import loop_watch
from rolloutmq.services.worker.user_code.failures import UserFiles

loop_watch.LOCKED_S = 0.2


async def main():
    with loop_watch.LoopWatch(RunLayout(Path(sys.argv[1])), "add-0", UserFiles(Path(__file__).parent), 600.0):
        score("a" * 100 + "b")


def score(text):
    return re.match("(a+)+$", text)


asyncio.run(main())
"""


def test_code_that_holds_the_interpreter_lock_is_told_by_its_stack(tmp_path: Path) -> None:
    script, layout = tmp_path / "locked.py", RunLayout(tmp_path / "run")
    layout.root.mkdir()
    script.write_text(LOCKED)
    line = LOCKED.splitlines().index('    return re.match("(a+)+$", text)') + 1
    deadline = time.monotonic() + LIMIT_S
    with subprocess.Popen([sys.executable, str(script), str(layout.root)]) as process:
        try:
            while (found := hang_of(layout, "add-0", process.pid)) is None:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.01)
        finally:
            process.kill()
    assert found == Hang(pid=process.pid, where=f"locked.py:{line}")
