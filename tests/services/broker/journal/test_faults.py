"""Disk faults during writes: the journal goes on, waits, or stops, and never reports a batch as done too early."""

import errno
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.services.broker.journal.journals import (
    Driven,
    FailingDisk,
    config,
    group,
    orders,
    path_of,
    served,
    snapshot,
)

from rolloutmq.bus.lifecycle import log_failure
from rolloutmq.schemas.errors import JournalFailedError, JournalWaitsError
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.event_buffer import Entry
from rolloutmq.services.broker.journal.format.events import Dropped
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.journal.write.event_reserve import RESERVE_NAME

GONE = Dropped(7, "expired", "stale")


@pytest.fixture
def disk() -> FailingDisk:
    return FailingDisk()


def again(directory: Path) -> Driven:
    """Recover the journal, and close it at once."""
    run = Driven(directory, config())
    run.journal.close()
    return run


def test_short_writes_are_continued(tmp_path: Path, disk: FailingDisk) -> None:
    disk.short = 700
    run = Driven(tmp_path, config(), disk).start()
    run.write(*map(group, range(1, 20)), GONE)
    run.journal.close()
    assert served(again(tmp_path).found) == set(range(1, 20))


def test_interrupted_writes_are_repeated(tmp_path: Path, disk: FailingDisk) -> None:
    run = Driven(tmp_path, config(), disk).start()
    disk.fail("pwritev", errno.EINTR, times=3)
    run.write(group(1), GONE)
    run.journal.close()
    assert served(again(tmp_path).found) == {1}


@pytest.mark.parametrize("method", ["pwritev", "allocate", "create"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE])
def test_without_room_it_waits_and_then_goes_on(
    tmp_path: Path, disk: FailingDisk, method: str, number: int
) -> None:
    run = Driven(tmp_path, config(), disk).start()
    run.write(group(1))
    disk.fail(method, number)
    run.append(*(group(number, 30_000) for number in range(2, 8)), GONE)
    run.until(lambda: run.journal.status().health == "full")
    assert run.journal.done == 1
    disk.heal()
    run.settle()
    run.until(lambda: run.journal.status().health == "ok")
    run.journal.close()
    assert served(again(tmp_path).found) == set(range(1, 8))


def test_without_room_for_another_segment_no_more_is_asked_for_in_time(
    tmp_path: Path, disk: FailingDisk
) -> None:
    run = Driven(tmp_path, config(segment_bytes=1 << 20), disk).start()
    run.write(group(1))
    disk.fail("allocate", errno.ENOSPC)
    taken = 0
    while not run.journal.tight:
        taken += 1
        run.write(group(1 + taken, 30_000))
    assert run.journal.status().health == "full"
    assert taken > 10
    run.write(GONE)  # what makes room need not wait
    disk.heal()
    run.until(lambda: not run.journal.tight)
    run.journal.close()
    assert len(served(again(tmp_path).found)) == 1 + taken


def test_groups_are_admitted_only_into_room_that_is_reserved(tmp_path: Path, disk: FailingDisk) -> None:
    """From the first moment of a life on: nothing is known of the disk then."""
    disk.fail("allocate", errno.ENOSPC)
    run = Driven(tmp_path, config(segment_bytes=1 << 20), disk).start()
    run.until(lambda: run.journal.tight)
    assert run.journal.status().health == "full"
    one = group(1, 30_000)
    assert not run.journal.admits([one.header])
    run.write(GONE)  # what makes room waits for nothing
    disk.heal()
    run.until(lambda: run.journal.admits([one.header]))
    taken = 0
    while run.journal.admits([(one := group(1 + taken, 30_000)).header]):
        taken += 1
        run.append(one)
        disk.fail("allocate", errno.ENOSPC)
    assert taken > 10
    run.settle()  # all of them had room, with none behind the two segments
    disk.heal()
    run.journal.close()
    assert len(served(again(tmp_path).found)) == taken


def test_room_is_made_for_a_group_that_is_larger_than_a_segment(tmp_path: Path, disk: FailingDisk) -> None:
    run = Driven(tmp_path, config(), disk).start()
    large = group(1, 500_000)
    run.until(lambda: run.journal.admits([group(2, 100).header]))
    assert not run.journal.admits([large.header])
    run.journal.want([large.header])
    run.until(lambda: run.journal.admits([large.header]))
    run.journal.want(())
    run.write(large)
    run.journal.close()
    assert served(again(tmp_path).found) == {1}


def test_a_segment_that_is_nearly_full_is_left_when_the_disk_is_full_so_it_can_be_removed(
    tmp_path: Path, disk: FailingDisk
) -> None:
    run = Driven(tmp_path, config(segment_bytes=1 << 20), disk).start()
    run.until(lambda: run.journal.admits([group(1).header]))
    first = tmp_path / "groups-00000001.rmq"
    written: list[StoredGroup] = []
    disk.fail("allocate", errno.ENOSPC)
    while run.journal.admits([(one := group(1 + len(written), 30_000)).header]):
        written.append(one)
        run.write(one)
    assert len(written) > 10
    for one in written:
        one.body.release()
    run.write(GONE)
    run.until(lambda: not first.exists())
    run.journal.close()


def test_a_segment_is_not_left_while_a_group_that_was_accepted_into_its_rest_is_on_its_way(
    tmp_path: Path, disk: FailingDisk
) -> None:
    run = Driven(tmp_path, config(segment_bytes=1 << 20), disk).start()
    run.until(lambda: run.journal.admits([group(1).header]))
    disk.fail("allocate", errno.ENOSPC)
    count = 0
    while run.journal.admits([(one := group(1 + count, 30_000)).header]):
        count += 1
        run.append(one)
        run.journal.advance(0.0, urgent=False)  # the disk is full by now, the segment nearly
    run.settle()
    run.until(lambda: (tmp_path / "groups-00000001.rmq").stat().st_size < 1 << 20)
    assert not run.journal.admits([group(1 + count, 30_000).header])
    run.write(GONE)
    run.journal.close()
    assert len(served(again(tmp_path).found)) == count > 10


def test_events_have_room_of_their_own(tmp_path: Path, disk: FailingDisk) -> None:
    run = Driven(tmp_path, config(Durability.OS), disk).start()
    reserve = tmp_path / RESERVE_NAME
    run.until(reserve.exists)
    run.write(group(1))

    def full_while_it_is_there(_: int) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "no room")

    disk.plan["pwritev"] = full_while_it_is_there
    disk.fail("allocate", errno.ENOSPC)
    run.write(GONE)
    run.until(lambda: not reserve.exists())  # each try to set it aside again makes the file for a moment
    disk.heal()
    run.until(reserve.exists)
    run.journal.close()
    assert not reserve.exists()


def test_room_may_come_from_segments_that_nothing_needs(tmp_path: Path, disk: FailingDisk) -> None:
    run = Driven(tmp_path, config(), disk).start()
    groups = [group(number, 20_000) for number in range(1, 8)]
    run.write(*groups)

    def full_until_one_is_gone(fd: int) -> None:
        if "groups" in path_of(fd) and (tmp_path / "groups-00000001.rmq").exists():
            raise OSError(errno.ENOSPC, "no room")

    disk.plan["pwritev"] = full_until_one_is_gone
    for one in groups[:3]:
        one.body.release()
    run.write(GONE)
    run.write(*(group(number, 30_000) for number in range(8, 12)))
    run.journal.close()
    assert served(again(tmp_path).found) == set(range(4, 12))


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)


def test_real_limit_on_files_is_waited_out_or_lived_with(tmp_path: Path) -> None:
    with file_limit(3 << 20):
        run = Driven(tmp_path, config(segment_bytes=8 << 20)).start()
        run.write(*(group(number, 500_000) for number in range(1, 11)))  # in smaller segments
        run.append(group(11, 4 << 20))
        run.until(lambda: run.journal.status().health == "full")
    run.settle()
    run.journal.close()
    assert served(again(tmp_path).found) == set(range(1, 12))


def test_a_disk_that_stays_full_does_not_keep_the_end_for_ever(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.services.broker.journal.journal.PATIENCE_S", 0.1)
    run = Driven(tmp_path, config(), disk).start()
    run.write(group(1))
    disk.fail("pwritev", errno.ENOSPC)
    run.append(group(2))
    run.until(lambda: run.journal.status().health == "full")
    run.journal.close()
    assert run.journal.done == 1
    assert orders(again(tmp_path).found) == [1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM])
def test_start_that_lacks_something_may_be_tried_again(
    tmp_path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("rolloutmq.services.broker.journal.journal.START_PATIENCE_S", 0.1)
    disk.fail("pwritev", number)
    run = Driven(tmp_path, config(), disk)
    with pytest.raises(JournalWaitsError, match=os.strerror(number)) as caught:
        run.start()
    run.journal.close()
    assert list(tmp_path.iterdir()) == []
    assert log_failure("broker", caught.value) != PERMANENT_FAILURE


def test_start_goes_on_as_soon_as_there_is_room(
    tmp_path: Path, disk: FailingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.fail("pwritev", errno.ENOSPC, times=2)
    run = Driven(tmp_path, config(), disk).start()
    assert caplog.text.count("journal waits for room") == 1
    run.write(group(1))
    run.journal.close()
    assert served(again(tmp_path).found) == {1}


def test_start_on_a_disk_that_fails_cannot_be_helped(tmp_path: Path, disk: FailingDisk) -> None:
    disk.fail("fdatasync", errno.EIO)
    run = Driven(tmp_path, config(), disk)
    with pytest.raises(JournalFailedError) as caught:
        run.start()
    run.journal.close()
    assert log_failure("broker", caught.value) == PERMANENT_FAILURE


@pytest.mark.parametrize("level", [Durability.OS, Durability.DISK])
@pytest.mark.parametrize("entries", ["group", "event", "both"])
def test_failed_write_stops_it_for_good(
    tmp_path: Path, disk: FailingDisk, level: Durability, entries: str
) -> None:
    run = _begun(tmp_path, disk, level)
    disk.fail("pwritev", errno.EIO, times=1, match="events" if entries == "event" else "groups")
    _failed(run, [GONE] if entries == "event" else [group(2)] if entries == "group" else [group(2), GONE])
    assert orders(again(tmp_path).found)[:1] == [1]
    assert served(again(tmp_path).found) == {1}


def _begun(directory: Path, disk: FailingDisk, level: Durability = Durability.DISK) -> Driven:
    """Return a journal with one group that has done all its chores."""
    run = Driven(directory, config(level), disk).start()
    run.write(group(1))
    for _ in range(6):
        run.write(GONE)
    return run


def _failed(run: Driven, entries: list[Entry]) -> None:
    done = run.journal.done
    run.append(*entries)
    with pytest.raises(JournalFailedError, match="acked groups are safe"):
        run.settle()
    run.append(group(3))
    with pytest.raises(JournalFailedError):
        run.journal.advance(0.0, urgent=True)
    run.journal.close(snapshot=snapshot())
    assert run.journal.done == done


@pytest.mark.parametrize("name", ["groups", "events"])
def test_failed_sync_stops_it_and_takes_back_what_was_not_done(
    tmp_path: Path, disk: FailingDisk, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = _begun(tmp_path, disk)
    disk.fail("fdatasync", errno.EIO, times=1, match=name)
    with caplog.at_level(logging.ERROR):
        _failed(run, [group(2), GONE, GONE])
    assert "journal failed" in caplog.text
    calls = disk.calls
    assert (
        "pwritev" not in calls[len(calls) - calls[::-1].index("fdatasync") :]
    )  # nothing was written after it
    found = again(tmp_path).found
    assert orders(found)[0] == 1
    assert list(found.events).count(GONE) == 6
    assert served(found) == {1}


def test_where_facts_cannot_be_taken_back_the_groups_they_name_stay(
    tmp_path: Path, disk: FailingDisk
) -> None:
    run = _begun(tmp_path, disk)
    disk.fail("fdatasync", errno.EIO, times=1, match="events")
    disk.fail("truncate", errno.EIO, match="events")
    _failed(run, [group(2), GONE])
    assert served(again(tmp_path).found) == {1, 2}


def test_failed_rotation_leaves_the_old_log(tmp_path: Path, disk: FailingDisk) -> None:
    run = _begun(tmp_path, disk)
    disk.fail("rename", errno.EIO)
    run.journal.rotate(snapshot())
    with pytest.raises(JournalFailedError):
        run.settle()
    run.journal.close()
    assert served(again(tmp_path).found) == {1}
    assert not list(tmp_path.glob("*.tmp"))


def test_file_system_that_cannot_reserve_room_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    run = Driven(tmp_path, config()).start()
    run.write(*(group(number, 20_000) for number in range(1, 8)), GONE)
    run.journal.close()
    assert served(again(tmp_path).found) == set(range(1, 8))


def test_what_cannot_be_encoded_stops_it_too(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    run.append(Dropped(7, object(), "stale"))  # type: ignore[arg-type]
    with pytest.raises(JournalFailedError, match="TypeError"):
        run.settle()
    run.journal.close()
