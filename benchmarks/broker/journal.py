"""Journal throughput in MB/s until all of it is durable, against SQLite on the same disk, in turns.

Our side drives the journal like the data plane: one `append` for each group, one `advance` for each burst and each
wake-up, and at most 64 MiB in flight to the disk. The clock stops when `done` covers the last ticket. At `os` that is a
write, at `disk` a sync; at `memory` there is no journal, and so no row. `sqlite` is the rival. Nothing is deleted
meanwhile, and both start without files: our time includes creating and preallocating segments.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.broker import feeder, sqlite
from benchmarks.broker.sqlite import STOCK, TUNED, Settings, Synchronous
from benchmarks.harness import rawdisk, scratch
from benchmarks.harness.row import Row, compare
from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.wire.envelope import ColumnTable, GroupHeader, PolicyVersion, RewardSummary
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.stored_group import BodyMemory

MIB: Final = 1 << 20
POOL_BYTES: Final = 64 * MIB
"""Distinct record contents: as cold in the processor's cache as data from a socket."""
TABLE: Final = ColumnTable(())
LEVELS: Final = (Durability.OS, Durability.DISK)


def rows() -> Iterator[Row]:
    """Groups of eight long sequences, with a goal, and short ones, without."""
    for record_bytes, total_bytes, goal in ((256 << 10, 1024 * MIB, 4.0), (16 << 10, 256 * MIB, None)):
        records = records_of(record_bytes, total_bytes)
        for level in LEVELS:
            yield _row(level, records, "FULL", TUNED, goal)
        yield _row(Durability.DISK, records, "FULL", STOCK, None)
        yield _row(Durability.OS, records, "NORMAL", TUNED, None)
        yield _limit(records)


def _row(
    level: Durability,
    records: Sequence[memoryview],
    synchronous: Synchronous,
    settings: Settings,
    goal: float | None,
) -> Row:
    return compare(
        f"journal, MB/s, {level.value}",
        _payload(records),
        partial(_rate, records, partial(seconds, level)),
        partial(_rate, records, partial(sqlite.seconds, synchronous=synchronous, settings=settings)),
        f"SQLite WAL {synchronous}, {settings.page_bytes >> 10} KiB pages, "
        f"checkpoints every {settings.checkpoint_bytes >> 20} MiB",
        goal,
    )


def _limit(records: Sequence[memoryview]) -> Row:
    """Return the share of the disk's throughput that the journal reaches, the limit of everything at `disk`."""
    return compare(
        f"journal, MB/s, {Durability.DISK.value}",
        _payload(records),
        partial(_rate, records, partial(seconds, Durability.DISK)),
        partial(_rate, records, rawdisk.seconds),
        "the disk itself: bare writes and syncs",
    )


def _payload(records: Sequence[memoryview]) -> str:
    total_bytes = sum(record.nbytes for record in records)
    return f"{total_bytes >> 20} MiB in records of {records[0].nbytes >> 10} KiB"


def records_of(record_bytes: int, total_bytes: int) -> list[memoryview]:
    """Return that many bytes in records of one size; their memory is shared beyond `POOL_BYTES`."""
    pool = memoryview(os.urandom(min(POOL_BYTES, total_bytes)))
    slots = pool.nbytes // record_bytes
    starts = (number % slots * record_bytes for number in range(total_bytes // record_bytes))
    return [pool[start : start + record_bytes] for start in starts]


def _rate(records: Sequence[memoryview], work: Callable[[Path, Sequence[memoryview]], float]) -> float:
    with scratch.directory() as directory:
        return sum(record.nbytes for record in records) / work(directory, records) / 1e6


def seconds(level: Durability, directory: Path, records: Sequence[memoryview]) -> float:
    """Append the records to a new journal, and return the seconds until they are durable."""
    config = BrokerConfig(durability=level)
    ram = BodyMemory(config.ram_bytes)
    groups = [
        feeder.stored(_header(number, record), TABLE, record, ram) for number, record in enumerate(records, 1)
    ]
    with feeder.running(directory, config, ram) as running:
        started = time.perf_counter()
        running.feed(groups)
        running.finish()
        return time.perf_counter() - started


def _header(number: int, frame: memoryview) -> GroupHeader:
    version = PolicyVersion(1, number // 64)
    return GroupHeader(
        seq=number,
        position=number * frame.nbytes,
        group_id=f"{feeder.PRODUCER}/{number}",
        table=TABLE.id,
        frames=1,
        nbytes=frame.nbytes,
        crc=checksum([frame]),
        sequences=8,
        tokens=frame.nbytes // 9,
        oldest=version,
        newest=version,
        started_at=0.0,
        finished_at=1.0,
        rewards=RewardSummary(),
    )
