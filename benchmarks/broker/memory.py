"""Memory of the broker with a full queue, in MB, against the queued payload; durability memory.

Counted is all memory the broker causes: its resident private and file pages, and the whole memory it shares with
producers, wherever the payload is in it and whether or not the broker has touched it. The limit is 110 % of the payload
plus 80 MB, for groups of 16 kB and more. With 100,000 groups of 1 kB, the default maximum of a queue, the metadata
exceeds the payload, and there is no goal. A round fills the queue of a new broker and waits until all is acked; the
producer is still connected when the memory is read.

    python -m benchmarks.broker.memory DIRECTORY SHAPE GROUPS    the producer of a round
"""

import asyncio
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.harness import stage, workload
from benchmarks.harness.row import Row, within
from benchmarks.harness.workload import Shape
from rolloutmq import Producer
from rolloutmq.schemas.files import RunLayout

MB: Final = 1e6
ABOVE: Final = 1.1
SPARE_MB: Final = 80.0
ROUNDS: Final = 3
FILL_S: Final = 300.0
MOST_GROUPS: Final = 100_000
BLOCK_BYTES: Final = 512
"""Unit of `st_blocks`."""
QUEUES: Final = (
    (Shape.of_bytes(1_000), MOST_GROUPS, False),
    (Shape.of_bytes(16_000), 16_000, True),
    (Shape.of_bytes(134_000), 4_000, True),
)
"""Size and number of groups, and whether their memory has a goal."""


def rows() -> Iterator[Row]:
    """Small, middle and large groups."""
    for shape, groups, promised in QUEUES:
        payload_mb = groups * shape.nbytes / MB
        yield within(
            "memory of the broker, MB, memory",
            f"{groups:,} {shape} queued",
            partial(broker_mb, shape, groups),
            partial(float, payload_mb),
            "the payload itself: a floor, no rival",
            round(ABOVE * payload_mb + SPARE_MB, 1) if promised else None,
            ROUNDS,
        )


def broker_mb(shape: Shape, groups: int) -> float:
    """Fill the queue of a new broker, and return its memory in MB."""
    about = stage.config(
        durability="memory", high_bytes=2 * groups * shape.nbytes + stage.GIB, high_groups=2 * MOST_GROUPS
    )
    with (
        tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory,
        stage.broker(RunLayout(Path(directory)), about) as broker,
        stage.player("broker.memory", directory, shape.word, groups) as producer,
    ):
        producer.wait_ready(FILL_S)
        return caused_bytes(broker.pid) / MB


def caused_bytes(pid: int) -> int:
    """Return the bytes of memory a process causes: private, file and shared pages, the last in whole."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    return own_bytes(status) + shared_bytes(Path("/proc") / str(pid) / "fd")


def own_bytes(status: str) -> int:
    """Return the resident bytes except shared memory, from the text of `/proc/PID/status`."""
    found = dict(re.findall(r"^(RssAnon|RssFile):\s+(\d+) kB$", status, re.MULTILINE))
    return sum(int(kilobytes) << 10 for kilobytes in found.values())


def shared_bytes(descriptors: Path) -> int:
    """Return the allocated bytes of each anonymous shared memory a process has open."""
    pieces = {}
    for entry in descriptors.iterdir():
        try:
            if str(entry.readlink()).startswith("/memfd:"):
                found = entry.stat()
                pieces[found.st_ino] = found.st_blocks * BLOCK_BYTES
        except FileNotFoundError:
            continue
    return sum(pieces.values())


async def _produce(directory: Path, shape: Shape, groups: int) -> None:
    made = workload.fresh(workload.pool(shape), "bench")
    async with Producer.open(
        directory, env=stage.ENV, group_size=shape.sequences, slots=256, drain_s=0.0
    ) as producer:
        for group in islice(made, groups):
            await producer.send(group)
        await producer.flush()
        await asyncio.to_thread(stage.ready)


def main(directory: str, shape: str, groups: str) -> None:
    """Run the producer of a round."""
    uvloop.run(_produce(Path(directory), Shape.parse(shape), int(groups)))


if __name__ == "__main__":
    main(*sys.argv[1:])
