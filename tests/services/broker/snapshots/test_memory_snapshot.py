"""The memory snapshot: all of it is restored; a damaged file is kept and reported."""

import logging
from pathlib import Path

import pytest
import zmq
from tests.services.broker.bench import WALL, Bench, config, ids, lasting
from tests.services.broker.journal.other_versions import OTHERS, as_version, listing

from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.journal.format.records import write_segment
from rolloutmq.services.broker.snapshots import memory_snapshot


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saved.rmq"


def with_groups(groups: int) -> Bench:
    bench = Bench(config(broker={"durability": "memory"}, e={}))
    peer = bench.producer()
    for number in range(groups):
        peer.deliver(peer.next(frames=2), frames=[b"b" * (number + 1), zmq.Frame(b"f" * 70_000, copy=True)])
    return bench


def restored(path: Path, bench: Bench) -> Bench:
    found = memory_snapshot.load(path)
    later = Bench(bench.settings, epoch=2)
    later.now = 7.0
    assert not later.core.restore(found.events, found, later.now, WALL + 10.0)
    later.core.validate()
    return later


def test_the_state_comes_back_whole_and_groups_keep_their_age(path: Path) -> None:
    bench = with_groups(5)
    bench.consumer(resume=PolicyVersion())
    bench.train(0)
    bench.batch(1)
    assert memory_snapshot.save(path, bench.core.snapshot()) == 5
    later = restored(path, bench)
    assert lasting(later) == lasting(bench)
    assert later.pressure().lanes[0].oldest_age_s == 10.0
    later.consumer(resume=PolicyVersion())
    assert [d.header.seq for d in later.batch(0).groups] == [1, 2]
    found = memory_snapshot.load(path)
    assert len(set(found.ids)) == 5
    memory_snapshot.retire(path, found)
    assert not path.exists()


def test_nothing_to_save_leaves_no_file(path: Path) -> None:
    memory_snapshot.save(path, with_groups(1).core.snapshot())
    assert memory_snapshot.save(path, with_groups(0).core.snapshot()) == 0
    assert not path.exists()
    assert memory_snapshot.load(path) == ((), {}, 0)
    memory_snapshot.retire(path, memory_snapshot.load(path))


def test_damaged_file_gives_what_is_whole_and_is_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = with_groups(3)
    sent = bench.waiting()
    memory_snapshot.save(path, bench.core.snapshot())
    data = bytearray(path.read_bytes())
    data[-100_000] ^= 1
    path.write_bytes(data)
    later = restored(path, bench)
    later.consumer()
    assert ids(later.batch(0)) == (sent[0], sent[2])
    assert [(record.group_id, record.reason) for record in later.dropped] == [(sent[1], "damaged")]
    found = memory_snapshot.load(path)
    with caplog.at_level(logging.ERROR):
        memory_snapshot.retire(path, found)
    (aside,) = path.parent.iterdir()
    assert aside.name.startswith("saved.rmq.damaged-")
    assert aside.read_bytes() == data
    assert "stretches=1 groups_read=2" in caplog.text


def test_record_of_another_form_is_damage(path: Path) -> None:
    write_segment(
        path,
        [
            (memory_snapshot.STATE, b"", [b"\xc1"]),
            (memory_snapshot.BODY, b"\xc1", []),
            (memory_snapshot.STATE, b"", []),
        ],
    )
    assert memory_snapshot.load(path) == ((), {}, 3)


@pytest.mark.parametrize("version", OTHERS)
def test_file_of_another_version_is_refused_and_stays(path: Path, version: int) -> None:
    memory_snapshot.save(path, with_groups(2).core.snapshot())
    as_version(path, version)
    before = listing(path.parent)
    with pytest.raises(RecordVersionError, match=f"got version {version}"):
        memory_snapshot.load(path)
    assert listing(path.parent) == before


def test_a_group_whose_contents_were_lost_does_not_keep_the_others_from_being_saved(path: Path) -> None:
    """A broker that started from a damaged file ends in order, and its next life has the other groups."""
    bench = with_groups(3)
    memory_snapshot.save(path, bench.core.snapshot())
    data = bytearray(path.read_bytes())
    data[-100_000] ^= 1
    path.write_bytes(data)
    later = restored(path, bench)
    assert memory_snapshot.save(path, later.core.snapshot()) == 3
    again = restored(path, bench)
    again.consumer()
    assert len(ids(again.batch(0))) == 2
