"""The orchestrator of a run on a cluster, with its real cluster service; hosts and broker are played."""

import asyncio
import signal
from pathlib import Path

from msgspec.structs import replace
from tests.services.orchestrator.cluster.fake_cluster import FakeCluster
from tests.services.orchestrator.fake_broker import TOKEN, FakeBroker, broker, until

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout, Supervision, WorkerRecord
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.services.orchestrator.cluster.service import ClusterService
from rolloutmq.services.orchestrator.server import Orchestrator
from rolloutmq.services.process.runner import Stop

FIRST_PID = 9
"""The pid of `FakeBroker.joined`."""


def config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "environment": {"env": {"entry": "m:C", "min_workers": 1, "max_workers": 1}},
            "orchestrator": {"tick_s": 0.02, "backoff_s": 0.01, "term_grace_s": 0.1, "end_deadline_s": 0.1},
            "broker": {"listen": "tcp://127.0.0.1:7000", "insecure": True},
            "cluster": {"engine": "ray"},
        }
    )


def record(layout: RunLayout) -> WorkerRecord | None:
    found = read_json(layout.supervision, Supervision)
    return found.workers[0] if found is not None and found.workers else None


def placed(layout: RunLayout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the workers and the engines of the first node."""
    found = read_json(layout.supervision, Supervision)
    first = None if found is None else next(iter(found.nodes), None)
    return ((), ()) if first is None else (first.workers, first.engines)


def limits(layout: RunLayout) -> dict[str, str]:
    found = read_json(layout.supervision, Supervision)
    return {} if found is None else found.limits


def pids(layout: RunLayout) -> list[int]:
    return [one.pid for one in read_json(layout.workers, list[ProcessIdentity]) or []]


async def heard(fake: FakeBroker, messages: int = 20) -> None:
    """Wait until the orchestrator has heard of so many more messages."""
    number = fake._number
    await until(lambda: fake._number > number + messages)


async def test_what_the_broker_says_of_an_earlier_life_is_not_of_one_without_a_host(run_dir: Path) -> None:
    layout, cluster, stop = RunLayout(run_dir), FakeCluster(), Stop()
    cluster.pids = iter((FIRST_PID, FIRST_PID + 1))
    service = asyncio.create_task(ClusterService(config(), layout, TOKEN, lambda: cluster).run(stop))
    async with broker(layout) as fake:
        running = asyncio.create_task(Orchestrator(config(), layout, TOKEN).run(stop))
        try:
            await until(lambda: pids(layout) == [FIRST_PID])
            cluster.places = False
            cluster.end(cluster.life_of("env-0"), 1)
            await until(lambda: pids(layout) == [0])
            fake.joined = {"env-0": WorkerState.FAILED}
            await heard(fake)
            found = record(layout)
            assert found is not None
            assert (found.worker, found.phase) == ("env-0", "running"), found.reason
            fake.joined = {}
            await heard(fake)
            cluster.place(cluster.life_of("env-0"))
            await until(lambda: pids(layout) == [FIRST_PID + 1])
        finally:
            stop.request("the test is over")
            await asyncio.wait({running, service})
    running.result()


async def test_engines_are_placed_and_end_after_the_workers(run_dir: Path) -> None:
    layout, cluster, stop = RunLayout(run_dir), FakeCluster(), Stop()
    tree = config().model_dump() | {"inference": {"min_engines": 2, "max_engines": 2}}
    settings = RunConfig.model_validate(tree)
    cluster.of_cluster = [replace(node, free=node.total) for node in cluster.of_cluster]
    service = asyncio.create_task(ClusterService(settings, layout, TOKEN, lambda: cluster).run(stop))
    stopping = Stop()
    async with broker(layout):
        running = asyncio.create_task(Orchestrator(settings, layout, TOKEN).run(stopping))
        try:
            await until(lambda: bool(cluster.life_of("env-0") and cluster.life_of("inference.cluster-1")))
            order = cluster.orders[cluster.life_of("inference.cluster-1")]
            assert (order.engine, order.words) == (True, ("inference", "--engine", "inference.cluster-1"))
            await until(lambda: ({"1 CPU": 2}, ()) in cluster.requests)
            await until(lambda: placed(layout) == (("env-0",), ("inference.cluster-1",)))
            cluster.lost.append(cluster.life_of("inference.cluster-1"))
            lost = cluster.life_of("inference.cluster-1")
            await until(lambda: cluster.life_of("inference.cluster-1") not in {"", lost})
            cluster.on[cluster.life_of("inference.cluster-1")] = "node-8"
        finally:
            stopping.request("the test is over")
            await asyncio.wait({running})
            stop.request("the test is over")
            await asyncio.wait({service})
    running.result()
    ended = [name for name, number, _ in cluster.signals if number == signal.SIGTERM]
    assert ended == ["env-0", "inference.cluster-1"]
    assert cluster.orders == {}


async def test_a_full_cluster_says_which_engine_is_missing(run_dir: Path) -> None:
    layout, cluster, stop = RunLayout(run_dir), FakeCluster(), Stop()
    tree = config().model_dump() | {"inference": {"min_engines": 2, "max_engines": 2}}
    tree["cluster"] |= {"engine_cpus": 4.0}
    settings = RunConfig.model_validate(tree)
    service = asyncio.create_task(ClusterService(settings, layout, TOKEN, lambda: cluster).run(stop))
    stopping = Stop()
    told = "no_room: the cluster has no room for another engine: it needs 4 CPU; the largest node has 2 CPU"
    async with broker(layout):
        running = asyncio.create_task(Orchestrator(settings, layout, TOKEN).run(stopping))
        try:
            await until(lambda: limits(layout).get("inference") == told)
            await until(lambda: ({"1 CPU": 1, "4 CPU": 1}, ()) in cluster.requests)
            assert not cluster.life_of("inference.cluster-1")
        finally:
            stopping.request("the test is over")
            await asyncio.wait({running})
            stop.request("the test is over")
            await asyncio.wait({service})
    running.result()
