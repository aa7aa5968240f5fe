"""Calls that may hang, made from an event loop that never waits longer than a bound for them.

Each has a daemon thread of its own, since a thread that is stuck in a driver or a file system can be neither cancelled
nor joined. While one is stuck no other is made under the same key, so that nothing piles up, and all other keys go on.
What a stuck call says in the end is old and is thrown away.
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
"""What is asked answers in milliseconds; who takes this long is in trouble, which is the news."""


class NothingToAskError(Exception):
    """Expected, and the answer: there is nothing that could be asked, and why."""


@dataclass(frozen=True, slots=True)
class _Call:
    answer: "asyncio.Future[Any]"
    since: float


class Calls:
    """Calls by key, for one event loop."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._calls: dict[str, _Call] = {}

    async def make(self, asks: Mapping[str, Callable[[], Any]], now: float) -> dict[str, Any]:
        """Make those calls whose key has none under way; return what came in time, values or exceptions.

        Cancellation leaves calls under way.
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
        """Return for how long a call has been under way, the wait that just ended included."""
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
        except Exception as error:  # The boundary of the thread.
            logger.exception("probe failed key=%s", key)
            result = error
        # Without a loop nobody waits for the answer any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, answer, result)

    threading.Thread(target=run, name=f"probe {key}", daemon=True).start()
    return answer


def _settle(answer: "asyncio.Future[Any]", result: Any) -> None:
    if not answer.done():
        answer.set_result(result)
