"""What killed processes left goes; what the living have, beside it, stays."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.transport.bindings import SOCKETS
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.launch import rundir
from rolloutmq.launch.commands import sweep
from rolloutmq.launch.settings import load
from rolloutmq.schemas.files import RunLayout

DEADLINE_S = 120.0
OWNER = """
import sys
from pathlib import Path
from rolloutmq.bus.shm import segment_file as segments
segments.SHM = Path(sys.argv[2])
segment = segments.create("weights", 8192)
segments.write_address(Path(sys.argv[1]), segment)
print(segment.path, flush=True)
sys.stdin.read()
"""
READER = """
import sys
from pathlib import Path
from rolloutmq.bus.shm import segment_file as segments
address = segments.read_address(Path(sys.argv[1]))
segment = segments.open_existing(Path(address.path), address.nonce)
print("attached", flush=True)
sys.stdin.read()
"""
PUBLISHER = """
import sys
from pathlib import Path
from torch import nn
from rolloutmq.trainer.weights.disk import DiskShare
share = DiskShare.create(nn.Linear(4, 4), Path(sys.argv[1]))
print("published", flush=True)
sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of everything, while other tests use the real place, stays in a directory of its own."""
    monkeypatch.setattr(segment_file, "SHM", tmp_path_factory.mktemp("memory"))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes; those that live at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with process:
            process.kill()


def own(start: Start, layout: RunLayout) -> "tuple[subprocess.Popen[str], Path]":
    """Start the owner of a segment; returns it and the segment."""
    owner = start("-c", OWNER, str(layout.weights), str(segment_file.SHM))
    return owner, Path(said(owner))


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def killed(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def make_run(root: Path, name: str) -> RunLayout:
    layout = RunLayout(root / name)
    layout.root.mkdir(mode=0o700)
    write_json(layout.config, load(None, environ={}))
    return layout


@pytest.fixture
def dead(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path, "dead")


@pytest.fixture
def alive(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path, "alive")


def test_segments_of_a_killed_owner_go_and_those_of_a_living_one_stay(
    start: Start, dead: RunLayout, alive: RunLayout
) -> None:
    (owner, left), (_, kept) = own(start, dead), own(start, alive)
    roots = [dead.root, alive.root]
    assert left not in sweep.sweep(roots)
    assert left.exists()
    killed(owner)
    removed = sweep.sweep(roots)
    assert {left, dead.weights} <= set(removed)
    assert not {kept, alive.weights} & set(removed)
    assert not left.exists()
    assert not dead.weights.exists()
    assert kept.exists()
    assert alive.weights.exists()
    assert not {left, kept, dead.weights, alive.weights} & set(sweep.sweep(roots))


def test_what_a_reader_still_maps_stays_until_it_is_killed_too(start: Start, dead: RunLayout) -> None:
    owner, left = own(start, dead)
    reader = start("-c", READER, str(dead.weights))
    assert said(reader) == "attached"
    killed(owner)
    assert left not in sweep.sweep([dead.root])
    assert left.exists()
    assert dead.weights.exists()
    killed(reader)
    assert set(sweep.sweep([dead.root])) >= {left, dead.weights}


def test_versions_of_a_killed_owner_go_and_those_of_a_living_one_stay(
    start: Start, dead: RunLayout, alive: RunLayout
) -> None:
    owners = [start("-c", PUBLISHER, str(layout.weights)) for layout in (dead, alive)]
    assert [said(owner) for owner in owners] == ["published"] * 2
    roots = [dead.root, alive.root]
    assert set(sweep.sweep(roots)) == set()
    killed(owners[0])
    assert set(sweep.sweep(roots)) == {dead.weights, dead.versions}
    assert not dead.versions.exists()
    assert alive.versions.exists()
    assert set(sweep.sweep(roots)) == set()


def test_a_stranger_with_the_pid_of_a_dead_owner_is_not_it(start: Start, dead: RunLayout) -> None:
    """The segment says when its owner began; whoever has its pid now began at another time."""
    owner, left = own(start, dead)
    killed(owner)
    living = segment_file.SegmentOwner.current()
    with left.open("r+b") as file:
        header = segment_file.HEADER.unpack(file.read(segment_file.HEADER.size))
        impostor = (*header[:3], living.pid, living.start_ticks - 1, living.namespace, 0)
        file.seek(0)
        file.write(segment_file.HEADER.pack(*impostor))
    assert left in sweep.sweep([])


def broker(start: Start, layout: RunLayout) -> "subprocess.Popen[str]":
    process = start("-m", "rolloutmq.launch.cli", "broker", "--run-dir", str(layout.root))
    deadline = time.monotonic() + DEADLINE_S
    while read_endpoints(layout.root) is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_sockets_of_a_killed_broker_go_and_those_of_a_living_one_stay(
    start: Start, dead: RunLayout, alive: RunLayout
) -> None:
    one, _ = broker(start, dead), broker(start, alive)
    roots = [dead.root, alive.root]
    assert set(sweep.sweep(roots)) == set()
    killed(one)
    assert set(sweep.sweep(roots)) == {dead.endpoints, *(dead.sockets / name for name in SOCKETS)}
    assert all((alive.sockets / name).exists() for name in SOCKETS)
    assert read_endpoints(alive.root) is not None


def test_a_run_whose_launcher_lives_is_left_alone(start: Start, dead: RunLayout) -> None:
    killed(broker(start, dead))
    with rundir.claimed(dead.root, "token", resume=True):
        assert set(sweep.sweep([dead.root])) == set()
        assert dead.endpoints.exists()
    assert dead.endpoints in sweep.sweep([dead.root])


def test_shared_memory_of_a_run_whose_launcher_lives_is_left_to_the_next_trainer(
    start: Start, dead: RunLayout, alive: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "RUNS", alive.root.parent)
    owner, left = own(start, alive)
    with rundir.claimed(alive.root, "token", resume=True):
        killed(owner)
        for named in ([alive.root], [dead.root], []):
            assert left not in sweep.sweep(named)
        assert left.exists()
    assert left in sweep.sweep([])


def test_a_damaged_record_of_a_launcher_stops_no_sweep(start: Start, dead: RunLayout) -> None:
    owner, left = own(start, dead)
    killed(owner)
    dead.owner.write_text("{")
    assert left in sweep.sweep([dead.root])


def test_what_is_no_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert sweep.report(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert str(tmp_path) not in capsys.readouterr().out
