"""The room of a cluster: what fits on its nodes, beside cordons and processes that wait."""

from rolloutmq.schemas.wire.hardware import GpuOrder
from rolloutmq.services.orchestrator.cluster.capacity.room import LEAVES, ClusterRoom, cordons
from rolloutmq.services.orchestrator.cluster.messages import Node
from rolloutmq.services.orchestrator.cluster.resources import Need

ONE = Need(1.0)
NODES = (
    Node(id="a", host="h1", total={"CPU": 4.0}, free={"CPU": 3.0}),
    Node(id="b", host="h2", total={"CPU": 4.0, "GPU": 1.0}, free={"CPU": 1.0, "GPU": 1.0}),
)


def test_processes_fit_node_by_node() -> None:
    room = ClusterRoom(NODES)
    assert room.fits(ONE, 10) == 4
    assert room.fits(ONE, 3) == 3
    assert room.fits(Need(2.0), 10) == 1  # two more CPUs are free, each on another node
    assert room.fits(Need(1.0, 1.0), 10) == 1


def test_a_process_that_waits_has_its_room_already() -> None:
    assert ClusterRoom(NODES, waiting=[Need(2.0), ONE]).fits(ONE, 10) == 1


def test_a_cordoned_node_has_no_room() -> None:
    assert ClusterRoom(NODES, ["a"]).fits(ONE, 10) == 1


def test_the_limit_tells_how_many_wait_for_what() -> None:
    limit = ClusterRoom(NODES).limit(ONE, 2, 10, 9)
    assert limit is not None
    assert (limit.workers, limit.why) == (6, "no_room")
    assert limit.details == "no_room: the cluster has no room for 3 more workers, waiting for 1 CPU each"


def test_without_a_shortage_there_is_no_limit() -> None:
    assert ClusterRoom(NODES).limit(ONE, 2, 6, 9) is None
    assert ClusterRoom([]).limit(ONE, 4, 4, 4) is None


def test_one_worker_is_always_ordered_so_that_its_end_tells_the_reason() -> None:
    limit = ClusterRoom([]).limit(ONE, 0, 4, 2)
    assert limit is not None
    assert limit.workers == 1
    assert limit.details == "no_room: the cluster has no room for 1 more worker, waiting for 1 CPU each"


def test_nodes_are_cordoned_by_hand_and_by_the_cluster() -> None:
    nodes = (*NODES, Node(id="c", draining=True))
    orders = {
        "node/a": GpuOrder(number=1, cordoned=True, reason="a new kernel"),
        "node/b": GpuOrder(number=2, cordoned=False),
        "node/gone": GpuOrder(number=3, cordoned=True),
        "GPU-1": GpuOrder(number=4, cordoned=True),
    }
    assert cordons(nodes, orders) == {"a": "by hand: a new kernel", "c": LEAVES}
