"""Who publishes or hears events goes on with the key that replaces a revoked one, without a restart."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.bus.transport.listening import over_tcp

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.pubsub import Publisher, RunPublisher, Subscriber
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.telemetry import GpuAbsence
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.process.latency_publisher import LatencyPublisher
from rolloutmq.services.process.latency_recorder import LatencyKey, LatencyRecorder
from rolloutmq.services.worker.openai.call_trace import RolloutTracer, traced_call

LIMIT_S = 60.0
EVENT = GpuAbsence(host="h", number=1, at=0.0, why="none")
Sends = Callable[[RunLayout], tuple[Callable[[], None], Callable[[], None]]]
"""Returns what sends an event, and what ends the sender."""


class KeyedHost:
    """Another host with a run's broker, and the key that it has."""

    def __init__(self, root: Path, served: Broker, keys: KeyDirectory, role: Role) -> None:
        self.layout = RunLayout(root / "far")
        self.layout.root.mkdir(mode=0o700)
        self._keys, self._role = keys, role
        self._key = root / "own.key"
        save_bundle(self._key, keys.new("first", role))
        way = replace(over_tcp(served.endpoints), key=str(self._key))
        write_json(self.layout.endpoints, way)

    def revoke(self) -> None:
        self._keys.revoke("first")
        self._key.unlink()

    def replace_key(self) -> None:
        fresh = self._key.with_suffix(".new")
        save_bundle(fresh, self._keys.new("second", self._role))
        fresh.rename(self._key)


@contextmanager
def keyed_host(root: Path, role: Role) -> Iterator[tuple[KeyedHost, Broker]]:
    keys = KeyDirectory.create(root / "keys")
    broker = {"listen": "tcp://127.0.0.1:0", "keys": "keys"}
    config = RunConfig.model_validate({"base_dir": str(root), "broker": broker})
    run = RunLayout(root / "run")
    run.root.mkdir()
    with running_broker(config, run) as served:
        yield KeyedHost(root, served, keys, role), served


def latencies(layout: RunLayout) -> tuple[Callable[[], None], Callable[[], None]]:
    recorder = LatencyRecorder("w-0", time.time())
    publisher = LatencyPublisher(recorder, layout)

    def send() -> None:
        recorder.add(LatencyKey(Hop.ROLLOUT, "e"), 0.25)
        publisher.publish()

    return send, publisher.close


def traces(layout: RunLayout) -> tuple[Callable[[], None], Callable[[], None]]:
    tracer = RolloutTracer(layout, "w-0", "e", 1.0)

    def send() -> None:
        with tracer.rollout("w-0/1-1"), traced_call("http://engine", "/v1/completions"):
            pass

    return send, tracer.close


def events(layout: RunLayout) -> tuple[Callable[[], None], Callable[[], None]]:
    publisher = RunPublisher(layout)
    return lambda: publisher.publish(topics.telemetry("health", "w-0"), EVENT), publisher.close


async def hears(subscriber: Subscriber, send: Callable[[], None]) -> None:
    """Send until an event arrives."""
    async with asyncio.timeout(LIMIT_S):
        while subscriber.try_next() is None:
            send()
            await asyncio.sleep(0.05)


async def hears_nothing_more(subscriber: Subscriber, send: Callable[[], None]) -> None:
    """Send until nothing arrives for some time."""
    async with asyncio.timeout(LIMIT_S):
        silent = 0
        while silent < 20:
            silent = 0 if subscriber.try_next() is not None else silent + 1
            send()
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("sends", "what"), [(latencies, "latency"), (traces, "trace"), (events, "health")])
async def test_a_publisher_goes_on_with_the_key_that_replaces_a_revoked_one(
    tmp_path: Path, sends: Sends, what: str
) -> None:
    with keyed_host(tmp_path, Role.WORKER) as (host, served):
        send, end = sends(host.layout)
        async with Subscriber(served.endpoints.events, [topics.telemetry(what, "w-0")]) as subscriber:
            try:
                await hears(subscriber, send)
                host.revoke()
                await hears_nothing_more(subscriber, send)  # nor does a missing file end it
                host.replace_key()
                await hears(subscriber, send)
            finally:
                end()


async def test_the_event_feed_goes_on_with_the_key_that_replaces_a_revoked_one(tmp_path: Path) -> None:
    with keyed_host(tmp_path, Role.MONITOR) as (host, served), Publisher(served.endpoints.publish) as near:
        topic = topics.telemetry("gpu", "h")
        async with EventFeed(host.layout, [topic]) as feed:

            async def heard() -> bool:
                near.publish(topic, EVENT)
                return await feed.next(0.05) is not None

            async with asyncio.timeout(LIMIT_S):
                while not await heard():
                    pass
                host.revoke()
                silent = 0
                while silent < 20:
                    silent = 0 if await heard() else silent + 1
                host.replace_key()
                while not await heard():
                    pass
