"""Brokers that carry the same groups in lockstep, to compare what a group costs under two settings to a percent.

Free-running producers and consumers need between 100 and 280 microseconds of CPU for the same small group, by how many
groups happen to share a message. So nothing runs freely here. Each lane is a broker process with two producers and a
consumer of the SDK in this process. In a cycle, the producers of one lane send a fixed number of groups, then its
consumer pulls and acks them, and the other lanes are idle. A block is one cycle of each lane and the same in reverse,
so a drift of the machine meets all lanes alike. Their order is drawn anew for each block, and so is that in which their
brokers start: a lane costs one percent more behind one neighbor than behind another.

Counted is CPU: that of this process in the cycles of the lane, and that of its broker. Other work on the machine takes
no part of it, though it slows all lanes by what it takes of the caches.

What a broker does once in an interval, it does that many times more often for each of its groups as there are lanes:
it is idle while the others work. So its `telemetry.interval_s` is that many times longer.
"""

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.harness import cpu, stage, workload
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Group, LeasedBatch, Producer
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout

PRODUCERS: Final = 2
SLOTS: Final = 256
CYCLE_GROUPS: Final = 256
BATCH_GROUPS: Final = 64
WARM_UP_BLOCKS: Final = 6


class Lane:
    """One broker with its peers.

    Args:
        consumer: The trainer.
        producers: Each with the groups that it sends.
        broker: Process id of the broker.
    """

    def __init__(
        self, consumer: Consumer, producers: Sequence[tuple[Producer, Iterator[Group]]], broker: int
    ) -> None:
        self._batches: AsyncIterator[LeasedBatch] = aiter(consumer)
        self._producers = producers
        self._broker = broker
        self._peers_s = 0.0
        self._groups = 0
        self._broker_at = cpu.spent_s(broker)

    async def cycle(self) -> None:
        """Send the groups of a cycle, and train them."""
        began = time.process_time()
        await asyncio.gather(*(_send(one, groups) for one, groups in self._producers))
        left = CYCLE_GROUPS
        while left > 0:
            batch = await anext(self._batches)
            left -= len(batch.groups)
            await batch.ack()
        self._groups += CYCLE_GROUPS
        self._peers_s += time.process_time() - began

    def group_us(self) -> float:
        """Return the CPU of a group since the last call, in microseconds."""
        broker_at = cpu.spent_s(self._broker)
        spent_s = self._peers_s + broker_at - self._broker_at
        groups, self._groups, self._peers_s, self._broker_at = self._groups, 0, 0.0, broker_at
        return spent_s * 1e6 / groups


async def _send(producer: Producer, groups: Iterator[Group]) -> None:
    for _ in range(CYCLE_GROUPS // PRODUCERS):
        await producer.send(next(groups))


def blocks(configs: Sequence[RunConfig], shape: Shape, count: int, seed: int = 0) -> list[tuple[float, ...]]:
    """Start a lane for each configuration, and return the CPU of a group in each lane, block by block.

    The seed draws the orders. Blocks for some tenths of a second a block.
    """
    rng = random.Random(seed)
    started: list[tuple[Path, int]] = [(Path(), 0)] * len(configs)
    with contextlib.ExitStack() as stack:
        for number in rng.sample(range(len(configs)), len(configs)):
            config = _as_if_alone(configs[number], len(configs))
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolloutmq-bench-")))
            broker = stack.enter_context(stage.broker(RunLayout(root), config))
            stage.bound(RunLayout(root), broker)
            started[number] = root, broker.pid
        found: list[tuple[float, ...]] = uvloop.run(_play(started, shape, count, rng))
        return found


def _as_if_alone(config: RunConfig, lanes: int) -> RunConfig:
    """Return the configuration with which a lane publishes as often, by its work, as a broker that is never idle."""
    about = config.telemetry
    longer = about.model_copy(update={"interval_s": lanes * about.interval_s})
    return config.model_copy(update={"telemetry": longer})


async def _play(
    started: Sequence[tuple[Path, int]], shape: Shape, count: int, rng: random.Random
) -> list[tuple[float, ...]]:
    made = workload.pool(shape)
    async with contextlib.AsyncExitStack() as stack:
        lanes = [await _lane(stack, root, pid, made, shape) for root, pid in started]
        for _ in range(WARM_UP_BLOCKS):
            await _block(lanes, rng)
        return [await _block(lanes, rng) for _ in range(count)]


async def _block(lanes: Sequence[Lane], rng: random.Random) -> tuple[float, ...]:
    order = rng.sample(lanes, len(lanes))
    for lane in (*order, *reversed(order)):
        await lane.cycle()
    return tuple(lane.group_us() for lane in lanes)


async def _lane(
    stack: contextlib.AsyncExitStack, root: Path, pid: int, made: list[Group], shape: Shape
) -> Lane:
    sequences = BATCH_GROUPS * shape.sequences
    consumer = await stack.enter_async_context(Consumer.open(root, sequences=sequences, ahead=True))
    producers = []
    for number in range(PRODUCERS):
        name = f"bench-{number}"
        opened = Producer.open(
            root, env=stage.ENV, producer=name, group_size=shape.sequences, slots=SLOTS, drain_s=0.0
        )
        producers.append((await stack.enter_async_context(opened), workload.fresh(made, name)))
    return Lane(consumer, producers, pid)
