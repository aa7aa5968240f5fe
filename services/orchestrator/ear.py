"""What the orchestrator hears from the broker and says to it: one place for the three sockets.

Loss: `pressure` is state that is repeated four times a second, the newest counts, and its age is
known. A drain is a request that is repeated until it is answered; where it is not, SIGUSR1 says the
same. Decisions are published for the record; the last one is repeated by whoever makes it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from rolloutmq.bus import codec, topics
from rolloutmq.bus.client import BrokerClient
from rolloutmq.bus.engines import FIRST
from rolloutmq.bus.events import Publisher, Subscriber
from rolloutmq.bus.rundir import read_json, wait_json
from rolloutmq.bus.sockets import make_context
from rolloutmq.schemas.control import Drain, Pressure, ScaleDecision
from rolloutmq.schemas.errors import RolloutMQError, WireError
from rolloutmq.schemas.hardware import GpuStanding
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import Endpoints
from rolloutmq.schemas.telemetry import EngineDecision, GpuAbsence, GpuSample

logger = logging.getLogger(__name__)

QUIET_S: Final = 3.0
"""Silence after which the addresses are read again: another broker may have bound others."""
HEARD: Final = (topics.PRESSURE, topics.telemetry("gpu", ""))
"""Topics that the orchestrator follows."""
DRAIN_S: Final = 5.0
"""How long a drain is asked for over the bus."""


class Ear:
    """The broker as the orchestrator knows it. Belongs to one event loop; `listen` is its life.

    Args:
        layout: Says where the broker is.
        on_gpu: Told of each sample of a GPU, in the loop; must not block and not raise.

    Attributes:
        pressure: The newest, or None if there never was one.
        heard_at: When it came, monotonic.
    """

    def __init__(self, layout: RunLayout, on_gpu: Callable[[GpuSample | GpuAbsence], None]) -> None:
        self.pressure: Pressure | None = None
        self.heard_at = float("-inf")
        self._layout = layout
        self._on_gpu = on_gpu
        self._publisher: Publisher | None = None
        self._drains: asyncio.Queue[Drain] = asyncio.Queue()

    async def listen(self) -> None:
        """Hear and carry drains until cancelled, whenever the broker comes and wherever it moves."""
        while True:
            endpoints = await wait_json(self._layout.endpoints, Endpoints)
            try:
                await self._attend(endpoints)
            finally:
                self._publisher = None

    def drain(self, worker: str, reason: str) -> None:
        """Ask the broker to drain a worker. Returns at once; nobody waits for the answer."""
        self._drains.put_nowait(Drain(worker=worker, reason=reason[:200]))

    def publish(self, news: ScaleDecision | EngineDecision | GpuStanding) -> None:
        """Publish a decision, or how a GPU is treated, if there is a broker."""
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
        """Use the sockets of one broker until it has others."""
        with ExitStack() as stack:
            context = make_context()
            stack.callback(context.term)
            self._publisher = stack.enter_context(Publisher(endpoints.publish, context))
            async with (
                BrokerClient(endpoints.serve, context) as client,
                Subscriber(endpoints.events, HEARD, context) as events,
                asyncio.TaskGroup() as tasks,
            ):
                drains = tasks.create_task(self._carry_drains(client), name="drains")
                await self._hear(events, endpoints)
                drains.cancel()

    async def _hear(self, events: Subscriber, endpoints: Endpoints) -> None:
        """Take pressures until the broker has other addresses."""
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
            logger.warning("event not understood error=%s", error)
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
            logger.warning("drain not taken worker=%s error=%s", drain.worker, error)


def _addresses(endpoints: Endpoints) -> tuple[str, str, str]:
    return endpoints.events, endpoints.serve, endpoints.publish
