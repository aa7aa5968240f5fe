"""Requests to a cluster's autoscaler, in a thread of their own: one that does not answer holds nobody up."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.schemas.printable import error_line

logger = logging.getLogger(__name__)

SLOW_S: Final = 10.0
"""Time without an answer after which a request is reported."""
CLOSE_S: Final = 3.0
"""Longest wait for the last request."""

Bundles = tuple[Mapping[str, float], ...]
Ask = Callable[[Bundles, Sequence[str]], None]
"""Called with the resources of each process and the nodes that do not count; may block and raise."""


class AutoscalerRequests:
    """Asks one request after the other, always the newest. For one thread, beside its own.

    Args:
        ask: Asks the autoscaler.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._changed = threading.Condition()
        self._next: tuple[Bundles, Sequence[str]] | None = None
        self._began_at: float | None = None
        self._failures = LogThrottle()
        self._told = ""

    def want(self, bundles: Bundles, avoid: Sequence[str] = ()) -> None:
        """Ask for this from now on, and return at once."""
        with self._changed:
            self._next = bundles, avoid
            if self._began_at is not None and time.monotonic() - self._began_at > SLOW_S:
                self._report(f"the last request has not been answered for more than {SLOW_S:g} s")
            if self._began_at is None:
                self._began_at = time.monotonic()
                threading.Thread(target=self._run, name="autoscaler", daemon=True).start()

    def settle(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until the newest request was made, at most so long; return whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: self._began_at is None, timeout_s)

    def _run(self) -> None:
        """Make requests until the newest one is made."""
        while (wanted := self._taken()) is not None:
            try:
                self._ask(*wanted)
                told = shapes(wanted[0])
                if told != self._told:
                    logger.info("asked the autoscaler for=%s", told)
                self._told = told
            except Exception as error:  # noqa: BLE001 - a cluster that does not grow is no end of the run
                self._report(error_line(error))

    def _taken(self) -> tuple[Bundles, Sequence[str]] | None:
        with self._changed:
            wanted, self._next = self._next, None
            self._began_at = None if wanted is None else time.monotonic()
            self._changed.notify_all()
            return wanted

    def _report(self, error: str) -> None:
        if self._failures.is_due(error, time.monotonic()):
            logger.warning("autoscaler not asked error=%s", error)


def shapes(bundles: Bundles) -> str:
    """Return bundles as text: `3 x 1 CPU + 1 GPU`."""
    told: dict[str, int] = {}
    for bundle in bundles:
        shape = " + ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        told[shape] = told.get(shape, 0) + 1
    return ", ".join(f"{count} x {shape}" for shape, count in told.items()) or "none"
