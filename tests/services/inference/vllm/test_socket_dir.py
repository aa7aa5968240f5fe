"""The socket directory of a vLLM is removed with its engine, or swept after a kill."""

import tempfile
from pathlib import Path

import pytest
from tests.services.inference.vllm.support.child import child

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.bindings import IPC_PATH_LIMIT_BYTES
from rolloutmq.launch.commands import sweep
from rolloutmq.launch.settings import load
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.inference.vllm import socket_dir

HOLDER = """
import sys
from pathlib import Path
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.inference.vllm import socket_dir
with socket_dir.held(RunLayout(Path(sys.argv[1])), "inference") as directory:
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
    with socket_dir.held(layout, "inference") as directory:
        assert len(str(directory / socket_dir.SOCKET)) <= IPC_PATH_LIMIT_BYTES
        (directory / socket_dir.SOCKET).touch()
    assert not directory.exists()
    assert socket_dir.left(layout) == []


def test_what_a_killed_engine_left_goes_and_what_a_living_one_has_stays(layout: RunLayout) -> None:
    with child(HOLDER, str(layout.root)) as engine:
        directory = Path(engine.line())
        removed = sweep.sweep_run(layout.root)
        assert (directory / "http").exists()
        assert directory not in removed
    assert directory in sweep.sweep_run(layout.root)
    assert not directory.exists()
    assert socket_dir.left(layout) == []
    assert (directory.parent == Path(tempfile.gettempdir())) == (len(layout.root.name) > 3)
