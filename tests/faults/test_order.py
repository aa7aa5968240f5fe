"""Any start order of the processes: they find each other, and every group arrives once."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

import pytest
from tests.faults.support.borders import ENV, LIMIT_S, run_config, small_group

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.pubsub import Subscriber
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.services.broker.server import running_broker

GROUPS = 6
TURNS = 20
"""Turns of the event loop each gets before the next is started."""


class Cast:
    """The four of a run; `start` starts one of them."""

    def __init__(self, run_dir: Path, stack: ExitStack, tasks: asyncio.TaskGroup) -> None:
        self.layout = RunLayout(run_dir)
        self.layout.sockets.mkdir(mode=0o700)
        self.trained: list[str] = []
        self.seen = 0
        self._stack = stack
        self._tasks = tasks
        self._roles: dict[str, Callable[[], Awaitable[None]]] = {
            "producer": self._produce,
            "consumer": self._consume,
            "subscriber": self._subscribe,
        }

    async def start(self, role: str) -> None:
        """Start one of the cast, and let it come as far as it can alone."""
        if role == "broker":
            config = run_config(pressure_interval_s=0.02)
            self._stack.enter_context(running_broker(config, self.layout))
        else:
            self._tasks.create_task(self._played(self._roles[role]), name=role)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def _played(self, role: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.timeout(LIMIT_S):
            await role()

    async def _produce(self) -> None:
        async with Producer.open(self.layout.root, env=ENV, producer="p", group_size=2) as producer:
            for number in range(GROUPS):
                await producer.send(small_group(f"g-{number}"))
            assert await producer.flush(LIMIT_S)

    async def _consume(self) -> None:
        async with Consumer.open(self.layout.root, sequences=4) as consumer:
            while len(self.trained) < GROUPS:
                batch = await anext(consumer)
                await batch.ack()
                self.trained += [group.group_id for group in batch.groups]

    async def _subscribe(self) -> None:
        address = f"ipc://{self.layout.sockets.resolve() / 'events'}"
        async with Subscriber(address, [topics.PRESSURE]) as subscriber:
            async for _, payload in subscriber:
                event = codec.decode_event(payload)
                assert isinstance(event, Pressure)
                self.seen = event.ledger.trained
                if self.seen == GROUPS:
                    return


@pytest.mark.parametrize(
    "order", list(permutations(("broker", "producer", "consumer", "subscriber"))), ids="-".join
)
async def test_any_order_of_starts_ends_the_same(run_dir: Path, order: tuple[str, ...]) -> None:
    with ExitStack() as stack:
        async with asyncio.TaskGroup() as tasks:
            cast = Cast(run_dir, stack, tasks)
            for role in order:
                await cast.start(role)
        assert cast.trained == [f"g-{number}" for number in range(GROUPS)]
        assert cast.seen == GROUPS
