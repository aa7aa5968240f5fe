"""A connection for requests that may be repeated: it finds the broker again by itself, and holds nothing there."""

import asyncio
import logging
from typing import Final

from rolloutmq.bus.client import BrokerClient
from rolloutmq.bus.discovery import insist, reach
from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.sockets import make_context
from rolloutmq.schemas.delivery import Reply, Request
from rolloutmq.schemas.errors import BrokerUnavailableError, ClosedError

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 3.0
"""A broker that answers nothing for that long, beyond what it waits by agreement, is looked for again."""
REPEAT_S: Final = 0.5
"""Pause after which an unanswered request is sent again."""


class TaskLink:
    """One connection to whatever broker is there, for requests that may be repeated."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._context = make_context()
        self._reached: tuple[BrokerClient, int] | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def ask(self, message: Request, wait_s: float = 0.0) -> Reply:
        """Ask until there is an answer, as long as it takes; `wait_s` is what the broker waits by agreement.

        Raises:
            RefusedError, SessionFencedError: The broker said no.
            ClosedError: The link is closed.
        """
        while True:
            client, epoch = await self.connect()
            patience_s = wait_s + PATIENCE_S
            try:
                return (await insist(client, message, epoch, patience_s, max(REPEAT_S, patience_s / 2)))[0]
            except BrokerUnavailableError as error:
                logger.warning("broker lost, looking for it again error=%s", error)
                await self._drop(client)
            except ClosedError:  # by another task that found the broker gone, or for good: `connect` tells
                continue

    async def connect(self) -> tuple[BrokerClient, int]:
        """Return a client of the broker and the broker's epoch; waits for one as long as it takes."""
        async with self._turn:
            if self._closed:
                raise ClosedError
            if self._reached is None:
                client, info = await reach(self._where, self._context)
                self._reached = client, info.epoch
            return self._reached

    async def _drop(self, client: BrokerClient) -> None:
        if self._reached is not None and self._reached[0] is client:
            self._reached = None
            await client.close()

    async def close(self) -> None:
        """Close the socket; requests under way end with ClosedError. May be called twice."""
        if self._closed:
            return
        self._closed = True
        reached, self._reached = self._reached, None
        if reached is not None:
            await reached[0].close()
        self._context.term()
