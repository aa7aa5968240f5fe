"""An engine on a host of a cluster: its relay, its address for the workers of every host, and its end."""

import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.launch.commands.remote.hosts import wait_until
from tests.launch.commands.remote.test_weights import Run, samples, streamed
from tests.services.orchestrator.cluster.test_host_process import Following

from rolloutmq.bus.engine_registry import engines_of, placed_name
from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.transport.keys.bundle import load_bundle
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout, WeightsAddress
from rolloutmq.schemas.network.keys import Role
from rolloutmq.services.orchestrator.cluster.host_engine import remove_directory, served_here
from rolloutmq.services.orchestrator.cluster.host_process import HostProcess
from rolloutmq.services.orchestrator.cluster.messages import HostOrder, own_version
from rolloutmq.services.process.identity import find_marked

TOKEN = "serving"
NAME = placed_name(1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run whose trainer is this process, with the weights of its first version."""
    with streamed(tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory in which the hosts make theirs."""
    found = tmp_path / "tmp"
    found.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def order(run: Run) -> HostOrder:
    return HostOrder(
        life="life",
        name=NAME,
        words=("inference", "--engine", NAME),
        token=TOKEN,
        run="streamed",
        version=own_version(),
        addresses=(run.hosts.address,),
        key=run.hosts.key("cluster-engine", Role.ENGINE).read_bytes(),
        term_grace_s=1.0,
        engine=True,
    )


def relays() -> list[psutil.Process]:
    """Return the relays of the hosts' engines."""
    found = [psutil.Process(pid) for pid in find_marked(f"{TOKEN}/")]
    return [one for one in found if "relay" in one.cmdline()]


def segment(directories: Path) -> Path:
    """Return the weights of the only engine in shared memory."""
    (address,) = directories.glob("*/run/weights.json")
    found = read_json(address, WeightsAddress)
    assert found is not None
    return Path(found.path)


def test_an_engine_samples_with_the_newest_version_drains_and_leaves_nothing(
    run: Run, directories: Path
) -> None:
    process = HostProcess(order(run), base_dir=run.hosts.root)
    following = Following(process)
    state = following.until(lambda told: told.state.pid, "a process").state
    wait_until(lambda: following.look() and engines_of(run.hosts.layout), "the engine")
    (found,) = engines_of(run.hosts.layout)
    assert (found.name, found.pid, found.key) == (NAME, state.pid, "cluster-engine")
    token = load_bundle(run.hosts.key("worker", Role.WORKER)).token
    for number in (1, 2):
        run.step(number)
        wait_until(partial(samples, found.url, token, [{"incarnation": 0, "step": number}]), f"step {number}")
    weights = segment(directories)
    assert weights.exists()
    process.send(signal.SIGUSR1, False)
    state = following.until(lambda told: told.state.over and not told.output, "the end").state
    assert (state.code, state.why) == (0, "")
    assert engines_of(run.hosts.layout) == [], "the broker has heard of its end"
    process.close()
    assert [*directories.iterdir()] == []
    assert not weights.exists()
    assert find_marked(f"{TOKEN}/") == []
    assert b"serving name=inference.cluster-1" in following.output


def test_an_engine_ends_with_its_relay_as_a_crash(run: Run, directories: Path) -> None:
    process = HostProcess(order(run), base_dir=run.hosts.root)
    following = Following(process)
    following.until(lambda told: told.state.pid, "a process")
    (relay,) = wait_until(relays, "its relay")
    relay.kill()
    state = following.until(lambda told: told.state.over and not told.output, "the end").state
    assert (state.code, state.why) == (None, "its relay ended: killed by SIGKILL")
    process.close()
    assert [*directories.iterdir()] == []
    assert find_marked(f"{TOKEN}/") == []


def test_an_engine_listens_where_the_nodes_reach_it() -> None:
    config = RunConfig.model_validate({"inference": {"port": 81, "advertise": "head"}})
    found = served_here(config, "tcp://127.0.0.1:7760").inference
    assert (found.host, found.port, found.advertise, found.insecure) == ("127.0.0.1", 0, "", True)


def test_the_directory_goes_with_the_weights_in_shared_memory(tmp_path: Path) -> None:
    made, layout = segment_file.create("weights", 4096), RunLayout(tmp_path / "life" / "run")
    layout.root.mkdir(parents=True)
    segment_file.write_address(layout.weights, made)
    os.close(made.fd)
    assert made.path.exists()
    remove_directory(tmp_path / "life")
    assert not made.path.exists()
    assert not (tmp_path / "life").exists()
