"""The engine of one group: all calls of its rollouts go to one server, whose cache has their beginning.

A server that is away costs a pause, not a rollout: after a connection error, or a status of an overloaded or restarting
server, the call moves to the engine that `Policy.endpoint` chooses then.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final, TypeVar

from rolloutmq.services.worker.openai.client import BACKOFF_MAX_S, BACKOFF_S
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.policy import Policy

OVERLONG: Final = "context_length_exceeded"
"""Code of a server's error for a prompt without room for the answer."""
OVER: Final = "the rollout is over: nothing is sampled for it any more"

_T = TypeVar("_T")


class Engine:
    """The engine that the calls of one group go to; another one once it has failed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._endpoint: Endpoint | None = None
        self._closed = False

    async def endpoint(self) -> Endpoint:
        """Return the engine's endpoint; wait until one answers.

        Raises:
            PolicyUnavailableError: No server answered in time.
            RuntimeError: The rollout is over.
        """
        async with self._lock:
            if self._is_closed():
                raise RuntimeError(OVER)
            if self._endpoint is None:
                self._endpoint = await self._stack.enter_async_context(self._policy.endpoint())
            if self._is_closed():  # meanwhile
                await self._stack.aclose()
                raise RuntimeError(OVER)
            return self._endpoint

    def _is_closed(self) -> bool:
        return self._closed

    async def leave(self, failed: Endpoint) -> None:
        """Choose another engine for the next call, if this one is still that which failed."""
        async with self._lock:
            if self._endpoint is failed:
                self._endpoint = None
                await self._stack.aclose()

    async def close(self) -> None:
        """Let go of the engine; calls after this raise."""
        self._closed = True
        await self._stack.aclose()

    async def answered(
        self,
        attempt: Callable[[Endpoint], Awaitable[_T]],
        is_final: Callable[[Exception], bool],
        patience_s: float,
    ) -> _T:
        """Return the result of the first attempt that succeeds, each on the engine of its time.

        Args:
            attempt: Asks an engine.
            is_final: Returns whether an error of an attempt would come again.
            patience_s: Seconds of retries; after them the last error is raised.

        Raises:
            PolicyUnavailableError: No server answered in time.
            RuntimeError: The rollout is over.
        """
        until = time.monotonic() + patience_s
        longest_s = BACKOFF_S
        while True:
            endpoint = await self.endpoint()
            try:
                return await attempt(endpoint)
            except Exception as error:
                if is_final(error):
                    raise
                await self.leave(endpoint)
                pause_s = longest_s * random.uniform(0.5, 1.0)
                if time.monotonic() + pause_s >= until:
                    raise
            await asyncio.sleep(pause_s)
            longest_s = min(2 * longest_s, BACKOFF_MAX_S)
