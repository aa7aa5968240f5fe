"""`rolloutmq top --once` takes a small multiple of the CPU time of its libraries, and imports nothing heavy.

It takes 0.44 s of CPU time where the libraries alone take 0.2 s, and about half a second of wall time where a
core is free for it. No test asserts seconds: they depend on the machine and on what else it does.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import python_command
from rolloutmq.services.broker.server import running_broker

LIBRARIES: Final = "import msgspec, numpy, pydantic, rich.live, typer, uvloop, zmq.asyncio"
RATIO: Final = 4.0
"""Most CPU time of the command, by that of an interpreter that imports the libraries: 2.1 was measured on two cores."""
ROUNDS: Final = 5
HEAVY: Final = frozenset(
    {"torch", "matplotlib", "transformers", "aiohttp", "uvicorn", "textual", "PIL", "pandas"}
)


def cpu_s(command: tuple[str, ...]) -> float:
    """Run a command, and return its CPU seconds."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.extended
def test_the_start_takes_a_small_multiple_of_its_libraries(run_dir: Path) -> None:
    layout, config = RunLayout(run_dir), RunConfig(environment={"e": EnvironmentConfig(entry="a:B")})
    write_json(layout.config, config)
    top = (*python_command(sys.executable, "rolloutmq.launch.cli"), "top", str(run_dir), "--once")
    libraries = (sys.executable, "-c", LIBRARIES)
    with running_broker(config, layout):
        rounds = [(cpu_s(top), cpu_s(libraries)) for _ in range(ROUNDS)]
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    assert ratio < RATIO, rounds


def test_the_start_imports_nothing_heavy() -> None:
    modules = "rolloutmq.launch.cli, rolloutmq.launch.rundir, rolloutmq.services.monitor.live.top"
    code = f"import {modules}, sys; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(told.split())
    assert not HEAVY & loaded
    assert not [name for name in loaded if name.startswith("rolloutmq.services.broker")], (
        "only its files are read"
    )
