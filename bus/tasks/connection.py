"""The connection of a task client: it reconnects automatically and keeps no state at the broker."""

import asyncio
import logging
from typing import Final

from rolloutmq.bus.transport.discovery import Search, insist, reach
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.bus.transport.sockets import make_context
from rolloutmq.schemas.errors import BrokerUnavailableError, ClosedError
from rolloutmq.schemas.wire.replies import Reply
from rolloutmq.schemas.wire.requests import Request

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 3.0
"""Silence of the broker, beyond the wait of the request, after which the connection looks for it again."""
REPEAT_S: Final = 0.5
"""Pause before an unanswered request is sent again."""


class TaskConnection:
    """Connection to the current broker for repeatable requests."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._search = Search(where)
        self._context = make_context()
        self._reached: tuple[BrokerClient, int] | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def ask(self, message: Request, wait_s: float = 0.0) -> Reply:
        """Send a request until there is an answer, without a time limit.

        Args:
            message: The request.
            wait_s: Longest wait of the broker before its answer, in seconds.

        Raises:
            RefusedError, SessionFencedError: The broker refused the request.
            ClosedError: The connection is closed.
        """
        while True:
            client, epoch = await self.connect()
            patience_s = wait_s + PATIENCE_S
            try:
                return (await insist(client, message, epoch, patience_s, max(REPEAT_S, patience_s / 2)))[0]
            except BrokerUnavailableError as error:
                logger.warning("broker lost, reconnecting error=%s", error)
                await self._drop(client)
            except (
                ClosedError
            ):  # another task has dropped the client, or `connect` raises because all is closed
                continue

    @property
    def problem(self) -> str:
        """What is missing for a connection, and where it was looked for."""
        return self._search.problem

    async def connect(self) -> tuple[BrokerClient, int]:
        """Return a client of the broker and the broker's epoch; waits for a broker without a limit."""
        async with self._turn:
            if self._closed:
                raise ClosedError
            if self._reached is None:
                client, info = await reach(self._where, self._context, self._search)
                self._reached = client, info.epoch
            return self._reached

    async def _drop(self, client: BrokerClient) -> None:
        if self._reached is not None and self._reached[0] is client:
            self._reached = None
            await client.close()

    async def close(self) -> None:
        """Close the socket; requests in progress raise ClosedError. May be called twice."""
        if self._closed:
            return
        self._closed = True
        reached, self._reached = self._reached, None
        if reached is not None:
            await reached[0].close()
        self._context.term()
