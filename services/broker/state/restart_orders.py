"""Operators' orders to restart workers: published to the orchestrator in each `pressure`, for a minute.

An order is for one process, and the command that gave it waits for its confirmation. So it is not durable, and it
lapses: an orchestrator that is heard again much later does not surprise anybody.
"""

from typing import Final

from rolloutmq.schemas.wire.control import RestartWorker
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import ErrorReply, Ok

KEPT_S: Final = 60.0
RESTARTS_LIMIT: Final = 1024
"""Orders at once: few enough for every `pressure`."""


class RestartOrders:
    """The orders of the last minute."""

    def __init__(self) -> None:
        self._orders: dict[str, tuple[RestartWorker, float]] = {}

    def take(self, request: RestartWorker, now: float) -> Ok | ErrorReply:
        """Keep an order; the same one again changes nothing."""
        if len(self.current(now)) >= RESTARTS_LIMIT:
            return ErrorReply(
                code=ErrorCode.LIMIT,
                detail=f"worker: {RESTARTS_LIMIT} restarts were ordered within a minute, the limit (got "
                f"{request.worker})",
            )
        self._orders.setdefault(request.order, (request, now))
        return Ok()

    def current(self, now: float) -> tuple[RestartWorker, ...]:
        """Return the orders, and forget those that lapsed."""
        self._orders = {name: one for name, one in self._orders.items() if now - one[1] < KEPT_S}
        return tuple(order for order, _ in self._orders.values())
