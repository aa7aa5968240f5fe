"""Groups a second with 1,000 producers connected, against 10, through one broker to one consumer; durability memory.

The load is the same: in both cases two processes send as fast as they may, with the same number of slots in all, and
every producer has its share of them and sends all the time. The processes and the clock are those of `throughput`, with
a longer time that is not counted: until the queue is full producers bring more than is taken, and the more of them
there are the longer that lasts.
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

SHAPE: Final = Shape.of_bytes(16_000)
SLOTS: Final = 1000
"""Over all producers."""
MANY: Final = 1000
FEW: Final = 10
GOAL: Final = 0.8
WARM_UP_S: Final = 8.0
"""So long it takes to fill the queue; with ten producers a quarter of it."""
DESCRIPTORS: Final = 65_536
"""Each producer has sockets of its own."""


def rows() -> Iterator[Row]:
    """One row."""
    raise_descriptors()
    yield compare(
        f"groups/s end to end, {MANY:,} producers, memory",
        str(SHAPE),
        partial(rate, MANY),
        partial(rate, FEW),
        f"{FEW} producers",
        GOAL,
    )


def rate(producers: int, lasts_s: float = throughput.LASTS_S) -> float:
    """Run one round, and return groups a second."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        return throughput.through(
            Path(directory),
            stage.config(durability="memory"),
            SHAPE,
            producers=producers,
            slots=max(1, SLOTS // producers),
            lasts_s=lasts_s,
            warm_up_s=WARM_UP_S,
        )


def raise_descriptors() -> None:
    """Let this process and its children have as many open files as it takes, if they may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
