"""The cluster in the orchestrator: what it limits, wants, drains and takes back. The processes are played."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.process import ProcessSpec, Role, Step
from rolloutmq.schemas.wire.hardware import GpuOrder
from rolloutmq.services.orchestrator.cluster.capacity.manager import UNPLACED_S, ClusterManager, Fleet
from rolloutmq.services.orchestrator.cluster.messages import Demand, LifeState, Node
from rolloutmq.services.orchestrator.cluster.remote_processes import RemoteProcess, RemoteProcesses
from rolloutmq.services.orchestrator.supervision.core import KILL_LADDER, Ladder, Phase, ProcessView, Rung
from rolloutmq.services.orchestrator.supervision.worker_table import env_of

DRAIN: Ladder = ()
ENGINE_DRAIN: Ladder = (Rung(0.0, Step.USR1),)
PLACEMENT_S = 60.0


class Played:
    """A supervisor whose workers all run, and what it was told to retire."""

    def __init__(self) -> None:
        self.known: dict[str, ProcessView] = {}
        self.retired: dict[str, str] = {}
        self.ladders: list[Ladder] = []

    def views(self) -> dict[str, ProcessView]:
        return self.known

    def retire(self, name: str, ladder: Ladder, reason: str) -> None:
        self.retired[name] = reason
        self.ladders.append(ladder)
        self.known[name] = replace(self.known[name], phase=Phase.STOPPING)


class Cluster:
    """A run of one environment with two nodes of two CPUs, and workers on them."""

    def __init__(self, tmp_path: Path) -> None:
        tree = {
            "environment": {"e": {"entry": "e.py:E"}},
            "broker": {"listen": "tcp://127.0.0.1:7000", "insecure": True},
            "cluster": {"engine": "ray", "placement_timeout_s": PLACEMENT_S, "engine_cpus": 2},
            "inference": {"max_engines": 3},
        }
        self.remote = RemoteProcesses(tmp_path / "socket")
        self.workers, self.engines = Played(), Played()
        self.manager = ClusterManager(RunConfig.model_validate(tree), self.remote)
        self.spawned: list[RemoteProcess] = []

    def free(self, first: float, second: float, **changes: bool) -> None:
        """Say what is free on the nodes."""
        self.remote.nodes = tuple(
            Node(id=name, host=f"h-{name}", total={"CPU": 2.0}, free={"CPU": cpus}, **changes)
            for name, cpus in (("a", first), ("b", second))
        )

    def start(self, name: str, node: str = "", age_s: float = 60.0) -> None:
        """Order a worker or an engine some time ago, and place it."""
        is_worker = env_of(name) == "e"
        role, kind = (Role.WORKER, "e") if is_worker else (Role.INFERENCE, "")
        one = self.remote.spawn(ProcessSpec(name=name, role=role, argv=(), log="", kind=kind), "token")
        one.ordered_at -= age_s
        if node:
            one.take(LifeState(life=one.identity.life, name=name, node=node, host=f"h-{node}", pid=7))
            one.placed_at -= age_s
        self.spawned.append(one)
        fleet = self.workers if is_worker else self.engines
        fleet.known[name] = ProcessView(name, role, Phase.RUNNING, 0.0, 0.0, 0, 0, "")

    def attend(self, **orders: GpuOrder) -> None:
        told = {f"node/{node}": order for node, order in orders.items()}
        fleets = Fleet(self.workers, lambda _: DRAIN), Fleet(self.engines, lambda _: ENGINE_DRAIN)
        self.manager.attend(fleets, told or None)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    one = Cluster(tmp_path)
    yield one
    for process in one.spawned:
        process.close()


def test_before_the_nodes_are_known_nothing_is_limited(cluster: Cluster) -> None:
    assert cluster.manager.limit("e", 0, 4) is None
    assert cluster.manager.admits("e")
    assert cluster.manager.records() == ()


def test_what_is_wanted_beyond_the_room_is_told(cluster: Cluster) -> None:
    cluster.free(0.0, 1.0)
    cluster.manager.wants({"e": 5})
    limit = cluster.manager.limit("e", 3, 8)
    assert limit is not None
    assert limit.workers == 4
    assert "no room for 1 more worker, waiting for 1 CPU each" in limit.details


def test_workers_without_a_node_take_the_room_that_is_left(cluster: Cluster) -> None:
    cluster.free(0.0, 1.0)
    cluster.start("e-0", "a")
    assert cluster.manager.admits("e")
    cluster.start("e-1", age_s=0.0)
    assert not cluster.manager.admits("e")
    limit = cluster.manager.limit("e", 2, 8)
    assert limit is not None
    assert limit.workers == 2


def test_a_worker_that_has_just_got_its_node_may_not_be_counted_there_yet(cluster: Cluster) -> None:
    cluster.free(0.0, 1.0)
    cluster.start("e-0", "a")
    cluster.start("e-1", "b", age_s=0.0)
    assert not cluster.manager.admits("e")


def test_a_cordoned_node_loses_its_workers_and_gets_no_new_ones(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Demand] = []
    monkeypatch.setattr(cluster.remote, "_tell", told.append)
    cluster.free(1.0, 1.0)
    cluster.start("e-0", "a")
    cluster.start("e-1", "b")
    cluster.attend(a=GpuOrder(number=5, cordoned=True, reason="a new kernel"))
    assert cluster.workers.retired == {"e-0": "node a is cordoned: by hand: a new kernel"}
    assert cluster.workers.ladders == [DRAIN]
    cluster.manager.wants({"e": 2})
    cluster.manager.wants({"e": 2})
    assert told[-1] == Demand(workers={"e": 2}, avoid=("a",))
    assert sum(isinstance(one, Demand) for one in told) == 1
    first, second = cluster.manager.records()
    assert (first.cordoned, first.order, first.workers) == ("by hand: a new kernel", 5, ("e-0",))
    assert (second.cordoned, second.order, second.workers) == ("", 0, ("e-1",))
    cluster.attend()  # without a broker the orders hold
    assert cluster.manager.records()[0].cordoned


def test_a_node_that_the_cluster_removes_is_left_ahead(cluster: Cluster) -> None:
    cluster.free(1.0, 1.0, draining=True)
    cluster.start("e-0", "a")
    cluster.attend()
    assert cluster.workers.retired == {"e-0": "node a is cordoned: the cluster is about to remove it"}


def test_workers_that_no_node_has_room_for_are_taken_back(cluster: Cluster) -> None:
    cluster.free(0.0, 0.0)
    cluster.start("e-0", "a")
    cluster.start("e-1", age_s=UNPLACED_S / 2)
    cluster.attend()
    assert cluster.workers.retired == {}
    cluster.start("e-2", age_s=0.7 * PLACEMENT_S)  # a node may have begun to start it
    cluster.attend()
    assert cluster.workers.retired == {}
    cluster.spawned[-1].ordered_at -= 0.2 * PLACEMENT_S
    cluster.attend()
    assert cluster.workers.retired == {"e-2": "no_room: the cluster has no room for it, waiting for 1 CPU"}
    assert cluster.workers.ladders == [KILL_LADDER]


def test_one_for_which_the_nodes_are_too_small_is_taken_back_soon(cluster: Cluster) -> None:
    cluster.free(0.0, 0.0)
    for number, node in enumerate("aabb"):
        cluster.start(f"e-{number}", node)
    cluster.start("e-4", age_s=2 * UNPLACED_S)
    cluster.attend()
    assert list(cluster.workers.retired) == ["e-4"]


def test_one_for_which_a_node_has_room_is_not_taken_back(cluster: Cluster) -> None:
    cluster.free(1.0, 0.0)
    cluster.start("e-0", "b")
    cluster.start("e-1")
    cluster.attend()
    assert cluster.workers.retired == {}


def test_the_only_worker_of_an_environment_stays_ordered(cluster: Cluster) -> None:
    cluster.free(0.0, 0.0)
    cluster.start("e-0")
    cluster.start("e-1")
    cluster.attend()
    assert list(cluster.workers.retired) == ["e-1"]
    assert time.monotonic() - cluster.spawned[0].ordered_at > UNPLACED_S


def test_places_are_those_of_workers_with_a_node(cluster: Cluster) -> None:
    cluster.free(1.0, 1.0)
    cluster.start("e-0", "a")
    cluster.start("e-1")
    assert cluster.manager.places() == {"e-0": ("h-a", "a")}


def test_an_engine_is_ordered_if_a_node_has_room_for_it(cluster: Cluster) -> None:
    assert cluster.manager.refusal() == "no_room: the nodes of the cluster are not known yet"
    cluster.free(2.0, 1.0)
    assert cluster.manager.refusal() == ""
    cluster.start("inference.cluster-1", age_s=0.0)
    told = "no_room: the cluster has no room for another engine: it needs 2 CPU; every node that has as much is in use"
    assert cluster.manager.refusal() == told, "the one that waits takes the room"
    cluster.attend(b=GpuOrder(number=1, cordoned=True))
    cluster.free(1.0, 2.0)
    assert cluster.manager.refusal() == told


def test_engines_take_the_room_of_workers_and_are_wanted_with_them(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Demand] = []
    monkeypatch.setattr(cluster.remote, "_tell", told.append)
    cluster.free(2.0, 0.0)
    assert cluster.manager.admits("e")
    cluster.start("e-0", "b")
    cluster.start("inference.cluster-1", age_s=0.0)
    assert not cluster.manager.admits("e")
    limit = cluster.manager.limit("e", 1, 8)
    assert limit is not None
    assert limit.workers == 1
    cluster.manager.wants({"e": 2}, engines=1)
    assert told[-1] == Demand(workers={"e": 2, "inference.cluster": 1})


def test_an_engine_leaves_a_cordoned_node_by_its_own_drain(cluster: Cluster) -> None:
    cluster.free(2.0, 2.0)
    cluster.start("inference.cluster-1", "a")
    cluster.start("e-0", "a")
    cluster.attend(a=GpuOrder(number=5, cordoned=True, reason="a new kernel"))
    reason = "node a is cordoned: by hand: a new kernel"
    assert (cluster.engines.retired, cluster.engines.ladders) == (
        {"inference.cluster-1": reason},
        [ENGINE_DRAIN],
    )
    assert cluster.workers.retired == {"e-0": reason}
    first = cluster.manager.records()[0]
    assert (first.workers, first.engines) == (("e-0",), ("inference.cluster-1",))


def test_an_engine_without_room_is_taken_back_although_it_is_the_only_one(cluster: Cluster) -> None:
    """As after the loss of its node. The launcher runs the first engine, so none has to tell what is missing."""
    cluster.free(0.0, 1.0)
    cluster.start("e-0", "a")
    cluster.start("inference.cluster-1", age_s=2 * UNPLACED_S)
    cluster.attend()
    assert cluster.engines.retired == {}, "the others of node a may end"
    cluster.spawned[-1].ordered_at -= PLACEMENT_S
    cluster.attend()
    told = "no_room: the cluster has no room for it, waiting for 2 CPU"
    assert (cluster.engines.retired, cluster.engines.ladders) == (
        {"inference.cluster-1": told},
        [KILL_LADDER],
    )
