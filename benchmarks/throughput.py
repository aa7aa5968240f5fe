"""Groups a second from two producers to one consumer, end to end: through the broker, and through `zmq.proxy`.

Both sides begin with data that is made: ours with `Group` objects, of which each goes under an id of its own; the
rival (see `proxy`) with the bytes that those have on the wire. Ours is the public SDK in async loops: `send` with all
it does, `pull` with decoding, `ack` of each batch, which asks for the next one (`ahead=True`). Nothing is kept once
it is trained, since the rival keeps nothing.

Producers, broker or proxy, and consumer are processes of their own, and producers never end: the clock runs in the
consumer, after a second that is not counted, for three seconds. At `disk` an ack says that a group survives a power
cut; there the rival is the proxy or bare writes and syncs of as many bytes (see `rawdisk`), whichever is slower.

    python -m benchmarks.throughput ROLE DIRECTORY SHAPE ...    one process of a round
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

from benchmarks import proxy, rawdisk, scratch, stage, workload
from benchmarks.row import Row, compare
from benchmarks.workload import Shape
from rolloutmq import Consumer, Group, Producer
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.delivery import Durability
from rolloutmq.schemas.layout import RunLayout

PRODUCERS: Final = 2
SLOTS: Final = 256
BATCH_BYTES: Final = 16 << 20
"""A batch has at most so many bytes, and at most `BATCH_GROUPS`."""
BATCH_GROUPS: Final = 64
WARM_UP_PART: Final = 1 / 3
"""Of the time that is counted, so much goes before and is not."""
LASTS_S: Final = 3.0
OPEN_S: Final = 180.0
"""So long may a thousand producers take to register."""
RAW_BYTES: Final = 512 << 20

SMALL: Final = Shape.of_bytes(5_300)
MIDDLE: Final = Shape.of_bytes(134_000)
USUAL: Final = Shape(8, 2048)
LARGE: Final = Shape(16, 8192)


def rows() -> Iterator[Row]:
    """At `memory` what a short task makes, and long sequences; at `disk` those with a goal."""
    for shape, goal in ((SMALL, None), (MIDDLE, 0.7), (USUAL, None), (LARGE, 0.9)):
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
) -> float:
    """Run a broker, a consumer, and so many producers in `PRODUCERS` processes; return groups a second.

    Every producer has brought a group before the others begin. What goes before the clock is `WARM_UP_PART` of what is
    counted, or `warm_up_s` if that is more.
    """
    warm_up_s = max(warm_up_s, lasts_s * WARM_UP_PART)
    calls = [
        (f"producer-{number}", directory, shape.word, producers // PRODUCERS, slots)
        for number in range(PRODUCERS)
    ]
    with (
        stage.broker(RunLayout(directory), about),
        stage.player("throughput", "consumer", directory, shape.word, lasts_s, warm_up_s) as consumer,
        stage.players("throughput", calls) as others,
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


async def _consume(directory: Path, shape: Shape, lasts_s: float, warm_up_s: float) -> None:
    async with Consumer.open(
        directory, sequences=batch_groups(shape) * shape.sequences, ahead=True
    ) as consumer:
        await asyncio.to_thread(stage.ready)
        await _pulled(consumer, 0.0)
        await _pulled(consumer, warm_up_s)
        print(await _pulled(consumer, lasts_s), flush=True)


async def _pulled(consumer: Consumer, lasts_s: float) -> float:
    """Pull and ack for so long, at least one batch, and return groups a second."""
    count, started = 0, time.perf_counter()
    async for batch in consumer:
        count += len(batch.groups)
        await batch.ack()
        if (spent := time.perf_counter() - started) >= lasts_s:
            return count / spent
    raise AssertionError("a consumer does not end by itself")


def main(role: str, directory: str, shape: str, *words: str) -> None:
    """Be one process of a round."""
    about = Path(directory), Shape.parse(shape)
    if role == "consumer":
        uvloop.run(_consume(*about, *map(float, words)))
    else:
        uvloop.run(_produce(int(role.removeprefix("producer-")), *about, *map(int, words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
