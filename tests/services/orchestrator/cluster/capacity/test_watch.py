"""What the service asks a cluster for, and when."""

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.services.orchestrator.cluster.capacity.watch import AGAIN_S, LOOK_S, CapacityWatch
from rolloutmq.services.orchestrator.cluster.messages import Demand, Node
from rolloutmq.services.orchestrator.cluster.resources import Need


def watch(**cluster: object) -> CapacityWatch:
    tree = {
        "environment": {"a": {"entry": "e.py:E", "gpus": 1}, "b": {"entry": "e.py:E"}},
        "broker": {"listen": "tcp://127.0.0.1:7000", "insecure": True},
        "cluster": {"engine": "ray", **cluster},
    }
    return CapacityWatch(RunConfig.model_validate(tree))


def test_nothing_is_asked_before_the_first_demand() -> None:
    one = watch()
    assert one.request(0.0) is None
    one.wants(Demand(workers={"a": 0, "b": 0}))
    assert one.request(0.0) == {}


def test_a_request_follows_the_demand_up_and_down_and_is_repeated() -> None:
    one = watch(worker_cpus=2.0)
    one.wants(Demand(workers={"a": 1, "b": 3}, avoid=("n",)))
    assert one.request(0.0) == {Need(2.0, 1.0): 1, Need(2.0): 3}
    assert one.avoid == ("n",)
    assert one.request(1.0) is None
    one.wants(Demand(workers={"a": 0, "b": 1}))
    assert one.request(1.0) == {Need(2.0): 1}
    assert one.request(AGAIN_S) is None
    assert one.request(1.0 + AGAIN_S) == {Need(2.0): 1}


def test_a_run_may_leave_the_autoscaler_alone() -> None:
    one = watch(autoscale=False)
    one.wants(Demand(workers={"a": 1}, avoid=("n",)))
    assert one.request(0.0) is None
    assert one.avoid == ("n",)


def test_nodes_are_looked_at_from_time_to_time() -> None:
    one = watch()
    assert one.is_due(0.0)
    found = one.seen([Node(id="n")], 0.0)
    assert found == one.report()
    assert [node.id for node in found.nodes] == ["n"]
    assert not one.is_due(LOOK_S / 2)
    assert one.is_due(LOOK_S)
