"""The directory in which a vLLM listens goes with its engine, or is swept behind one that was killed."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rolloutmq.bus.endpoint import IPC_PATH_LIMIT_BYTES
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch import remains
from rolloutmq.launch.settings import load
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.inference.vllm import place

HOLDER = """
import sys
from pathlib import Path
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.inference.vllm import place
with place.held(RunLayout(Path(sys.argv[1])), "inference") as directory:
    (directory / "http").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["short", "long"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> RunLayout:
    """A run whose path the kernel takes for sockets, and one that is too long for it."""
    name = "run" if request.param == "short" else "r" * IPC_PATH_LIMIT_BYTES
    found = RunLayout(tmp_path / name)
    found.root.mkdir(mode=0o700)
    write_json(found.config, load(None, environ={}))
    return found


def test_it_goes_with_the_block(layout: RunLayout) -> None:
    with place.held(layout, "inference") as directory:
        assert len(str(directory / place.SOCKET)) <= IPC_PATH_LIMIT_BYTES
        (directory / place.SOCKET).touch()
    assert not directory.exists()
    assert place.left(layout) == []


def test_what_a_killed_engine_left_goes_and_what_a_living_one_has_stays(layout: RunLayout) -> None:
    command = [sys.executable, "-c", HOLDER, str(layout.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            directory = Path(engine.stdout.readline().strip())
            removed = remains.sweep_run(layout.root)
            assert (directory / "http").exists()
            assert directory not in removed
        finally:
            engine.kill()
    assert directory in remains.sweep_run(layout.root)
    assert not directory.exists()
    assert place.left(layout) == []
    assert (directory.parent == Path(tempfile.gettempdir())) == (len(layout.root.name) > 3)
