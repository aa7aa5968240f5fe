"""The orchestrator's connection to the broker: three sockets.

`pressure` is state, repeated four times a second: the newest message counts, and its age is known. A drain is a
request, repeated until the broker replies; without a reply SIGUSR1 has the same effect. Decisions are published for the
record; their owner repeats the last one.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.engine_registry import FIRST
from rolloutmq.bus.rundir import read_json, wait_json
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.pubsub import Publisher, Subscriber
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.bus.transport.sockets import make_context
from rolloutmq.schemas.errors import RolloutMQError, WireError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.control import Drain, Pressure, ScaleDecision
from rolloutmq.schemas.wire.hardware import GpuStanding
from rolloutmq.schemas.wire.telemetry import EngineDecision, GpuAbsence, GpuSample

logger = logging.getLogger(__name__)

QUIET_S: Final = 3.0
"""Silence after which the addresses are read again: a restarted broker may have bound others."""
HEARD: Final = (topics.PRESSURE, topics.telemetry("gpu", ""))
"""Subscribed topics."""
DRAIN_S: Final = 5.0
"""Time limit of a drain request."""


class BusClient:
    """The orchestrator's broker client. Belongs to one event loop; `listen` runs it.

    Args:
        layout: Location of the broker's addresses.
        on_gpu: Called in the loop with each GPU sample; must not block or raise.

    Attributes:
        pressure: The newest message, or None.
        heard_at: Time of its arrival, monotonic.
    """

    def __init__(self, layout: RunLayout, on_gpu: Callable[[GpuSample | GpuAbsence], None]) -> None:
        self.pressure: Pressure | None = None
        self.heard_at = float("-inf")
        self._layout = layout
        self._on_gpu = on_gpu
        self._publisher: Publisher | None = None
        self._drains: asyncio.Queue[Drain] = asyncio.Queue()

    async def listen(self) -> None:
        """Receive events and send drains until cancelled, across restarts of the broker."""
        while True:
            endpoints = await wait_json(self._layout.endpoints, Endpoints)
            try:
                await self._attend(endpoints)
            finally:
                self._publisher = None

    def drain(self, worker: str, reason: str) -> None:
        """Ask the broker to drain a worker. Returns at once, without the reply."""
        self._drains.put_nowait(Drain(worker=worker, reason=reason[:200]))

    def publish(self, news: ScaleDecision | EngineDecision | GpuStanding) -> None:
        """Publish a decision or a GPU standing, if there is a broker."""
        match news:
            case ScaleDecision():
                what, name = "scale", news.env
            case EngineDecision():
                what, name = "scale", FIRST
            case GpuStanding():
                what, name = "fleet", news.uuid
        if self._publisher is not None:
            self._publisher.publish(topics.telemetry(what, name), news)

    async def _attend(self, endpoints: Endpoints) -> None:
        """Use the sockets of one broker until its addresses change."""
        with ExitStack() as stack:
            context = make_context()
            stack.callback(context.term)
            keys = keys_of(endpoints)
            self._publisher = stack.enter_context(Publisher(endpoints.publish, context, keys))
            async with (
                BrokerClient(endpoints.serve, context, keys) as client,
                Subscriber(endpoints.events, HEARD, context, keys) as events,
                asyncio.TaskGroup() as tasks,
            ):
                drains = tasks.create_task(self._carry_drains(client), name="drains")
                await self._hear(events, endpoints)
                drains.cancel()

    async def _hear(self, events: Subscriber, endpoints: Endpoints) -> None:
        """Receive pressures until the broker's addresses change."""
        while True:
            try:
                async with asyncio.timeout(QUIET_S):
                    _, payload = await anext(events)
            except TimeoutError:
                now = read_json(self._layout.endpoints, Endpoints)
                if now is not None and _addresses(now) != _addresses(endpoints):
                    logger.info("broker moved events=%s", now.events)
                    return
                continue
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        try:
            event = codec.decode_event(payload)
        except WireError as error:
            logger.warning("event not decoded error=%s", error)
            return
        if isinstance(event, GpuSample | GpuAbsence):
            self._on_gpu(event)
        if not isinstance(event, Pressure):
            return
        old = self.pressure
        if old is None or event.epoch != old.epoch or event.number > old.number:
            self.pressure = event
            self.heard_at = time.monotonic()

    async def _carry_drains(self, client: BrokerClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                drain = await self._drains.get()
                tasks.create_task(self._ask(client, drain), name=f"drain of {drain.worker}")

    @staticmethod
    async def _ask(client: BrokerClient, drain: Drain) -> None:
        try:
            await client.request(drain, timeout_s=DRAIN_S)
        except RolloutMQError as error:
            logger.warning("drain failed worker=%s error=%s", drain.worker, error)


def _addresses(endpoints: Endpoints) -> tuple[str, str, str]:
    return endpoints.events, endpoints.serve, endpoints.publish
