"""What operators asked for with GPUs: kept, numbered, and told to the orchestrator in each `pressure`.

The broker knows no GPUs. An order is state and not an event: the newest of a GPU holds until there is another, over
restarts and over a reset of the run, since it is about the machine.
"""

from collections.abc import Iterator
from typing import Final

from rolloutmq.schemas.delivery import ErrorReply
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.schemas.hardware import CordonGpu, GpuOrder, GpuOrdered, UncordonGpu
from rolloutmq.services.broker.journal.facts import GpuAsked

GPUS_LIMIT: Final = 1024
"""GPUs that orders are kept of: all of a large cluster, and small enough to be in every `pressure`."""


class GpuOrders:
    """The last order for each GPU."""

    def __init__(self) -> None:
        self._last: dict[str, GpuOrder] = {}
        self._number = 0

    def take(self, request: CordonGpu | UncordonGpu, wall: float) -> tuple[GpuOrdered, GpuAsked] | ErrorReply:
        """Take an order; returns the reply, and the fact that must be durable before it is sent.

        Numbers follow the wall clock, so that they grow also over a broker that kept nothing of its former life.
        """
        if request.gpu not in self._last and len(self._last) >= GPUS_LIMIT:
            return ErrorReply(code=ErrorCode.LIMIT, detail="orders for too many GPUs")
        cordoned = isinstance(request, CordonGpu)
        reason = request.reason if isinstance(request, CordonGpu) else ""
        number = max(self._number + 1, int(1e3 * wall))
        fact = GpuAsked(request.gpu, number, cordoned, reason)
        self.apply(fact)
        return GpuOrdered(order=fact.number), fact

    def apply(self, fact: GpuAsked) -> None:
        """Keep an order, a new one or one of an earlier life."""
        self._number = max(self._number, fact.number)
        self._last[fact.gpu] = GpuOrder(number=fact.number, cordoned=fact.cordoned, reason=fact.reason)

    def told(self) -> dict[str, GpuOrder]:
        """Return the last order for each GPU."""
        return dict(self._last)

    def facts(self) -> Iterator[GpuAsked]:
        """Return them as facts, for a snapshot."""
        for gpu, order in self._last.items():
            yield GpuAsked(gpu, order.number, order.cordoned, order.reason)
