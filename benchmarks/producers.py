"""Groups a second with 1,000 producers connected, against 10, through one broker to one consumer; durability memory.

The load is the same: in both cases two processes send as fast as they may, with the same number of slots in all, and
every producer has its share of them and sends all the time. The processes and the clock are those of `throughput`, with
a longer time that is not counted: until the queue is full producers bring more than is taken, and the more of them
there are the longer that lasts.

A producer sends what its window lets it, and the windows of all are a part of the mark. So the mark decides how many
groups a message and an ack are for: with a thousand producers the default one leaves four of these to each. Both are
measured, each against ten producers under the same mark.
"""

import resource
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import stage, throughput
from benchmarks.row import Row, compare
from benchmarks.workload import Shape
from rolloutmq.schemas.config import BrokerConfig

SHAPE: Final = Shape.of_bytes(16_000)
SLOTS: Final = 1000
"""Over all producers."""
MANY: Final = 1000
FEW: Final = 10
GOAL: Final = 0.8
DEFAULT_BYTES: Final = BrokerConfig().high_bytes
WIDE_BYTES: Final = 1 << 30
"""A mark of a mebibyte for each."""
FILLED_PER_S: Final = 32 << 20
"""So fast the queue fills at least: the difference between what is brought and what is taken."""
DESCRIPTORS: Final = 65_536
"""Each producer has sockets of its own."""


def rows() -> Iterator[Row]:
    """A row for each mark."""
    raise_descriptors()
    for high_bytes in (DEFAULT_BYTES, WIDE_BYTES):
        yield compare(
            f"groups/s end to end, {MANY:,} producers, memory",
            f"{SHAPE}, a mark of {high_bytes >> 20:,} MiB",
            partial(rate, MANY, high_bytes),
            partial(rate, FEW, high_bytes),
            f"{FEW} producers",
            GOAL,
        )


def rate(producers: int, high_bytes: int, lasts_s: float = throughput.LASTS_S) -> float:
    """Run one round, and return groups a second."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        return throughput.through(
            Path(directory),
            stage.config(durability="memory", high_bytes=high_bytes),
            SHAPE,
            producers=producers,
            slots=max(1, SLOTS // producers),
            lasts_s=lasts_s,
            warm_up_s=high_bytes / FILLED_PER_S,
        )


def raise_descriptors() -> None:
    """Let this process and its children have as many open files as it takes, if they may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
