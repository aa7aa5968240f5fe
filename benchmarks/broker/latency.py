"""Pull latency with 100,000 groups queued, against 100; in ms, median of a round's pulls.

The clock covers the pull and its decoding, not the ack. One process sends and pulls. After each batch it sends the same
number of groups, so that the queue keeps its length and no other work runs during a pull. Both brokers stay for all
rounds, and are filled before. At `memory` the queue is in RAM. At `disk` the long queue exceeds the broker's RAM and
the short one does not: there the difference is reading the journal, and has no goal.

    python -m benchmarks.broker.latency DIRECTORY SHAPE QUEUED    the process beside one broker
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from benchmarks.harness import scratch, stage, workload
from benchmarks.harness.row import Row, near
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Group, Producer
from rolloutmq.schemas.files import RunLayout

FEW: Final = 100
MANY: Final = 100_000
SPILLED: Final = 10_000
"""1.3 GB of the larger groups: five times the broker's RAM."""
BATCH_GROUPS: Final = 8
PULLS: Final = 50
"""Pulls of one round."""
SETTLES: Final = 5
"""Uncounted pulls at the start."""
FILL_S: Final = 300.0
GOAL: Final = 1.5


def rows() -> Iterator[Row]:
    """In RAM with a goal, on disk without."""
    yield row("memory", Shape.of_bytes(1_000), MANY, GOAL)
    yield row("disk", Shape.of_bytes(134_000), SPILLED, None)


def row(durability: str, shape: Shape, many: int, goal: float | None) -> Row:
    with _queue(durability, shape, many) as long, _queue(durability, shape, FEW) as short:
        return near(
            f"pull of {BATCH_GROUPS} groups, ms, {durability}",
            f"{many:,} {shape} queued",
            partial(_pull_ms, long),
            partial(_pull_ms, short),
            f"{FEW} such groups queued",
            goal,
        )


@contextlib.contextmanager
def _queue(durability: str, shape: Shape, queued: int) -> Iterator[stage.Player]:
    """Run a broker with this many groups queued."""
    about = stage.config(
        durability=durability, high_bytes=2 * queued * shape.nbytes + stage.GIB, high_groups=2 * MANY
    )
    with (
        scratch.directory() as directory,
        stage.broker(RunLayout(directory), about),
        stage.player("broker.latency", directory, shape.word, queued) as beside,
    ):
        beside.wait_ready(FILL_S)
        yield beside


def _pull_ms(beside: stage.Player) -> float:
    beside.begin()
    return beside.figure()


async def _play(directory: Path, shape: Shape, queued: int) -> None:
    groups = workload.fresh(workload.pool(shape), "bench")
    sequences = BATCH_GROUPS * shape.sequences
    async with (
        Producer.open(
            directory, env=stage.ENV, group_size=shape.sequences, slots=256, drain_s=0.0
        ) as producer,
        Consumer.open(directory, sequences=sequences) as consumer,
    ):
        await _send(producer, islice(groups, queued))
        await _pulls_ms(producer, consumer, groups, SETTLES)
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(median(await _pulls_ms(producer, consumer, groups, PULLS)), flush=True)


async def _pulls_ms(
    producer: Producer, consumer: Consumer, groups: Iterator[Group], pulls: int
) -> list[float]:
    took = []
    for _ in range(pulls):
        started = time.perf_counter()
        batch = await anext(consumer)
        took.append((time.perf_counter() - started) * 1e3)
        assert len(batch.groups) == BATCH_GROUPS
        await batch.ack()
        await _send(producer, islice(groups, BATCH_GROUPS))
    return took


async def _send(producer: Producer, groups: Iterator[Group]) -> None:
    for group in groups:
        await producer.send(group)
    await producer.flush()


def main(directory: str, shape: str, queued: str) -> None:
    """Run the process beside one broker."""
    uvloop.run(_play(Path(directory), Shape.parse(shape), int(queued)))


if __name__ == "__main__":
    main(*sys.argv[1:])
