"""The worker's line to the broker, beside its producer: heartbeats go out, the order to drain comes in.

A beat says the worker's state once a second and at each change; the reply says whether it should be draining, and so
does `control.<worker>/`, which is quicker. Both are state that is repeated, so that losing one loses nothing. A broker
that is away is waited for, and looked up again: it may come back under other addresses.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from rolloutmq.bus import codec, topics
from rolloutmq.bus.client import BrokerClient
from rolloutmq.bus.events import Subscriber
from rolloutmq.bus.rundir import read_json, wait_json
from rolloutmq.schemas.control import WorkerBeat, WorkerBeatReply
from rolloutmq.schemas.errors import RolloutMQError, WireError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import Endpoints

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
"""Pause between two beats; brokers take a worker for dead after `silence_s`, ten times as long."""
ANSWER_S: Final = 3.0
"""A beat without an answer for that long is given up: the next one says more."""
LAST_S: Final = 1.0
"""The last beat may take that long; a broker that is gone must not keep a worker alive."""


class Line:
    """Keeps the broker informed for as long as `run` runs."""

    def __init__(
        self,
        layout: RunLayout,
        worker: str,
        beat: Callable[[], WorkerBeat],
        on_drain: Callable[[str], None],
    ) -> None:
        self._layout = layout
        self._worker = worker
        self._beat = beat
        self._on_drain = on_drain
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Have the next beat sent at once."""
        self._changed.set()

    async def run(self) -> None:
        """Beat and listen until cancelled."""
        while True:
            endpoints = await wait_json(self._layout.endpoints, Endpoints)
            topic = topics.control(self._worker)
            async with (
                BrokerClient(endpoints.serve) as client,
                Subscriber(endpoints.events, [topic]) as subscriber,
                asyncio.TaskGroup() as tasks,
            ):
                listener = tasks.create_task(self._listen(subscriber), name=f"{self._worker} control")
                await self._beat_until_moved(client, endpoints)
                listener.cancel()

    async def last(self) -> None:
        """Send one beat more, without insisting; for the end, when `run` is over."""
        endpoints = read_json(self._layout.endpoints, Endpoints)
        if endpoints is None:
            return
        async with BrokerClient(endpoints.serve) as client:
            try:
                await client.request(self._beat(), timeout_s=LAST_S)
            except RolloutMQError as error:
                logger.info("last beat unanswered error=%s", error)

    async def _beat_until_moved(self, client: BrokerClient, endpoints: Endpoints) -> None:
        while True:
            self._changed.clear()
            try:
                reply = await client.request(self._beat(), timeout_s=ANSWER_S)
            except RolloutMQError as error:
                logger.warning("beat unanswered error=%s", error)
                if read_json(self._layout.endpoints, Endpoints) != endpoints:
                    return
            else:
                if isinstance(reply, WorkerBeatReply) and reply.draining:
                    self._on_drain("the broker")
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(BEAT_S):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _listen(self, subscriber: Subscriber) -> None:
        async for _, payload in subscriber:
            try:
                drain = codec.decode_drain(payload)
            except WireError as error:
                logger.warning("control not understood error=%s", error)
                continue
            if drain.worker == self._worker:
                self._on_drain(drain.reason)
