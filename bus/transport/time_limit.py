"""Time limits of the calls of a client.

A call that waits takes `timeout_s`: seconds, or None to wait without a limit. When the time is over it raises
`WaitTimeoutError`, with the reason of the wait at that moment. It then has the effects of a cancelled call.
"""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rolloutmq.schemas.errors import UsageError, WaitTimeoutError

T = TypeVar("T")


def time_limit(name: str, seconds: float | None) -> float | None:
    """Return a time limit, None for an infinite one; UsageError unless it is a number of at least 0, or None."""
    if seconds is None or seconds == math.inf:
        return None
    if isinstance(seconds, (int, float)) and 0 <= seconds < sys.float_info.max:
        return float(seconds)
    raise UsageError(f"{name}: must be seconds, at least 0, or None for no limit (got {seconds!r})")


def within(
    timeout_s: float | None, what: str, work: Awaitable[T], problem: Callable[[], str]
) -> Awaitable[T]:
    """Return what awaits `work` for at most `timeout_s`, and then cancels it.

    Args:
        timeout_s: Longest wait in seconds; None waits without a limit.
        what: Name of the call, for the error.
        work: What is awaited. It must be safe to cancel.
        problem: Returns what the call waits for; asked when the time is over.

    Raises:
        WaitTimeoutError: The time is over.
    """
    return work if timeout_s is None else _limited(timeout_s, what, work, problem)


async def _limited(timeout_s: float, what: str, work: Awaitable[T], problem: Callable[[], str]) -> T:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise WaitTimeoutError(what, timeout_s, problem()) from None
