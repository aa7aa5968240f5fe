"""End-to-end groups per second from two producers to one consumer: through the broker, and through `zmq.proxy`.

Both sides start with prepared data: ours with `Group` objects, each sent under its own id; the rival (see `proxy`) with
their wire bytes. Ours is the public SDK in async loops: `send` with all of its work, `pull` with decoding, `ack` of
each batch with a request for the next one (`ahead=True`). Trained groups are not kept, since the rival keeps nothing.

Producers, broker or proxy, and consumer are separate processes, and producers never end: the clock runs in the consumer
for three seconds, after a warm-up of one. At `disk` an ack means that a group survives a power cut; there the rival is
the slower of the proxy and bare synced writes of the same bytes (see `harness.rawdisk`).

    python -m benchmarks.broker.throughput ROLE DIRECTORY SHAPE ...    one process of a round
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.broker import proxy
from benchmarks.harness import rawdisk, scratch, stage, workload
from benchmarks.harness.row import Row, compare
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Group, Producer
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.replies import Durability

PRODUCERS: Final = 2
SLOTS: Final = 256
BATCH_BYTES: Final = 16 << 20
"""Maximum bytes of a batch, which has at most `BATCH_GROUPS`."""
BATCH_GROUPS: Final = 64
WARM_UP_PART: Final = 1 / 3
"""Warm-up, relative to the counted time."""
LASTS_S: Final = 3.0
OPEN_S: Final = 180.0
"""Time limit for the registration of a thousand producers."""
RAW_BYTES: Final = 512 << 20

SMALL: Final = Shape.of_bytes(5_300)
SINGLE: Final = Shape(1, 1861)
"""A trajectory by itself."""
MIDDLE: Final = Shape.of_bytes(134_000)
USUAL: Final = Shape(8, 2048)
LARGE: Final = Shape(16, 8192)


def rows() -> Iterator[Row]:
    """At `memory` groups of a short task, and of long sequences; at `disk` those with a goal."""
    for shape, goal in ((SMALL, None), (SINGLE, None), (MIDDLE, 0.7), (USUAL, None), (LARGE, 0.9)):
        yield compare(
            "groups/s end to end, memory",
            str(shape),
            partial(rate, shape, Durability.MEMORY),
            partial(proxy.rate, shape),
            "zmq.proxy",
            goal,
        )
    for shape, goal in ((MIDDLE, 0.5), (LARGE, 0.8)):
        yield compare(
            "groups/s end to end, disk",
            str(shape),
            partial(rate, shape, Durability.DISK),
            partial(_slower, partial(proxy.rate, shape), partial(raw_rate, shape)),
            "zmq.proxy, or the disk itself: bare writes and syncs; whichever is slower",
            goal,
        )


def rate(shape: Shape, durability: Durability, lasts_s: float = LASTS_S) -> float:
    """Run one round through a new broker, and return groups a second."""
    about = stage.config(durability=durability.value)
    if durability is Durability.MEMORY:
        with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
            return through(Path(directory), about, shape, lasts_s=lasts_s)
    with scratch.directory() as place:
        return through(place, about, shape, lasts_s=lasts_s)


def raw_rate(shape: Shape) -> float:
    """Write bare bodies to the disk, and return how many a second are synced."""
    bodies = [memoryview(body) for body in workload.bodies(shape)]
    several = list(islice(cycle(bodies), RAW_BYTES // shape.nbytes))
    with scratch.directory() as directory:
        return len(several) / rawdisk.seconds(directory, several)


def _slower(*rates: Callable[[], float]) -> float:
    return min(each() for each in rates)


def through(
    directory: Path,
    about: RunConfig,
    shape: Shape,
    *,
    producers: int = PRODUCERS,
    slots: int = SLOTS,
    lasts_s: float = LASTS_S,
    warm_up_s: float = 0.0,
    batch: int = 0,
) -> float:
    """Run a broker, a consumer, and this many producers in `PRODUCERS` processes; return groups per second.

    Every producer has sent a group before the others start. The warm-up is `WARM_UP_PART` of the counted time, or
    `warm_up_s` if that is longer. A batch has `batch` groups, or `batch_groups`.
    """
    warm_up_s = max(warm_up_s, lasts_s * WARM_UP_PART)
    clock = lasts_s, warm_up_s, batch or batch_groups(shape)
    with stage.broker(RunLayout(directory), about):
        return between(directory, shape, clock, producers, slots)


def between(
    directory: Path,
    shape: Shape,
    clock: tuple[float, float, int],
    producers: int = PRODUCERS,
    slots: int = SLOTS,
) -> float:
    """Run the clients of a broker, and return groups per second.

    Args:
        directory: Directory with the addresses of the broker.
        shape: Groups.
        clock: Counted time, warm-up, and groups of a batch.
        producers: Number of producers.
        slots: Groups under way of each.
    """
    calls = [
        (f"producer-{number}", directory, shape.word, producers // PRODUCERS, slots)
        for number in range(PRODUCERS)
    ]
    with (
        stage.player("broker.throughput", "consumer", directory, shape.word, *clock) as consumer,
        stage.players("broker.throughput", calls) as others,
    ):
        for one in (consumer, *others):
            one.wait_ready(OPEN_S)
        for one in (consumer, *others):
            one.begin()
        return float(consumer.line())


def batch_groups(shape: Shape) -> int:
    """Groups of one batch."""
    return max(1, min(BATCH_GROUPS, BATCH_BYTES // shape.nbytes))


async def _produce(number: int, directory: Path, shape: Shape, producers: int, slots: int) -> None:
    made = workload.pool(shape, number)
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        opened = []
        for count in range(producers):
            name = f"bench-{number}-{count}"
            one = await stack.enter_async_context(
                Producer.open(
                    directory,
                    env=stage.ENV,
                    producer=name,
                    group_size=shape.sequences,
                    slots=slots,
                    drain_s=0.0,
                )
            )
            groups = workload.fresh(made, name)
            await one.send(next(groups))
            opened.append((one, groups))
        for one, _ in opened:
            await one.flush()
        await asyncio.to_thread(stage.ready)
        for one, groups in opened:
            tasks.create_task(_send_for_ever(one, groups))


async def _send_for_ever(producer: Producer, groups: Iterator[Group]) -> None:
    for group in groups:
        await producer.send(group)


async def _consume(directory: Path, shape: Shape, lasts_s: float, warm_up_s: float, batch: float) -> None:
    async with Consumer.open(directory, sequences=int(batch) * shape.sequences, ahead=True) as consumer:
        await asyncio.to_thread(stage.ready)
        await _pulled(consumer, 0.0)
        await _pulled(consumer, warm_up_s)
        print(await _pulled(consumer, lasts_s), flush=True)


async def _pulled(consumer: Consumer, lasts_s: float) -> float:
    """Pull and ack for this long, at least one batch, and return groups per second."""
    count, started = 0, time.perf_counter()
    async for batch in consumer:
        count += len(batch.groups)
        await batch.ack()
        if (spent := time.perf_counter() - started) >= lasts_s:
            return count / spent
    raise AssertionError("a consumer does not end by itself")


def main(role: str, directory: str, shape: str, *words: str) -> None:
    """Run one process of a round."""
    about = Path(directory), Shape.parse(shape)
    if role == "consumer":
        uvloop.run(_consume(*about, *map(float, words)))
    else:
        uvloop.run(_produce(int(role.removeprefix("producer-")), *about, *map(int, words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
