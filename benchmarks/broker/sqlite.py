"""SQLite in WAL mode as a journal: the rival, with its best settings.

One connection, one prepared statement, one transaction for each group commit of 8 MiB, a table keyed by rowid. `TUNED`
is the best combination found among pages of 4 to 64 KiB, checkpoints every 4 MiB to never, also in a thread of their
own, transactions of 4 to 32 MiB, small and large caches, exclusive locking. Without checkpoints it is faster until the
disk is full. Its time includes all checkpoints but the last.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final, Literal, NamedTuple

MIB: Final = 1 << 20
COMMIT_BYTES: Final = 8 * MIB
"""Bytes of one transaction. One transaction every 10 ms would be smaller and slower."""

Synchronous = Literal["FULL", "NORMAL"]


class Settings(NamedTuple):
    """Settings that do not change the meaning of a commit."""

    page_bytes: int
    checkpoint_bytes: int
    cache_bytes: int


TUNED: Final = Settings(64 << 10, 64 * MIB, 64 * MIB)
STOCK: Final = Settings(4 << 10, 4 * MIB, 2 * MIB)
"""SQLite's defaults."""


def seconds(
    directory: Path, records: Sequence[memoryview], synchronous: Synchronous, settings: Settings = TUNED
) -> float:
    """Insert the records, and return the seconds until the last transaction is committed."""
    with closing(_opened(directory / "journal.sqlite", synchronous, settings)) as database:
        started = time.perf_counter()
        for batch in _batches(records):
            database.execute("BEGIN")
            database.executemany("INSERT INTO journal (meta, body) VALUES (?, ?)", batch)
            database.execute("COMMIT")
        return time.perf_counter() - started


def _opened(path: Path, synchronous: Synchronous, settings: Settings) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute(f"PRAGMA page_size={settings.page_bytes}")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute(f"PRAGMA synchronous={synchronous}")
    database.execute(f"PRAGMA wal_autocheckpoint={settings.checkpoint_bytes // settings.page_bytes}")
    database.execute(f"PRAGMA cache_size=-{settings.cache_bytes >> 10}")
    database.execute("CREATE TABLE journal (number INTEGER PRIMARY KEY, meta BLOB, body BLOB)")
    return database


def _batches(records: Sequence[memoryview]) -> Iterator[list[tuple[bytes, memoryview]]]:
    meta = bytes(200)
    several = max(1, COMMIT_BYTES // records[0].nbytes)
    rows = ((meta, record) for record in records)
    while batch := list(islice(rows, several)):
        yield batch
