"""The part of the run's own host that real Ray keeps for the trainer. Its GPUs are numbers alone: no device is used."""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.services.orchestrator.cluster.ray.nodes import Nodes, Run, wait_until

Start = Callable[..., Run]

pytestmark = [pytest.mark.rival, pytest.mark.timeout(900)]

HEAD = {"num_cpus": 2, "num_gpus": 3}
FREE = """
import json
from ray._private.state import available_resources_per_node
own = available_resources_per_node()[ray.get_runtime_context().get_node_id()]
print(json.dumps([own.get("CPU", 0.0), own.get("GPU", 0.0)]))
"""
LEAST = ("environment.sort3.min_workers=1", "environment.sort3.max_workers=1")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head with GPUs, where the run is, and one other node."""
    pytest.importorskip("ray", reason="needs Ray: make .venv-ray/.installed")
    directory = Path(tempfile.mkdtemp(prefix="rmq-ray-", dir="/tmp"))  # sockets need a short path
    made = Nodes(directory, HEAD, 1)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


def free_gpus(nodes: Nodes) -> float:
    """Return the GPUs of the head that nobody has."""
    return float(json.loads(nodes.asks(FREE))[1])


def test_ray_keeps_a_part_of_the_host_for_the_trainer(start: Start, nodes: Nodes, tmp_path: Path) -> None:
    run = start(
        "trainer.steps=4000", "cluster.reserve_cpus=1", "cluster.reserve_gpus=2", "cluster.lease_s=10", *LEAST
    )
    run.progresses()
    assert free_gpus(nodes) == 1.0
    gpus = psutil.Process(run.pid("trainer")).environ()["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(set(gpus)) == 2
    assert set(gpus) < {"0", "1", "2"}
    killed = run.pid("cluster")
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: run.pid("cluster") not in {killed, 0}, "another cluster service")
    run.progresses(20)
    assert free_gpus(nodes) == 1.0, "the next service renews the lease"
    (tmp_path / "other").mkdir()
    other = Run(
        *(nodes, tmp_path / "other", "cluster.reserve_gpus=2", "cluster.placement_timeout_s=3"), *LEAST
    )
    try:
        assert other.ends() == 2
    finally:
        other.close()
    assert "cluster.reserve_cpus: this host has not had room for 2 GPU for 3 s" in other.told, other.told
    run.progresses()
    assert run.command("down").returncode == 0
    wait_until(lambda: free_gpus(nodes) == 3.0, "the end of the reservation")


def test_more_than_the_host_has_is_told_at_once(start: Start) -> None:
    run = start("cluster.reserve_cpus=1", "cluster.reserve_gpus=8", *LEAST)
    assert run.ends() == 2
    told = "cluster.reserve_cpus: 1 CPU and 8 GPU are too much for this host, a node of 2 CPU and 3 GPU"
    assert told in run.told, run.told


def test_a_killed_run_gives_its_part_back(start: Start, nodes: Nodes) -> None:
    run = start("trainer.steps=4000", "cluster.reserve_gpus=3", "cluster.lease_s=5", *LEAST)
    run.progresses()
    assert free_gpus(nodes) == 0.0
    run.process.kill()
    run.process.wait()
    for one in json.loads(run.layout.processes.read_text()):
        os.kill(one["pid"], signal.SIGKILL)
    wait_until(lambda: free_gpus(nodes) == 3.0, "the end of the lease")
