"""Samples per second into a queue and out of it, against TransferQueue 0.1.11 with its own storage, both in memory.

A sample has 2,048 tokens: ids i64, log-probabilities f32 and a mask, 26.6 kB. On both sides one process puts and gets.
Theirs calls `kv_put`, and `kv_batch_put` with `kv_batch_get`, with their defaults (two storage units), in its own
environment (`make bench-rivals`); `kv_put` returns when the sample is stored. Ours sends one sample a group, one call
after another, and the clock stops when all are acked; for batches it sends groups of eight, pulls them as one batch,
decodes and acks. Their time excludes clearing the samples; ours includes the acks.

Their actors keep running while ours is measured, but are idle.

    python -m benchmarks.queues.transferqueue PART DIRECTORY    our process of a round
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.harness import stage, workload
from benchmarks.harness.row import Row, compare
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Group, Producer
from rolloutmq.schemas.files import RunLayout

RIVAL: Final = Path(__file__).parents[2] / ".venv-transferqueue"
TOKENS: Final = 2048
BATCH: Final = 512
GROUP: Final = 8
LASTS_S: Final = 2.0
HIGH_BYTES: Final = 4 << 30
SPOOL_BYTES: Final = 256 << 20
STARTS_S: Final = 240.0
"""Start-up limit: each of their actors imports much of torch."""


def missing() -> str:
    """Return why the rival cannot be measured; empty if it can."""
    return stage.missing(RIVAL)


def rows() -> Iterator[Row]:
    """Single puts, and batches put and got."""
    with their_side() as rival:
        for part, figure, payload, goal in (
            ("single", "samples/s, single puts, memory", "samples of 26.6 kB", 20.0),
            ("batch", "samples/s, put and got, memory", f"batches of {BATCH} samples of 26.6 kB", 2.0),
        ):
            yield compare(
                figure,
                payload,
                partial(our_rate, part),
                partial(their_rate, rival, part),
                "TransferQueue, SimpleStorage",
                goal,
            )


@contextmanager
def their_side(batch: int = BATCH, lasts_s: float = LASTS_S) -> Iterator[stage.Player]:
    """Run their actors, and yield the process that talks to them once it is ready."""
    # The setting of `make` for our side would limit their threads, too.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    python = RIVAL / "bin" / "python"
    with stage.player("queues.transferqueue_client", batch, TOKENS, lasts_s, python=python, env=env) as rival:
        rival.wait_ready(STARTS_S)
        yield rival


def their_rate(rival: stage.Player, part: str) -> float:
    """Run one round of theirs, and return samples a second."""
    rival.begin(part)
    return rival.figure()


def our_rate(part: str, lasts_s: float = LASTS_S) -> float:
    """Run one round through a new broker, and return samples a second."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        about = stage.config(durability="memory", high_bytes=HIGH_BYTES)
        with (
            stage.broker(RunLayout(Path(directory)), about),
            stage.player("queues.transferqueue", part, directory, lasts_s) as ours,
        ):
            ours.wait_ready()
            ours.begin()
            return ours.figure()


def samples(sequences: int, seed: int) -> dict[str, Any]:
    """Return the columns of a group of such samples: 13 bytes a token."""
    columns = workload.columns(Shape(sequences, TOKENS), seed)
    return columns | {"tokens": columns["tokens"].astype(np.int64)}


async def _single(producer: Producer, _consumer: Consumer, lasts_s: float) -> float:
    made = [Group.build("g", **samples(1, number)) for number in range(BATCH)]
    groups = workload.fresh(made, "bench")
    await asyncio.to_thread(stage.ready)
    started = time.perf_counter()
    for done in count(1):
        await producer.send(next(groups))
        if time.perf_counter() - started >= lasts_s:
            await producer.flush()
            return done / (time.perf_counter() - started)
    raise AssertionError("counting ends not by itself")


async def _batches(producer: Producer, consumer: Consumer, lasts_s: float) -> float:
    made = [Group.build("g", **samples(GROUP, number)) for number in range(BATCH // GROUP)]
    groups = workload.fresh(made, "bench")
    for _ in range(2):
        await _put_and_get(producer, consumer, groups)
    await asyncio.to_thread(stage.ready)
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < lasts_s:
        done += await _put_and_get(producer, consumer, groups)
    await producer.flush()
    return done / spent


async def _put_and_get(producer: Producer, consumer: Consumer, groups: Iterator[Group]) -> int:
    for group in islice(groups, BATCH // GROUP):
        await producer.send(group)
    batch = await anext(consumer)
    await batch.ack()
    return sum(group.sequences for group in batch.groups)


async def _play(part: str, directory: Path, lasts_s: float) -> None:
    parts = {"single": (_single, 1), "batch": (_batches, GROUP)}
    work, sequences = parts[part]
    async with (
        Producer.open(
            directory,
            env=stage.ENV,
            group_size=sequences,
            slots=BATCH,
            spool_bytes=SPOOL_BYTES,
            drain_s=0.0,
        ) as producer,
        Consumer.open(directory, sequences=BATCH) as consumer,
    ):
        print(await work(producer, consumer, lasts_s), flush=True)


def main(part: str, directory: str, lasts_s: str) -> None:
    """Run our process of a round."""
    uvloop.run(_play(part, Path(directory), float(lasts_s)))


if __name__ == "__main__":
    main(*sys.argv[1:])
