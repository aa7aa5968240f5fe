"""Nodes of a cluster as lines."""

from rolloutmq.schemas.files import NodeRecord
from rolloutmq.services.monitor.text.nodes import SHOWN, lines, nodes_of, placed

FREE = NodeRecord(node="0123456789ab", host="h1", total={"CPU": 4.0, "GPU": 1.0}, free={"CPU": 2.5})
USED = NodeRecord(node="cafecafecafe", host="h2", total={"CPU": 2.0}, workers=("e-0", "e-1", "e-2", "e-3"))
LEFT = NodeRecord(node="feedfeedfeed", total={"CPU": 2.0}, workers=("e-4",), cordoned="by hand: a\x1b[2J")


def test_a_node_shows_its_room_its_workers_and_its_cordon() -> None:
    assert [tuple(line) for line in lines([FREE, USED, LEFT])] == [
        (
            "node",
            "feedfeed on an unnamed host: 0 of 2 CPU free; 1 worker: e-4; cordoned, by hand: a\\u001b[2J",
            True,
        ),
        ("node", "cafecafe on h2: 0 of 2 CPU free; 4 workers: e-0, e-1, e-2, ...", False),
        ("node", "01234567 on h1: 2.5 of 4 CPU and 0 of 1 GPU free", False),
    ]


def test_many_nodes_are_counted() -> None:
    found = lines([FREE] * (SHOWN + 3))
    assert len(found) == SHOWN + 1
    assert found[-1].text == "and 3 more nodes"


def test_placed_workers_are_those_on_nodes() -> None:
    assert placed([FREE, USED, LEFT]) == {"e-0", "e-1", "e-2", "e-3", "e-4"}
    assert nodes_of(None) == ()


def test_engines_of_a_node_are_told_beside_its_workers() -> None:
    node = NodeRecord(node="0123456789ab", host="h1", workers=("e-0",), engines=("inference.cluster-1",))
    assert lines([node])[0].text.endswith("1 worker: e-0; 1 engine: inference.cluster-1")
    assert placed([node]) == {"e-0", "inference.cluster-1"}
