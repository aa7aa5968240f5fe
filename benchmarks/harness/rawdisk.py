"""Raw disk throughput: records written in sequence and synced, without header, checksum or log.

Preallocated files of the journal's segment size, 2 MiB a write with immediate write-back, one `fdatasync` for each
8 MiB. Nothing was faster among 1 to 8 MiB a write, buffered or `O_DIRECT`, with one to four threads.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rolloutmq.services.broker.journal.disk import Disk

MIB: Final = 1 << 20
FILE_BYTES: Final = 256 * MIB
WRITE_BYTES: Final = 2 * MIB
SYNC_BYTES: Final = 8 * MIB


def seconds(directory: Path, records: Sequence[memoryview]) -> float:
    """Write the records, all of one size, and return the seconds until the last one is synced."""
    disk = Disk()
    nbytes = records[0].nbytes
    several = max(1, WRITE_BYTES // nbytes)
    per_file = FILE_BYTES // nbytes
    started = time.perf_counter()
    for number, first in enumerate(range(0, len(records), per_file)):
        fd = disk.create(directory / f"raw-{number}")
        try:
            disk.allocate(fd, FILE_BYTES)
            _fill(disk, fd, records[first : first + per_file], several)
        finally:
            os.close(fd)
    return time.perf_counter() - started


def _fill(disk: Disk, fd: int, records: Sequence[memoryview], several: int) -> None:
    end = synced = 0
    for first in range(0, len(records), several):
        piece = records[first : first + several]
        begun, wanted = end, end + sum(record.nbytes for record in piece)
        while end < wanted:
            rest = memoryview(b"".join(piece))[end - begun :] if end > begun else None
            end += disk.pwritev(fd, piece if rest is None else [rest], end)
        disk.begin_writing_out(fd, begun, end - begun)
        if end - synced >= SYNC_BYTES or first + several >= len(records):
            disk.fdatasync(fd)
            disk.forget_cached(fd, synced, end - synced)
            synced = end
