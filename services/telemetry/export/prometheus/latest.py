"""The newest event of each source, until the source falls silent. Pure."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from rolloutmq.services.telemetry.export.label_bound import OTHER, LabelBound

E = TypeVar("E")


class Latest(Generic[E]):
    """Newest events by the name of their source.

    Args:
        bound: Sources that are kept.
        stale_s: Silence after which an event is no longer told; None for never.
    """

    def __init__(self, bound: LabelBound, stale_s: float | None = None) -> None:
        self._bound = bound
        self._stale_s = stale_s
        self._events: dict[str, tuple[float, E]] = {}

    def put(self, name: str, event: E, now: float) -> None:
        """Keep an event in place of the one before; leave out one of a source beyond the bound."""
        if self._bound.label(name, now) != OTHER:
            self._events[name] = now, event

    def items(self, now: float) -> Iterator[tuple[str, E]]:
        """Yield what is not stale, by source."""
        for name, (heard_at, event) in list(self._events.items()):
            stale = self._stale_s is not None and now - heard_at > self._stale_s
            if stale or not self._bound.holds(name):
                del self._events[name]
            else:
                yield name, event
