"""Calls that may hang, with a time-out that the event loop can rely on.

Each call has its own daemon thread, since a thread stuck in a driver or a file system can be neither cancelled nor
joined. While a call is stuck no other starts under the same key, so that threads do not pile up; other keys continue.
The late result of a stuck call is discarded.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 2.0
"""Time-out of one call. Drivers reply in milliseconds, so a call that takes this long is itself worth reporting."""


class NothingToAskError(Exception):
    """Expected result: there is nothing to call, with the reason."""


@dataclass(frozen=True, slots=True)
class _Call:
    answer: "asyncio.Future[Any]"
    since: float


class BoundedCalls:
    """Bounded calls by key, for one event loop."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._calls: dict[str, _Call] = {}

    async def make(self, asks: Mapping[str, Callable[[], Any]], now: float) -> dict[str, Any]:
        """Make the calls whose key has none in flight; return the timely results, values or exceptions.

        Cancellation leaves calls in flight.
        """
        begun = {}
        for key, ask in asks.items():
            call = self._calls.get(key)
            if call is None or call.answer.done():
                begun[key] = self._calls[key] = _Call(_in_thread(key, ask), now)
        if begun:
            await asyncio.wait({call.answer for call in begun.values()}, timeout=self._timeout_s)
        answers = {}
        for key, call in begun.items():
            if call.answer.done():
                answers[key] = call.answer.result()
                del self._calls[key]
        return answers

    def waited_s(self, key: str, now: float) -> float:
        """Return how long a call has been in flight, including the wait that just ended."""
        return max(now - self._calls[key].since, 0.0) + self._timeout_s


def _in_thread(key: str, ask: Callable[[], Any]) -> "asyncio.Future[Any]":
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        result: Any
        try:
            result = ask()
        except NothingToAskError as error:
            result = error
        except Exception as error:  # the boundary of the thread
            logger.exception("probe failed key=%s", key)
            result = error
        # A closed loop has nobody waiting for the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, answer, result)

    threading.Thread(target=run, name=f"probe {key}", daemon=True).start()
    return answer


def _settle(answer: "asyncio.Future[Any]", result: Any) -> None:
    if not answer.done():
        answer.set_result(result)
