"""Operating a run on real Ray: a full cluster, its autoscaler, cordoned and leaving nodes, logs of other nodes."""

import json
from collections.abc import Callable

import pytest
from tests.services.orchestrator.cluster.ray.nodes import Nodes, Run, wait_until

Start = Callable[..., Run]

pytestmark = [pytest.mark.rival, pytest.mark.timeout(900)]

REQUESTED = """
import ray.autoscaler._private.constants as constants
from ray.experimental.internal_kv import _internal_kv_get
print((_internal_kv_get(constants.AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"none").decode())
"""
DRAIN = """
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2 as names
reason = names.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
gcs = GcsClient(ray.get_runtime_context().gcs_address)
print(gcs.drain_node(sys.argv[2], reason, "it is taken away", 0)[0])
"""


def test_a_full_cluster_is_told_and_a_node_more_gets_what_waits(start: Start, nodes: Nodes) -> None:
    """Three nodes have room for three workers of two CPUs each; the fourth waits for the node that the test adds."""
    run = start("trainer.steps=4000", "cluster.worker_cpus=2", "orchestrator.stable_s=3")
    run.progresses()
    assert run.command("scale", "sort3", "4").returncode == 0
    told = "no_room: the cluster has no room for 1 more worker, waiting for 2 CPU each"
    wait_until(lambda: any(told in target.reason for target in run.supervision().targets), told)
    wait_until(lambda: len(run.running()) == 3, "the three workers that fit")
    assert told in run.command("status").stdout
    wait_until(lambda: json.loads(nodes.asks(REQUESTED)) == [{"CPU": 2.0}] * 4, "the request for nodes")
    nodes.add()
    wait_until(lambda: len(run.running()) == 4, "the worker on the new node")
    assert len(set(run.running().values())) == 4
    assert run.command("scale", "sort3", "2").returncode == 0
    wait_until(lambda: json.loads(nodes.asks(REQUESTED)) == [{"CPU": 2.0}] * 2, "the lower request")
    assert run.command("down").returncode == 0
    assert json.loads(nodes.asks(REQUESTED)) == []
    log = run.layout.log("cluster").read_text()
    assert "SIGTERM received" not in log, log
    assert run.command("ledger", "verify").returncode == 0
    nodes.remove()


def test_workers_leave_a_cordoned_node_and_one_that_ray_takes_away(start: Start, nodes: Nodes) -> None:
    run = start("trainer.steps=4000", "orchestrator.stable_s=3")
    run.progresses()
    wait_until(lambda: len(run.running()) >= 2, "two workers")
    first = run.node("sort3-0")
    status = run.command("status").stdout
    assert f"node     {first[:8]} on " in status, status
    assert "joined" not in status
    assert "started service=sort3-0" in run.command("logs", "sort3-0").stdout
    done = run.command("cordon", first[:12], "--reason", "a new kernel")
    assert done.returncode == 0, done.stderr
    assert f"node {first[:8]}" in done.stdout
    assert "cordoned, by hand: a new kernel" in done.stdout
    wait_until(lambda: first not in run.running().values(), "the end of the workers on the cordoned node")
    wait_until(lambda: len(run.running()) >= 2, "workers on other nodes")
    assert first not in run.running().values()
    assert run.command("uncordon", first).returncode == 0
    second = next(iter(run.running().values()))
    assert nodes.asks(DRAIN, second) == "True"
    leaves = "the cluster is about to remove it"
    wait_until(lambda: any(leaves in one.cordoned for one in run.supervision().nodes), leaves)
    wait_until(lambda: second not in run.running().values(), "the end of the workers on the leaving node")
    wait_until(lambda: len(run.running()) >= 2, "workers on the nodes that stay")
    run.progresses()
    assert run.command("down").returncode == 0
    assert run.command("ledger", "verify").returncode == 0
    assert run.summary()["groups_lost"] == 0
