"""Logs of facts: they begin with a whole snapshot or are not there, and are cut into records that can be read alone."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.services.broker.journal.journals import Driven, config, snapshot

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.factlog import CHUNK_BYTES, LogContents, chunks, prune, read_log
from rolloutmq.services.broker.journal.facts import Dropped
from rolloutmq.services.broker.journal.packing import decode_facts
from rolloutmq.services.broker.journal.reading import RecordFile


def fact(number: int, nbytes: int = 0) -> Dropped:
    return Dropped(number, "expired", "x" * nbytes)


def read(path: Path, *, last: bool = True) -> LogContents:
    file = RecordFile(Disk(), path)
    try:
        return read_log(int(path.stem[-8:]), file, last=last)
    finally:
        file.close()


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_chunks_are_lists_that_together_are_the_facts(sizes: list[int]) -> None:
    facts = [fact(number, nbytes * 1000) for number, nbytes in enumerate(sizes)]
    parts = list(chunks(facts))
    assert [item for part in parts for item in decode_facts(part)] == facts
    assert all(len(part) < CHUNK_BYTES + 1100_000 for part in parts)
    assert len(parts) <= 1 + sum(sizes) * 1000 // (CHUNK_BYTES // 2)


def test_large_snapshot_is_many_records_and_whole(tmp_path: Path) -> None:
    items = [fact(number, 100_000) for number in range(50)]
    run = Driven(tmp_path, config()).start([*snapshot(), *items])
    run.write(fact(1000))
    run.journal.close()
    log = read(tmp_path / "facts-00000001.rmq")
    assert log.whole
    assert log.snapshot == [*snapshot(), *items]
    assert log.facts == [fact(1000)]
    assert log.damage == []
    assert log.end == (tmp_path / "facts-00000001.rmq").stat().st_size


def test_snapshot_that_lost_a_record_is_not_whole(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start([fact(number, 500_000) for number in range(6)])
    run.write(fact(1000))
    run.journal.close()
    path = tmp_path / "facts-00000001.rmq"
    original = path.read_bytes()
    for offset in range(100, len(original), 400_000):
        data = bytearray(original)
        data[offset] ^= 1
        path.write_bytes(data)
        log = read(path)
        assert not log.whole
        assert len(log.damage) == 1
        assert log.facts[-1:] == [fact(1000)]


def test_a_log_is_whole_only_with_the_mark_behind_its_snapshot(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.journal.close()
    path = tmp_path / "facts-00000001.rmq"
    assert read(path).whole
    path.write_bytes(path.read_bytes()[:-8])
    assert not read(path).whole


def test_only_the_end_of_the_last_log_may_be_torn(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.write(fact(1))
    run.write(fact(2))
    run.journal.close()
    path = tmp_path / "facts-00000001.rmq"
    path.write_bytes(path.read_bytes()[:-8])
    assert (read(path).facts, read(path).damage) == ([fact(1)], [])
    assert len(read(path, last=False).damage) == 1


def test_log_under_another_number_gives_nothing(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.journal.close()
    (tmp_path / "facts-00000001.rmq").rename(tmp_path / "facts-00000002.rmq")
    log = read(tmp_path / "facts-00000002.rmq")
    assert (log.whole, log.snapshot, len(log.damage)) == (False, [], 1)


@pytest.mark.parametrize(("limit", "left"), [(1000, 5), (499, 4), (300, 3), (1, 2)])
def test_oldest_logs_go_first(tmp_path: Path, limit: int, left: int) -> None:
    for number in range(1, 6):
        (tmp_path / f"facts-{number:08d}.rmq").write_bytes(bytes(100))
    assert prune(tmp_path, limit, Disk()) == (left < 5)
    assert len(list(tmp_path.iterdir())) == left
    assert (tmp_path / "facts-00000005.rmq").exists()
