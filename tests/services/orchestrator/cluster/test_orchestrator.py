"""The orchestrator of a run on a cluster, with its real cluster service; hosts and broker are played."""

import asyncio
from pathlib import Path

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
