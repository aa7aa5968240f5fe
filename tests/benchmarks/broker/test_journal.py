import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.broker import journal, sqlite
from benchmarks.harness import rawdisk
from rolloutmq.schemas.wire.replies import Durability

RECORDS = journal.records_of(16 << 10, 1 << 20)


def test_records_have_the_size_and_the_sum() -> None:
    records = journal.records_of(3000, journal.POOL_BYTES * 2)
    assert {record.nbytes for record in records} == {3000}
    assert len(records) == journal.POOL_BYTES * 2 // 3000


@pytest.mark.parametrize("level", journal.LEVELS)
def test_the_journal_takes_all_records(level: Durability, tmp_path: Path) -> None:
    assert journal.seconds(level, tmp_path, RECORDS) > 0
    (segment,) = tmp_path.glob("groups-*.rmq")
    assert all(bytes(record) in segment.read_bytes() for record in RECORDS[:3])


@pytest.mark.parametrize("settings", [sqlite.TUNED, sqlite.STOCK])
def test_the_rival_takes_all_records_and_commits_them(settings: sqlite.Settings, tmp_path: Path) -> None:
    assert sqlite.seconds(tmp_path, RECORDS, "FULL", settings) > 0
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
        (pages,) = database.execute("PRAGMA page_size").fetchone()
        bodies = [body for (body,) in database.execute("SELECT body FROM journal ORDER BY number")]
    assert pages == settings.page_bytes
    assert bodies == [bytes(record) for record in RECORDS]


def test_the_disk_itself_takes_all_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawdisk, "FILE_BYTES", 1 << 19)
    assert rawdisk.seconds(tmp_path, RECORDS) > 0
    files = sorted(tmp_path.glob("raw-*"))
    assert b"".join(file.read_bytes() for file in files) == b"".join(RECORDS)
