"""Groups per second with 1,000 producers, against 10, through one broker to one consumer; durability memory.

The load is the same: in both cases two processes send at full speed with the same total number of slots, shared evenly
by the producers. Processes and clock are those of `throughput`, with a longer warm-up: until the queue is full,
producers send faster than the consumer pulls, and more producers make that phase longer.

A producer may send as much as its credit window allows, and the windows share the high-water mark. So the mark sets the
groups of a message and of an ack: with a thousand producers the default leaves four groups for each. Both marks are
measured, each against ten producers under the same mark.
"""

import resource
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.broker import throughput
from benchmarks.harness import stage
from benchmarks.harness.row import Row, compare
from benchmarks.harness.workload import Shape
from rolloutmq.schemas.config.broker import BrokerConfig

SHAPE: Final = Shape.of_bytes(16_000)
SLOTS: Final = 1000
"""Total over all producers."""
MANY: Final = 1000
FEW: Final = 10
GOAL: Final = 0.8
DEFAULT_BYTES: Final = BrokerConfig().high_bytes
WIDE_BYTES: Final = 1 << 30
"""High-water mark of one MiB for each producer."""
FILLED_PER_S: Final = 32 << 20
"""Minimum fill rate of the queue: sent minus pulled."""
DESCRIPTORS: Final = 65_536
"""Each producer has its own sockets."""


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
    """Raise the open-file limit of this process and its children, if permitted."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
