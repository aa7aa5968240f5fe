"""The event feed: a subscription that follows the broker of a run, for the recorder and the views.

A restarted broker may have another address, and the file of a key another key; the feed checks both once a second and
reconnects. It may be opened before the broker starts. Events published while it reconnects are lost. A process without
free descriptors keeps its connection, and tries again a second later.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

import zmq

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import FILE_POLL_S
from rolloutmq.bus.transport.pubsub import Published, Subscriber
from rolloutmq.bus.transport.way.route import Route, is_short
from rolloutmq.schemas.files import RunLayout

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Time between two checks of the way to the broker."""


class EventFeed:
    """Subscription to topics of a run: `async with EventFeed(layout, topics) as feed`. For one task at a time."""

    def __init__(self, layout: RunLayout, topics: Iterable[bytes]) -> None:
        self._route = Route(layout, lambda endpoints: endpoints.events)
        self._topics = tuple(topics)
        self._subscriber: Subscriber | None = None
        self._look_at = 0.0
        self._throttle = LogThrottle()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._close()

    async def next(self, timeout_s: float) -> Published | None:
        """Wait for the next event; None after `timeout_s`. A cancelled wait loses no event."""
        deadline = time.monotonic() + timeout_s
        while (subscriber := await self._listening()) is None:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(FILE_POLL_S)
        if (event := subscriber.try_next()) is not None:
            return event
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                return await anext(subscriber)
        except TimeoutError:
            return None

    def try_next(self) -> Published | None:
        """Return the next event that has arrived, or None; never waits."""
        return self._subscriber.try_next() if self._subscriber is not None else None

    async def _listening(self) -> Subscriber | None:
        now = time.monotonic()
        if self._subscriber is not None and now - self._look_at < LOOK_S:
            return self._subscriber
        self._look_at = now
        try:
            await self._follow()
        except (OSError, zmq.ZMQError) as error:
            if not is_short(error):
                raise
            if self._throttle.is_due(str(error), now):
                logger.warning("broker not looked for error=%s", error)
        return self._subscriber

    async def _follow(self) -> None:
        if (way := self._route.other()) is not None:
            fresh = await Subscriber(way.address, self._topics, keys=way.keys).__aenter__()
            self._close()
            self._route.taken, self._subscriber = way, fresh

    def _close(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
