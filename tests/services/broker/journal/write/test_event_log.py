"""Event logs begin with a whole snapshot or are not there, and consist of records that can be read alone."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.broker.journal.journals import Driven, config, snapshot

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.events import Dropped
from rolloutmq.services.broker.journal.format.events_codec import decode_events
from rolloutmq.services.broker.journal.read.event_log_reader import EventLogContents, read_log
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.write.event_log import CHUNK_BYTES, chunks, prune


def event(number: int, nbytes: int = 0) -> Dropped:
    return Dropped(number, "expired", "x" * nbytes)


def read(path: Path, *, last: bool = True) -> EventLogContents:
    file = RecordFile(Disk(), path)
    try:
        return read_log(int(path.stem[-8:]), file, last=last)
    finally:
        file.close()


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=20))
def test_chunks_are_lists_that_together_are_the_facts(sizes: list[int]) -> None:
    events = [event(number, nbytes * 1000) for number, nbytes in enumerate(sizes)]
    parts = list(chunks(events))
    assert [item for part in parts for item in decode_events(part)] == events
    assert all(len(part) < CHUNK_BYTES + 1100_000 for part in parts)
    assert len(parts) <= 1 + sum(sizes) * 1000 // (CHUNK_BYTES // 2)


def test_large_snapshot_is_many_records_and_whole(tmp_path: Path) -> None:
    items = [event(number, 100_000) for number in range(50)]
    run = Driven(tmp_path, config()).start([*snapshot(), *items])
    run.write(event(1000))
    run.journal.close()
    log = read(tmp_path / "events-00000001.rmq")
    assert log.whole
    assert log.snapshot == [*snapshot(), *items]
    assert log.events == [event(1000)]
    assert log.damage == []
    assert log.end == (tmp_path / "events-00000001.rmq").stat().st_size


def test_snapshot_that_lost_a_record_is_not_whole(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start([event(number, 500_000) for number in range(6)])
    run.write(event(1000))
    run.journal.close()
    path = tmp_path / "events-00000001.rmq"
    original = path.read_bytes()
    for offset in range(100, len(original), 400_000):
        data = bytearray(original)
        data[offset] ^= 1
        path.write_bytes(data)
        log = read(path)
        assert not log.whole
        assert len(log.damage) == 1
        assert log.events[-1:] == [event(1000)]


def test_a_log_is_whole_only_with_the_mark_behind_its_snapshot(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.journal.close()
    path = tmp_path / "events-00000001.rmq"
    assert read(path).whole
    path.write_bytes(path.read_bytes()[:-8])
    assert not read(path).whole


def test_only_the_end_of_the_last_log_may_be_torn(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(event(1))
    run.write(event(2))
    run.journal.close()
    path = tmp_path / "events-00000001.rmq"
    path.write_bytes(path.read_bytes()[:-8])
    assert (read(path).events, read(path).damage) == ([event(1)], [])
    assert len(read(path, last=False).damage) == 1


def test_log_under_another_number_gives_nothing(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.journal.close()
    (tmp_path / "events-00000001.rmq").rename(tmp_path / "events-00000002.rmq")
    log = read(tmp_path / "events-00000002.rmq")
    assert (log.whole, log.snapshot, len(log.damage)) == (False, [], 1)


@pytest.mark.parametrize(("limit", "left"), [(1000, 5), (499, 4), (300, 3), (1, 2)])
def test_oldest_logs_go_first(tmp_path: Path, limit: int, left: int) -> None:
    for number in range(1, 6):
        (tmp_path / f"events-{number:08d}.rmq").write_bytes(bytes(100))
    assert prune(tmp_path, limit, Disk()) == (left < 5)
    assert len(list(tmp_path.iterdir())) == left
    assert (tmp_path / "events-00000005.rmq").exists()
