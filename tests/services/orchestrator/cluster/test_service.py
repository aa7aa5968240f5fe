"""The cluster service and the orchestrator's side of it, over the real socket; the hosts are played."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.services.orchestrator.cluster.fake_cluster import FakeCluster

from rolloutmq.bus.engine_registry import placed_name
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MissingError, RunDirInUseError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Restart, Role
from rolloutmq.services.orchestrator.cluster.messages import (
    FRAME_LIMIT_BYTES,
    RESERVATION,
    Demand,
    HostOrder,
    LifeState,
    Node,
    Nodes,
    Program,
    Report,
)
from rolloutmq.services.orchestrator.cluster.remote_processes import RemoteProcesses, short_path
from rolloutmq.services.orchestrator.cluster.service import ClusterService
from rolloutmq.services.orchestrator.supervision.core import (
    KILL_LADDER,
    Backoff,
    Phase,
    drain_ladder,
    term_ladder,
)
from rolloutmq.services.orchestrator.supervision.supervisor import Supervisor, identities_of
from rolloutmq.services.process.runner import Stop

TOKEN = "placing"
QUICK = Backoff(first_s=0.01, max_s=0.05, crash_limit=3, stable_s=10.0)
LIMIT_S = 15.0


def layout_of(tmp_path: Path) -> RunLayout:
    # Longer than the kernel's limit for the path of a socket.
    layout = RunLayout(tmp_path / ("run" * 30))
    layout.logs.mkdir(parents=True, exist_ok=True)
    return layout


def config(**cluster: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "environment": {"e": {"entry": "e.py:E", "gpus": 1}},
            "broker": {"listen": "tcp://127.0.0.1:7000", "insecure": True},
            "cluster": {"engine": "ray", **cluster},
        }
    )


def spec(name: str, layout: RunLayout) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        role=Role.WORKER,
        argv=("worker", "--worker", name),
        log=str(layout.log(name)),
        restart=Restart.ALWAYS,
        kind="e",
    )


@asynccontextmanager
async def serving(
    layout: RunLayout, cluster: FakeCluster, in_order: bool = True, **keys: object
) -> AsyncIterator[None]:
    """Serve within the block; end in order, or as a killed service does."""
    stop = Stop()
    task = asyncio.create_task(ClusterService(config(**keys), layout, TOKEN, lambda: cluster).run(stop))
    await until(lambda: layout.cluster_socket.exists() or task.done())
    try:
        yield
    finally:
        if in_order:
            stop.request("the test is over")
        else:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def supervising(layout: RunLayout) -> AsyncIterator[tuple[Supervisor, RemoteProcesses]]:
    """Supervise processes of the cluster, after the adoption of those on file."""
    remote = RemoteProcesses(layout.cluster_socket)
    identities = identities_of(layout.workers)
    supervisor = Supervisor(TOKEN, QUICK, identities=layout.workers, spawner=remote)
    async with supervisor:
        supervisor.adopt((one, spec(one.name, layout)) for one in identities)
        task = asyncio.create_task(remote.run())
        try:
            yield supervisor, remote
        finally:
            await supervisor.stop(list(supervisor.views()), KILL_LADDER, "the test is over")
            task.cancel()


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not met():  # noqa: ASYNC110 - another task changes it
            await asyncio.sleep(0.01)


async def test_a_process_has_the_identity_and_the_log_of_its_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    caplog.set_level(logging.INFO)
    async with serving(layout, cluster), supervising(layout) as (supervisor, _):
        supervisor.start(spec("e-0", layout))
        await until(lambda: supervisor.identity("e-0"))
        identity = supervisor.identity("e-0")
        assert identity is not None
        assert (identity.pid, identity.boot_id) == (1000, "boot")
        assert "placed name=e-0 host=node-7 pid=1000" in caplog.messages
        order = cluster.orders[identity.life]
        assert order.words == ("worker", "--worker", "e-0")
        assert order.addresses == ("tcp://127.0.0.1:7000",)
        assert str(cluster.needs[identity.life]) == "1 CPU and 1 GPU"
        await until(lambda: read_json(layout.workers, list[ProcessIdentity]) == [identity])
        cluster.output[identity.life] = b"error: no such file\n"
        cluster.end(identity.life, 1)
        await until(lambda: supervisor.views()["e-0"].restarts == 1)
        assert supervisor.views()["e-0"].crashes == 1
        assert layout.log("e-0").read_bytes() == b"error: no such file\n"
        await until(lambda: cluster.life_of("e-0") not in {"", identity.life})


async def test_a_program_is_ordered_with_its_arguments_and_variables(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster), supervising(layout) as (supervisor, _):
        supervisor.start(
            replace(spec("e-0", layout), argv=("python", "x.py"), env={"A": "1"}, foreign=True, cwd="/here")
        )
        await until(lambda: supervisor.identity("e-0"))
        identity = supervisor.identity("e-0")
        assert identity is not None
        assert identity.host == "node-7"
        order = cluster.orders[identity.life]
        assert order.program == Program(argv=("python", "x.py"), variables={"A": "1"})
        assert order.words == ()


async def test_the_reason_of_a_crash_is_the_last_line_of_its_log(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster), supervising(layout) as (supervisor, _):
        supervisor.start(spec("e-0", layout))
        await until(lambda: supervisor.identity("e-0"))
        life = cluster.life_of("e-0")
        cluster.output[life] = b"error: the model is wrong\n"
        cluster.end(life, 2)
        await until(lambda: supervisor.views()["e-0"].phase is Phase.FATAL)
        assert supervisor.views()["e-0"].reason == "exit code 2: error: the model is wrong"


async def test_a_lost_host_loses_its_processes_alone(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster), supervising(layout) as (supervisor, _):
        for name in ("e-0", "e-1"):
            supervisor.start(spec(name, layout))
        await until(lambda: supervisor.identity("e-0") and supervisor.identity("e-1"))
        other, life = supervisor.identity("e-1"), cluster.life_of("e-0")
        cluster.lost.append(life)
        cluster.places = False
        await until(lambda: supervisor.views()["e-0"].restarts == 1)
        assert supervisor.views()["e-0"].reason == "lost with its host"
        assert supervisor.identity("e-0") is None
        await until(lambda: cluster.life_of("e-0") not in {"", life})
        cluster.place(cluster.life_of("e-0"))
        await until(lambda: supervisor.identity("e-0"))
        assert supervisor.identity("e-1") == other


async def test_without_a_node_the_reason_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    caplog.set_level(logging.INFO)
    cluster.places = False
    async with (
        serving(layout, cluster, placement_timeout_s=0.3, worker_cpus=4.0),
        supervising(layout) as (supervisor, _),
    ):
        supervisor.start(spec("e-0", layout))
        await until(lambda: "waiting name=e-0 for=a host of the cluster" in caplog.messages)
        await until(lambda: supervisor.views()["e-0"].phase is Phase.FATAL)
        assert supervisor.views()["e-0"].reason.endswith(
            "no node has started it for 0.3 s: needs 4 CPU and 1 GPU; the largest node has 2 CPU"
        )
        assert cluster.orders == {}


async def test_the_demand_reaches_the_cluster_and_is_withdrawn_at_the_end(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster, worker_cpus=2.0), supervising(layout) as (_, remote):
        remote.want(Demand(workers={"e": 3}))
        await until(lambda: cluster.requests)
        remote.want(Demand(workers={"e": 1}, avoid=("node-8",)))
        await until(lambda: len(cluster.requests) == 2)
    assert cluster.requests == [
        ({"2 CPU and 1 GPU": 3}, ()),
        ({"2 CPU and 1 GPU": 1}, ("node-8",)),
        ({}, ()),
    ]


async def test_another_service_hears_the_demand_before_the_orders(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with supervising(layout) as (supervisor, remote):
        remote.want(Demand(workers={"e": 1}, avoid=("node-8",)))
        supervisor.start(spec("e-0", layout))
        async with serving(layout, cluster, autoscale=False):
            await until(lambda: supervisor.identity("e-0"))
            assert cluster.avoided == {cluster.life_of("e-0"): ("node-8",)}
            await supervisor.stop(["e-0"], KILL_LADDER, "the test is over")
    assert cluster.requests == []


async def test_the_nodes_of_the_cluster_and_of_each_life_are_told(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster), supervising(layout) as (supervisor, remote):
        await until(lambda: remote.nodes is not None)
        assert remote.nodes is not None
        assert [node.id for node in remote.nodes] == ["node-7", "node-8"]
        supervisor.start(spec("e-0", layout))
        await until(lambda: remote.living()[0].node == "node-7")
        assert remote.living()[0].is_placed
        await until(lambda: supervisor.identity("e-0"))
        assert remote.living()[0].host == "node-7"
        await supervisor.stop(["e-0"], KILL_LADDER, "the test is over")


class Counting(FakeCluster):
    """Its first node has as much left as it was looked at, to tell the looks apart."""

    looks = 0
    found_at = 0
    """The look at which a life was seen to have a node."""

    def nodes(self) -> tuple[Node, ...]:
        self.looks += 1
        return (Node(id="node-7", free={"CPU": float(self.looks)}),)

    def placed(self, lives: Collection[str]) -> dict[str, str]:
        found = super().placed(lives)
        self.found_at = self.found_at or (self.looks if found else 0)
        return found


async def test_a_node_is_told_after_the_lives_that_have_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between, a life would have neither a node nor room on one, and be taken back."""
    layout, cluster = layout_of(tmp_path), Counting()
    told: list[Report] = []
    tell = ClusterService._tell

    def noted(service: ClusterService, report: Report | None) -> None:
        told.extend([] if report is None else [report])
        tell(service, report)

    monkeypatch.setattr(ClusterService, "_tell", noted)
    async with serving(layout, cluster), supervising(layout) as (supervisor, _):
        await until(lambda: told)
        supervisor.start(spec("e-0", layout))
        await until(lambda: cluster.found_at and cluster.looks > cluster.found_at)
        placed = next(place for place, one in enumerate(told) if isinstance(one, LifeState) and one.node)
        looks = [one.nodes[0].free["CPU"] for one in told[:placed] if isinstance(one, Nodes) and one.nodes]
        assert max(looks) < cluster.found_at
        await supervisor.stop(["e-0"], KILL_LADDER, "the test is over")


async def test_signals_reach_the_host_and_a_process_without_one_just_ends(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster), supervising(layout) as (supervisor, _):
        supervisor.start(spec("e-0", layout))
        await until(lambda: supervisor.identity("e-0"))
        supervisor.retire("e-0", term_ladder(0.2), "enough")
        await until(lambda: supervisor.views()["e-0"].phase is Phase.ENDED)
        assert [one for one in cluster.signals if one[1] != signal.SIGCONT] == [
            ("e-0", signal.SIGTERM, True),
            ("e-0", signal.SIGKILL, True),
        ]
        cluster.places = False
        supervisor.start(spec("e-1", layout))
        await until(lambda: cluster.orders)
        supervisor.retire("e-1", term_ladder(30.0), "enough")
        await until(lambda: supervisor.views()["e-1"].phase is Phase.ENDED)
        await until(lambda: not cluster.orders)


async def test_a_killed_service_finds_the_processes_and_doubles_none(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with supervising(layout) as (supervisor, _):
        async with serving(layout, cluster, in_order=False):
            supervisor.start(spec("e-0", layout))
            await until(lambda: supervisor.identity("e-0"))
        first = supervisor.identity("e-0")
        supervisor.start(spec("e-1", layout))  # nobody hears it
        cluster.disconnect()
        async with serving(layout, cluster):
            await until(lambda: supervisor.identity("e-1"))
            assert supervisor.identity("e-0") == first
            assert sorted(order.name for order in cluster.orders.values()) == ["e-0", "e-1"]
            await supervisor.stop(["e-0", "e-1"], KILL_LADDER, "the test is over")


async def test_a_new_service_kills_no_draining_process_whose_host_answers_late(tmp_path: Path) -> None:
    """The orchestrator repeats its signals before the first answer of the host, which may take a long poll."""
    layout, cluster = layout_of(tmp_path), FakeCluster()
    drained = [("e-0", signal.SIGUSR1, False)]
    async with supervising(layout) as (supervisor, _):
        async with serving(layout, cluster, in_order=False):
            supervisor.start(spec("e-0", layout))
            await until(lambda: supervisor.identity("e-0"))
            supervisor.retire("e-0", drain_ladder(0.01, 60.0, 5.0), "scaled down")
            await until(lambda: cluster.signals == drained)
        cluster.disconnect()
        cluster.silent = True
        async with serving(layout, cluster):
            await until(lambda: cluster.signals == drained * 2)
            cluster.silent = False
            cluster.end(cluster.life_of("e-0"), 0)
            await until(lambda: supervisor.views()["e-0"].phase is Phase.ENDED)
            assert supervisor.views()["e-0"].reason == "exit code 0"


async def test_a_new_orchestrator_adopts_what_is_on_file_and_releases_the_rest(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster):
        killed = RemoteProcesses(layout.cluster_socket)
        first = Supervisor(TOKEN, QUICK, identities=layout.workers, spawner=killed)
        await first.__aenter__()
        task = asyncio.create_task(killed.run())
        first.start(spec("e-0", layout))
        await until(lambda: first.identity("e-0"))
        identity = first.identity("e-0")
        await until(lambda: read_json(layout.workers, list[ProcessIdentity]) == [identity])
        unwritten = killed.spawn(spec("e-1", layout), TOKEN)
        await until(lambda: len(cluster.orders) == 2)
        task.cancel()
        first._release()
        unwritten.close()
        async with supervising(layout) as (second, _):
            assert second.identity("e-0") == identity
            await until(lambda: len(cluster.orders) == 1)
            assert second.views()["e-0"].phase is Phase.RUNNING
            assert [order.name for order in cluster.orders.values()] == ["e-0"]


async def test_an_orderly_end_leaves_nothing_on_the_cluster(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    remote = RemoteProcesses(layout.cluster_socket)
    task = asyncio.create_task(remote.run())
    async with serving(layout, cluster):
        process = remote.spawn(spec("e-0", layout), TOKEN)
        await until(lambda: process.identity.pid)
    task.cancel()
    process.close()
    assert cluster.orders == {}
    assert not layout.cluster_socket.exists()


async def test_a_process_that_was_given_up_is_released_at_its_end(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    remote = RemoteProcesses(layout.cluster_socket)
    task = asyncio.create_task(remote.run())
    async with serving(layout, cluster):
        process = remote.spawn(spec("e-0", layout), TOKEN)
        await until(lambda: process.identity.pid)
        process.close()
        assert cluster.orders
        cluster.end(cluster.life_of("e-0"), -9)
        await until(lambda: not cluster.orders)
    task.cancel()


async def test_one_run_has_one_service_and_needs_a_cluster(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster):
        with pytest.raises(RunDirInUseError):
            await ClusterService(config(), layout, TOKEN, lambda: cluster).run(Stop())

    def missing() -> FakeCluster:
        raise MissingError("a Ray cluster at this host", "start one with `ray start --head`")

    with pytest.raises(MissingError, match="ray start --head"):
        await ClusterService(config(), layout, TOKEN, missing).run(Stop())


async def test_a_client_of_another_protocol_disturbs_nobody(tmp_path: Path) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    async with serving(layout, cluster), supervising(layout) as (supervisor, _):
        with short_path(layout.cluster_socket) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        writer.write((FRAME_LIMIT_BYTES + 1).to_bytes(4, "big"))
        async with asyncio.timeout(LIMIT_S):
            while await reader.read(1 << 16):
                continue
        writer.close()
        supervisor.start(spec("e-0", layout))
        await until(lambda: supervisor.identity("e-0"))


async def test_an_engine_is_ordered_with_its_own_key_and_resources(tmp_path: Path) -> None:
    layout, cluster, name = layout_of(tmp_path), FakeCluster(), placed_name(1)
    layout.cluster_key.write_bytes(b"of workers")
    layout.cluster_engine_key.write_bytes(b"of engines")
    engine = replace(spec(name, layout), role=Role.INFERENCE, kind="", argv=("inference", "--engine", name))
    async with (
        serving(layout, cluster, engine_cpus=2.0, engine_gpus=0.5),
        supervising(layout) as (supervisor, _),
    ):
        for one in (engine, spec("e-0", layout)):
            supervisor.start(one)
        await until(lambda: supervisor.identity(name) and supervisor.identity("e-0"))
        life, other = cluster.life_of(name), cluster.life_of("e-0")
        assert (cluster.orders[life].key, cluster.orders[life].engine) == (b"of engines", True)
        assert cluster.orders[life].words == ("inference", "--engine", name)
        assert str(cluster.needs[life]) == "2 CPU and 0.5 GPU"
        assert (cluster.orders[other].key, cluster.orders[other].engine) == (b"of workers", False)


async def test_what_holds_a_part_of_this_host_is_no_process_and_ends_with_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout, cluster = layout_of(tmp_path), FakeCluster()
    order = HostOrder(life="held", name=RESERVATION, token=TOKEN, run="r", version="", addresses=())
    cluster.orders["held"], cluster.states["held"] = order, LifeState(life="held", name=RESERVATION)
    async with serving(layout, cluster), supervising(layout) as (supervisor, remote):
        supervisor.start(spec("e-0", layout))
        await until(lambda: supervisor.identity("e-0"))
        assert [one.identity.name for one in remote.living()] == ["e-0"]
        assert cluster.removed == [], "the orchestrator does not know it, and may not release it"
        asked = cluster.questions["held"]
        cluster.output["held"] = b"."  # the played answer is another one
        await until(lambda: cluster.questions["held"] > asked)
    assert "held" in cluster.removed
    cluster = FakeCluster()
    cluster.orders["held"] = order
    cluster.lost.append("held")
    async with serving(layout, cluster):
        told = "the cluster does not keep the reserved part of this host any more error=lost with its host"
        await until(lambda: told in caplog.messages)
