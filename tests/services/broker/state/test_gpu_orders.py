"""Orders for GPUs: kept like every other order of an operator, also over a reset of the run."""

from pathlib import Path

from tests.services.broker.bench import Bench

from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import GetStatus, Reset, StatusReply
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.hardware import CordonGpu, GpuOrder, GpuOrdered, UncordonGpu
from rolloutmq.schemas.wire.replies import ErrorReply, Ok
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.broker.state.gpu_orders import GPUS_LIMIT, GpuOrders


def test_the_newest_order_of_each_gpu_is_told_with_its_number() -> None:
    bench = Bench()
    requests = (CordonGpu(gpu="GPU-1", reason="fan"), CordonGpu(gpu="GPU-2"), UncordonGpu(gpu="GPU-1"))
    first, second, third = (bench.ask(request, GpuOrdered).order for request in requests)

    assert first < second < third
    assert bench.pressure().gpu_orders == {
        "GPU-1": GpuOrder(number=third, cordoned=False),
        "GPU-2": GpuOrder(number=second, cordoned=True, reason="asked"),
    }


def test_a_reset_of_the_run_forgets_no_order() -> None:
    bench = Bench()
    bench.ask(CordonGpu(gpu="GPU-1"), GpuOrdered)
    bench.ask(Reset(), Ok)

    assert list(bench.pressure().gpu_orders) == ["GPU-1"]


def test_orders_are_bounded() -> None:
    orders = GpuOrders()
    for index in range(GPUS_LIMIT):
        assert not isinstance(orders.take(CordonGpu(gpu=f"GPU-{index}"), 0.0), ErrorReply)

    refused = orders.take(CordonGpu(gpu="GPU-more"), 0.0)

    assert isinstance(refused, ErrorReply)
    assert refused.code is ErrorCode.LIMIT
    # A GPU that an order is kept of can always be used again.
    assert not isinstance(orders.take(UncordonGpu(gpu="GPU-0"), 0.0), ErrorReply)


def test_numbers_grow_over_a_broker_that_kept_nothing() -> None:
    before = GpuOrders().take(CordonGpu(gpu="GPU-1"), 1000.0)
    after = GpuOrders().take(UncordonGpu(gpu="GPU-1"), 1000.5)

    assert not isinstance(before, ErrorReply)
    assert not isinstance(after, ErrorReply)
    assert before[0].order < after[0].order


def test_orders_survive_two_restarts_of_the_broker(run_dir: Path) -> None:
    config, layout = RunConfig(), RunLayout(run_dir)
    with running_broker(config, layout) as broker, BlockingClient(broker.endpoints.serve) as client:
        first = client.request(CordonGpu(gpu="GPU-1", reason="fan"))
    assert isinstance(first, GpuOrdered)
    # The first restart reads the event, the second the snapshot.
    for _ in range(2):
        with running_broker(config, layout) as broker, BlockingClient(broker.endpoints.serve) as client:
            status = client.request(GetStatus())
            assert isinstance(status, StatusReply)
            order = GpuOrder(number=first.order, cordoned=True, reason="fan")
            assert status.pressure.gpu_orders == {"GPU-1": order}
