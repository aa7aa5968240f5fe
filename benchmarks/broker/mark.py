"""Groups per second with a batch of 0.9 of the high-water mark, against a batch of 0.1 of it; durability memory.

Leased groups count against the mark. So producers and trainer take turns with the large batch: while it is trained on,
producers have a tenth of the mark. With the small batch all work at once. Processes and clock are those of
`throughput`. Both marks are measured: a narrow one with groups of 1.18 MB, and the default with groups of 2.36 MB.
"""

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

NARROW_BYTES: Final = 64 << 20
DEFAULT_BYTES: Final = BrokerConfig().high_bytes
LARGE_PART: Final = 0.9
SMALL_PART: Final = 0.1
GOAL: Final = 0.7


def rows() -> Iterator[Row]:
    """A row for each mark."""
    for high_bytes, shape in ((NARROW_BYTES, throughput.LARGE), (DEFAULT_BYTES, Shape(8, 32_768))):
        yield compare(
            f"groups/s end to end, a batch of {LARGE_PART:g} of the mark, memory",
            f"{shape}, a mark of {high_bytes >> 20:,} MiB",
            partial(rate, shape, high_bytes, LARGE_PART),
            partial(rate, shape, high_bytes, SMALL_PART),
            f"a batch of {SMALL_PART:g} of it",
            GOAL,
        )


def rate(shape: Shape, high_bytes: int, part: float, lasts_s: float = throughput.LASTS_S) -> float:
    """Run one round, and return groups a second."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        return throughput.through(
            Path(directory),
            stage.config(durability="memory", high_bytes=high_bytes),
            shape,
            lasts_s=lasts_s,
            batch=max(1, int(high_bytes * part / shape.nbytes)),
        )
