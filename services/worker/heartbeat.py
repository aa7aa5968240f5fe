"""Heartbeats of a worker, and the drain order from the broker.

The worker sends its state once a second and at each change. The reply carries the drain flag; the topic
`control.<worker>/` carries it too, with less delay. Both are repeated state, so a lost message loses nothing. While the
broker is away the worker waits. It reads the broker's address and its own key again: a restart may change the one, and
a person replaces the other after a revocation.

The round trips tell the offset of the broker's clock, which the next heartbeat reports for the latencies between hosts.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.rundir import read_json, wait_json
from rolloutmq.bus.transport.keys.bundle import CurveKeys, keys_of
from rolloutmq.bus.transport.pubsub import Subscriber
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.errors import RolloutMQError, WireError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.control import Drain, WorkerBeat, WorkerBeatReply
from rolloutmq.services.process.clock_offset import ClockOffset
from rolloutmq.services.process.identity import start_of

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
"""Seconds between two heartbeats; the broker declares a worker dead after `silence_s`, ten times as long."""
ANSWER_S: Final = 3.0
"""Timeout of one heartbeat, in seconds; the next one carries newer state anyway."""
LAST_S: Final = 1.0
"""Timeout of the final heartbeat, in seconds, so that a dead broker does not keep the worker alive."""


class Heartbeat:
    """Reports the state of a worker while `run` runs.

    Attributes:
        answered: The broker has answered the last heartbeat.
    """

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
        self._clock = ClockOffset()
        self._changed = asyncio.Event()
        self.answered = False

    def changed(self) -> None:
        """Send the next heartbeat at once."""
        self._changed.set()

    async def run(self) -> None:
        """Send heartbeats and listen for orders until cancelled."""
        while True:
            endpoints = await wait_json(self._layout.endpoints, Endpoints)
            keys = await _readable_keys(endpoints)
            topic = topics.control(self._worker)
            async with (
                BrokerClient(endpoints.serve, keys=keys) as client,
                Subscriber(endpoints.events, [topic], keys=keys) as subscriber,
                asyncio.TaskGroup() as tasks,
            ):
                listener = tasks.create_task(self._listen(subscriber), name=f"{self._worker} control")
                await self._beat_until_changed(client, endpoints)
                listener.cancel()

    async def last(self) -> None:
        """Send a final heartbeat, once, after `run` has ended."""
        endpoints = read_json(self._layout.endpoints, Endpoints)
        if endpoints is None:
            return
        async with BrokerClient(endpoints.serve, keys=keys_of(endpoints)) as client:
            try:
                await client.request(self._beat(), timeout_s=LAST_S)
            except RolloutMQError as error:
                logger.info("final heartbeat unanswered error=%s", error)

    async def _beat_until_changed(self, client: BrokerClient, endpoints: Endpoints) -> None:
        """Send heartbeats until one is unanswered and the broker has moved, or the key was replaced."""
        while True:
            self._changed.clear()
            sent_at, begun = time.time(), time.monotonic()
            try:
                reply = await client.request(self._timed(), timeout_s=ANSWER_S)
            except RolloutMQError as error:
                self.answered = False
                logger.warning("heartbeat unanswered error=%s", error)
                if read_json(self._layout.endpoints, Endpoints) != endpoints or _has_other_keys(
                    client, endpoints
                ):
                    return
            else:
                self.answered = True
                if isinstance(reply, WorkerBeatReply):
                    self._clock.answered(sent_at, reply.at, time.monotonic() - begun)
                    if reply.draining:
                        self._on_drain("heartbeat")
            await self._pause()

    def _timed(self) -> WorkerBeat:
        """Return the state with the offset of the clocks."""
        beat, best = self._beat(), self._clock.best
        if best is None:
            return beat
        return replace(beat, clock_offset_s=best.offset_s, clock_error_s=best.error_s)

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
                logger.warning("control message invalid error=%s", error)
                continue
            if drain.worker == self._worker and is_for_this_process(drain):
                self._on_drain(drain.reason)


def is_for_this_process(drain: Drain) -> bool:
    """Return whether an order is for this process, as far as it says."""
    pid = os.getpid()
    return drain.pid in {0, pid} and drain.started in {0, start_of(pid)}


async def _readable_keys(endpoints: Endpoints) -> CurveKeys | None:
    """Return the keys of the sockets; wait while their file cannot be read, as between the old file and the new one."""
    while True:
        try:
            return keys_of(endpoints)
        except RolloutMQError as error:
            logger.warning("heartbeat waits for a key error=%s", error)
        await asyncio.sleep(BEAT_S)


def _has_other_keys(client: BrokerClient, endpoints: Endpoints) -> bool:
    """Return whether the file of the key has another key than the sockets."""
    try:
        return keys_of(endpoints) != client.keys
    except RolloutMQError:
        return False  # the old sockets are as good as none until the file can be read
