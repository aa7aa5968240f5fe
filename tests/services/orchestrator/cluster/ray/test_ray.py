"""A run on real Ray: it learns, and survives the death of a node, of the cluster service and of the orchestrator."""

import os
import signal
from collections.abc import Callable

import pytest
from tests.services.orchestrator.cluster.ray.nodes import Nodes, Run, directories, raylet_of, wait_until

from rolloutmq.services.process.identity import find_marked, runs

Start = Callable[..., Run]

pytestmark = [pytest.mark.rival, pytest.mark.timeout(900)]

LIST = "print(ray.util.list_named_actors(True))"


def actors(nodes: Nodes) -> str:
    """Return the named actors of the cluster, as text."""
    return nodes.asks(LIST)


def test_a_run_survives_a_node_its_service_and_its_orchestrator(start: Start, nodes: Nodes) -> None:
    before = directories()
    run = start("trainer.steps=400", "cluster.lease_s=30", "orchestrator.stable_s=3")
    run.progresses(10)
    first = run.workers()
    assert all(first.values())
    victim = first["sort3-0"]
    os.kill(raylet_of(victim), signal.SIGKILL)
    wait_until(lambda: run.workers().get("sort3-0") not in {victim, 0, None}, "the worker on another node")
    assert run.workers()["sort3-1"] == first["sort3-1"]
    wait_until(lambda: not runs(victim), "the end of the lost worker")
    run.progresses()
    again = run.workers()
    for service in ("cluster", "orchestrator"):
        killed = run.pid(service)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: run.pid(service) not in {killed, 0}, f"another {service}")  # noqa: B023
        run.progresses(10)
        assert {name: run.workers().get(name) for name in again} == again
    assert run.ends() == 0, run.told
    summary = run.summary()
    assert (summary["groups_lost"], summary["groups_trained_twice"]) == (0, 0)
    assert run.command("ledger", "verify").returncode == 0
    assert "worker ended produced=" in run.layout.log("sort3-1").read_text()
    assert "sort3" not in actors(nodes)
    assert directories() <= before
    assert not run.layout.cluster_key.exists()
    assert not any(map(runs, again.values()))


def test_the_quickstart_learns_on_nodes_of_which_one_dies(start: Start) -> None:
    """The command of the page; it begins with one worker, so that the law has to scale."""
    run = start("environment.sort3.min_workers=1", "orchestrator.stable_s=3")
    run.progresses(1)
    wait_until(lambda: len(run.running()) >= 2, "one more worker by the law")
    victim, known = next((name, pid) for name, pid in run.workers().items() if pid)
    os.kill(raylet_of(known), signal.SIGKILL)
    wait_until(lambda: run.pid(victim) != known, "the loss of a worker with its node")
    run.progresses()
    assert run.ends() == 0, run.told
    summary = run.summary()
    assert summary["reward_last"] > 0.7, summary
    assert (summary["groups_lost"], summary["groups_trained_twice"]) == (0, 0)
    assert run.command("ledger", "verify").returncode == 0


def test_what_no_node_has_is_told_in_time(start: Start, nodes: Nodes) -> None:
    run = start(
        "trainer.steps=50",
        "cluster.worker_cpus=64",
        "cluster.placement_timeout_s=3",
        "orchestrator.crash_limit=1",
    )
    assert run.ends() == 1
    assert "no node has started it for 3 s: needs 64 CPU; the largest node has 2 CPU" in run.told
    assert "sort3" not in actors(nodes)


def test_the_nodes_forget_a_run_that_was_killed(start: Start, nodes: Nodes) -> None:
    before = directories()
    run = start("trainer.steps=4000", "cluster.lease_s=5")
    run.progresses()
    workers, services = run.workers(), run.layout.processes.read_text()
    token = services.partition('"marker": "')[2].partition("/")[0]
    remote = set(workers.values())
    run.process.kill()
    run.process.wait()
    for pid in find_marked(f"{token}/"):
        if pid not in remote:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(runs, remote)), "the end of the workers")
    wait_until(lambda: "sort3" not in actors(nodes), "the end of the actors")
    assert directories() <= before


def test_down_ends_what_is_on_the_cluster(start: Start, nodes: Nodes) -> None:
    run = start("trainer.steps=4000")
    run.progresses()
    workers = run.workers()
    assert "sort3-0" in actors(nodes)
    assert run.command("down").returncode == 0
    assert not any(map(runs, workers.values()))
    assert "sort3" not in actors(nodes)
