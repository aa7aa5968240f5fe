"""The broker's status on demand, with one request at a time for all callers.

Each caller gives the maximum age of the reply. A known status is returned at once, and refreshed in the background as
it ages, so that no caller waits without need.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Final

from rolloutmq.bus.transport.discovery import reach
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.bus.transport.sockets import make_context
from rolloutmq.schemas.errors import BrokerUnavailableError, ClosedError
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.schemas.wire.replies import Reply
from rolloutmq.schemas.wire.requests import Request

logger = logging.getLogger(__name__)

FRESH_S: Final = 0.25
"""Maximum delay of other clients' changes; the broker informs its workers as often."""
AWAY_S: Final = 2.0
"""Time without a reply to a request after which the broker counts as away."""
PATIENCE_S: Final = 1.0
"""Request time-out; without a reply the last known status counts until the broker returns."""
HOLD_S: Final = 0.25
"""Interval in which a held request looks whether the gateway ends."""
PAUSE_S: Final = 0.05
"""Pause between requests to a connected broker that gives no status."""


class BrokerStatus:
    """Status requests to the broker. `async with BrokerStatus(where) as watch`."""

    def __init__(self, where: Where) -> None:
        self.status: StatusReply | None = None
        """Newest reply."""
        self.heard_at = float("-inf")
        """Time of its arrival, monotonic."""
        self.asked_at = float("-inf")
        """Time of its request, monotonic: the reply reflects everything done before."""
        self._where = where
        self._context = make_context()
        self._client: BrokerClient | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._ending = False

    async def __aenter__(self) -> "BrokerStatus":
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
        """Return whether the broker replied to the last requests."""
        return time.monotonic() - self.heard_at <= AWAY_S

    async def connected(self) -> None:
        """Wait for the broker, without a time limit."""
        while self._client is None:
            self._connect()
            assert self._connecting is not None
            await asyncio.shield(self._connecting)

    async def refresh(self, since: float | None = None) -> StatusReply | None:
        """Return the status as of `since` or later, or the newest known one while the broker is away.

        Args:
            since: Monotonic; default now. The reply reflects what the caller did before.
        """
        now = time.monotonic()
        since = now if since is None else since
        for _ in range(2):  # a request in flight may have started earlier
            if self._client is None:
                self._connect()
                break
            if self.asked_at >= since:
                if self.asked_at < now - FRESH_S / 2:
                    self.look()
                break
            await asyncio.wait({self._question(self._client)})
        return self.status

    async def known(self, since: float | None = None, *, wait_s: float) -> StatusReply:
        """Return the status like `refresh`, but wait for the first one: without it nothing is known.

        Args:
            since: As for `refresh`.
            wait_s: Longest wait in seconds. The search for the broker logs a wait of some seconds.

        Raises:
            BrokerUnavailableError: The broker has not replied once, for `wait_s` or until `end_holds`.
        """
        begun = time.monotonic()
        while (status := await self.refresh(since)) is None:
            waited_s = time.monotonic() - begun
            if waited_s >= wait_s or self._ending:
                raise BrokerUnavailableError(str(self._where), waited_s)
            pause_s = min(HOLD_S, wait_s - waited_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.connected()
                    await asyncio.sleep(PAUSE_S)
        return status

    def end_holds(self) -> None:
        """End all waits for the first status, and wait no more: the gateway ends."""
        self._ending = True

    def look(self) -> None:
        """Send a request without waiting for the reply."""
        if self._client is not None:
            self._question(self._client)

    def _question(self, client: BrokerClient) -> "asyncio.Task[None]":
        """Return the request in flight, or send one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(client), name="question to the broker")
        return self._asking

    async def request(self, message: Request, timeout_s: float) -> Reply:
        """Send any other request.

        Raises:
            BrokerUnavailableError: No reply in time.
            RefusedError: The broker refused the request.
        """
        return (await self.request_frames(message, timeout_s))[0]

    async def request_frames(self, message: Request, timeout_s: float) -> tuple[Reply, list[memoryview]]:
        """Like `request`, with the frames of the reply."""
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
                    raise  # this object is being closed
                # Another caller had no reply and closed the client: ask again when the broker is back.
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
            logger.warning("broker does not reply, using the last known status")
            if self._client is client:
                self._client = None
                await client.close()
                self._connect()
            return
        if isinstance(reply, StatusReply):
            self.status, self.heard_at, self.asked_at = reply, time.monotonic(), asked_at
