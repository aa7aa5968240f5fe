"""Orders to restart workers are published for a minute, each once."""

import pytest
from tests.services.broker.bench import Bench

from rolloutmq.schemas.wire.control import RestartWorker, WorkerBeat, WorkerBeatReply, WorkerState
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import ErrorReply, Ok
from rolloutmq.services.broker.state.restart_orders import KEPT_S, RESTARTS_LIMIT, RestartOrders

ORDER = RestartWorker(worker="e-0", order="o1", pid=7)


def test_an_order_is_in_each_pressure_once() -> None:
    bench = Bench()
    bench.ask(ORDER, Ok)
    bench.ask(ORDER, Ok)
    assert bench.pressure().restarts == (ORDER,)


def test_an_order_lapses() -> None:
    orders = RestartOrders()
    orders.take(ORDER, 0.0)
    orders.take(ORDER, KEPT_S - 0.1)
    assert orders.current(KEPT_S - 0.1) == (ORDER,)
    assert orders.current(KEPT_S) == ()


def test_orders_are_bounded() -> None:
    orders = RestartOrders()
    for index in range(RESTARTS_LIMIT):
        assert orders.take(RestartWorker(worker="e-0", order=f"o{index}"), 0.0) == Ok()
    refused = orders.take(RestartWorker(worker="e-0", order="more"), 0.0)
    assert isinstance(refused, ErrorReply)
    assert refused.code is ErrorCode.LIMIT
    assert orders.take(RestartWorker(worker="e-0", order="more"), KEPT_S) == Ok()


@pytest.mark.parametrize("worker", ["e-far.0", "inference.far"])
def test_what_joined_from_another_host_is_restarted_there(worker: str) -> None:
    bench = Bench()
    beat = WorkerBeat(worker="e-far.0", env="e", state=WorkerState.READY, pid=1, host="far", joined=True)
    bench.ask(beat, WorkerBeatReply)
    assert bench.refused(RestartWorker(worker=worker, order="o1")) is ErrorCode.INVALID
    assert bench.pressure().restarts == ()


def test_an_order_for_an_engine_on_a_cluster_is_the_orchestrators() -> None:
    bench, order = Bench(), RestartWorker(worker="inference.cluster-1", order="o1", pid=7)
    bench.ask(order, Ok)
    assert bench.pressure().restarts == (order,)
