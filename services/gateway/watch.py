"""The broker's state, asked for when somebody wants to know, by one question at a time for all who do.

Whoever asks says how old the answer may be. What is known already is told at once, and asked for anew meanwhile if it
is getting old, so that nobody waits who need not.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Final

from rolloutmq.bus.client import BrokerClient
from rolloutmq.bus.discovery import reach
from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.sockets import make_context
from rolloutmq.schemas.control import GetStatus, StatusReply
from rolloutmq.schemas.delivery import Reply, Request
from rolloutmq.schemas.errors import BrokerUnavailableError, ClosedError

logger = logging.getLogger(__name__)

FRESH_S: Final = 0.25
"""What others did may be seen so late; the broker tells its workers as often."""
AWAY_S: Final = 2.0
"""A broker that was not heard for longer, though it was asked, is away."""
PATIENCE_S: Final = 1.0
"""A broker that does not answer within it is away; what was known last counts until it comes back."""


class Watch:
    """Asks the broker. `async with Watch(where) as watch`."""

    def __init__(self, where: Where) -> None:
        self.status: StatusReply | None = None
        """The newest answer."""
        self.heard_at = float("-inf")
        """When it came, monotonic."""
        self.asked_at = float("-inf")
        """When it was asked for, monotonic: it takes into account what was done before."""
        self._where = where
        self._context = make_context()
        self._client: BrokerClient | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Watch":
        self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self._connecting, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._client is not None:
            await self._client.close()
        self._context.term()

    @property
    def answers(self) -> bool:
        """Whether the broker answered the last questions."""
        return time.monotonic() - self.heard_at <= AWAY_S

    async def connected(self) -> None:
        """Wait for the broker as long as it takes."""
        while self._client is None:
            self._connect()
            assert self._connecting is not None
            await asyncio.shield(self._connecting)

    async def refresh(self, since: float | None = None) -> StatusReply | None:
        """Return the state as it was at `since` or later, or, while the broker is away, the newest that is known.

        Args:
            since: Monotonic; by default now. What the caller itself did before, the answer takes into account.
        """
        now = time.monotonic()
        since = now if since is None else since
        for _ in range(2):  # what is under way may have been asked before
            if self._client is None:
                self._connect()
                break
            if self.asked_at >= since:
                if self.asked_at < now - FRESH_S / 2:
                    self.look()
                break
            await asyncio.wait({self._question(self._client)})
        return self.status

    def look(self) -> None:
        """Ask without waiting for the answer."""
        if self._client is not None:
            self._question(self._client)

    def _question(self, client: BrokerClient) -> "asyncio.Task[None]":
        """Return the question that is under way, or ask one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(client), name="question to the broker")
        return self._asking

    async def request(self, message: Request, timeout_s: float) -> Reply:
        """Ask anything else.

        Raises:
            BrokerUnavailableError: No answer in time.
            RefusedError: The broker said no.
        """
        return (await self.request_frames(message, timeout_s))[0]

    async def request_frames(self, message: Request, timeout_s: float) -> tuple[Reply, list[memoryview]]:
        """Like `request`, with the frames that follow."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.connected()
            client = self._client
            if client is None:
                break
            try:
                return await client.request_frames(message, max(0.0, until - time.monotonic()))
            except ClosedError:
                if client is self._client:
                    raise  # it is this watch that ends
                # The broker did not answer somebody else, who closed it: it is asked again when it is back.
        raise BrokerUnavailableError(str(self._where), timeout_s)

    def _connect(self) -> None:
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._reach(), name="way to the broker")

    async def _reach(self) -> None:
        self._client, _ = await reach(self._where, self._context)

    async def _ask(self, client: BrokerClient) -> None:
        asked_at = time.monotonic()
        try:
            reply = await client.request(GetStatus(), PATIENCE_S, PATIENCE_S / 2)
        except (BrokerUnavailableError, ClosedError):
            logger.warning("the broker does not answer: what was known last counts")
            if self._client is client:
                self._client = None
                await client.close()
                self._connect()
            return
        if isinstance(reply, StatusReply):
            self.status, self.heard_at, self.asked_at = reply, time.monotonic(), asked_at
