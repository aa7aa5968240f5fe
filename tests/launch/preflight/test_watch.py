"""The place of code that takes long is in the user's code that a command runs, not in what started the command."""

import asyncio
from pathlib import Path
from typing import Any

from rolloutmq.launch.preflight.watch import frames_now
from rolloutmq.services.worker.environment import SingleTurn
from rolloutmq.services.worker.scripted import ScriptedPolicy, play
from rolloutmq.services.worker.user_code.failures import UserFiles, failure_at

SCRIPT = """
def main(command):
    return command()
"""
CODE = """
async def waits(event):
    await event.wait()
"""


def run(code: str, file: Path) -> dict[str, Any]:
    """Run code as that of a file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(file), "exec"), names)
    return names


def place_now(base_dir: Path, loop: asyncio.AbstractEventLoop | None = None) -> str:
    files = UserFiles(base_dir)
    return failure_at(frames_now(files, loop), files, "").where


class Slow(SingleTurn[str]):
    """Looks where it is."""

    def __init__(self, base_dir: Path) -> None:
        self._base_dir = base_dir
        self.seen = ""

    def task(self, rng: Any) -> str:
        self.seen = place_now(self._base_dir)
        return f"{rng}"

    def prompt(self, task: str) -> str:
        return task

    def score(self, task: str, completion: Any) -> float:  # noqa: ARG002 - the same for each
        return 1.0


def test_the_script_that_started_the_command_is_no_place(tmp_path: Path) -> None:
    main = run(SCRIPT, tmp_path / "bin" / "rolloutmq")["main"]
    assert main(lambda: place_now(tmp_path / "project")) == ""


def test_a_method_that_runs_is_the_place(tmp_path: Path) -> None:
    main = run(SCRIPT, tmp_path / "bin" / "rolloutmq")["main"]
    environment = Slow(Path(__file__).parent)
    main(lambda: play(environment, ScriptedPolicy("1"), size=1))
    assert environment.seen.startswith("test_watch.py:")


def test_a_task_that_waits_is_the_place_also_below_a_script(tmp_path: Path) -> None:
    main = run(SCRIPT, tmp_path / "bin" / "rolloutmq")["main"]
    waits = run(CODE, tmp_path / "project" / "sums.py")["waits"]

    async def look() -> str:
        task = asyncio.create_task(waits(asyncio.Event()))
        await asyncio.sleep(0)
        try:
            return place_now(tmp_path / "project", asyncio.get_running_loop())
        finally:
            task.cancel()

    assert main(lambda: asyncio.run(look())) == "sums.py:3"
