"""Latencies of the requests to an HTTP server, by declared route and class of the status.

A path that no route declares counts as `OTHER`: paths are whatever clients send. A request without a response, because
its client left, has no class.
"""

import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.services.process.latency_recorder import LatencyKey, LatencyRecorder

OTHER: Final = "other"
"""Route of the paths that are not declared."""


def status_class(status: int) -> str:
    """Return the class of an HTTP status, such as `4xx`; empty if it is none."""
    return f"{status // 100}xx" if 100 <= status < 600 else ""


class Exchange:
    """A request under way: its server sets the status, its handler calls `count_tokens`."""

    __slots__ = ("status", "tokens")

    def __init__(self) -> None:
        self.status = 0
        self.tokens = 0


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def count_tokens(tokens: int) -> None:
    """Count tokens that were sampled for the request of this task."""
    exchange = _current.get()
    if exchange is not None:
        exchange.tokens += tokens


class RequestLatencies:
    """Measures the requests of one server. Without a recorder it measures nothing.

    Args:
        recorder: Gets the durations.
        routes: Declared paths.
    """

    def __init__(self, recorder: LatencyRecorder | None, routes: Container[str]) -> None:
        self._recorder = recorder
        self._routes = routes

    @contextmanager
    def request(self, path: str) -> Iterator[Exchange]:
        """Measure the block, which answers a request."""
        exchange, begun = Exchange(), time.perf_counter()
        outer = _current.set(exchange)
        try:
            yield exchange
        finally:
            _current.reset(outer)
            if self._recorder is not None:
                route = path if path in self._routes else OTHER
                key = LatencyKey(Hop.HTTP, route=route, status=status_class(exchange.status))
                self._recorder.add(key, time.perf_counter() - begun, tokens=exchange.tokens)
