"""Operators' orders for GPUs: kept, numbered, and published to the orchestrator in each `pressure`.

The broker knows no GPUs. The newest order of a GPU holds until the next one, over restarts and over a reset of the
run, since it is about the machine.
"""

from collections.abc import Iterator
from typing import Final

from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.hardware import CordonGpu, GpuOrder, GpuOrdered, UncordonGpu
from rolloutmq.schemas.wire.replies import ErrorReply
from rolloutmq.services.broker.journal.format.events import GpuAsked

GPUS_LIMIT: Final = 1024
"""GPUs with an order: all of a large cluster, and few enough for every `pressure`."""


class GpuOrders:
    """The last order for each GPU."""

    def __init__(self) -> None:
        self._last: dict[str, GpuOrder] = {}
        self._number = 0

    def take(self, request: CordonGpu | UncordonGpu, wall: float) -> tuple[GpuOrdered, GpuAsked] | ErrorReply:
        """Take an order; return the reply, and the event that must be durable before it is sent.

        Numbers follow the wall clock, so they also grow over a broker that kept nothing of its earlier life.
        """
        if request.gpu not in self._last and len(self._last) >= GPUS_LIMIT:
            return ErrorReply(
                code=ErrorCode.LIMIT,
                detail=f"gpu: orders exist for {GPUS_LIMIT} GPUs, the limit (got {request.gpu})",
            )
        cordoned = isinstance(request, CordonGpu)
        reason = request.reason if isinstance(request, CordonGpu) else ""
        number = max(self._number + 1, int(1e3 * wall))
        event = GpuAsked(request.gpu, number, cordoned, reason)
        self.apply(event)
        return GpuOrdered(order=event.number), event

    def apply(self, event: GpuAsked) -> None:
        """Keep an order, a new one or one of an earlier life."""
        self._number = max(self._number, event.number)
        self._last[event.gpu] = GpuOrder(number=event.number, cordoned=event.cordoned, reason=event.reason)

    def current(self) -> dict[str, GpuOrder]:
        return dict(self._last)

    def events(self) -> Iterator[GpuAsked]:
        """Yield the orders as events, for a snapshot."""
        for gpu, order in self._last.items():
            yield GpuAsked(gpu, order.number, order.cordoned, order.reason)
