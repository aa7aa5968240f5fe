"""Reading groups: the written group, or reported damage and a copy in quarantine."""

import errno
import os
from pathlib import Path

import pytest
from tests.services.broker.journal.journals import Driven, FailingDisk, config, contents, group

from rolloutmq.schemas.errors import DamagedRecordError, JournalWaitsError
from rolloutmq.services.broker.journal.read.segments import OPEN_LIMIT
from rolloutmq.services.broker.journal.stored_group import Source, StoredGroup


def written(run: Driven, count: int, nbytes: int = 20_000) -> list[StoredGroup]:
    groups = [group(number, nbytes) for number in range(1, count + 1)]
    run.write(*groups)
    return groups


def place(group: StoredGroup) -> tuple[Source, int]:
    assert group.body.place is not None
    return group.body.place


def read(group: StoredGroup) -> tuple[bytes, ...]:
    source, offset = place(group)
    return tuple(bytes(frame) for frame in source.read(offset))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def quarantined(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "quarantine").iterdir())


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("where", [0, 20, 36 + 16 + 5, 36 + 300])
def test_damaged_record_is_kept_aside_once_and_its_neighbours_are_served(tmp_path: Path, where: int) -> None:
    run = Driven(tmp_path, config()).start()
    groups = written(run, 3)
    source, offset = place(groups[1])
    flip(tmp_path / "groups-00000001.rmq", offset + where)
    for _ in range(2):
        with pytest.raises(DamagedRecordError, match=f"at {offset} is damaged"):
            source.read(offset)
    assert run.journal.status().quarantined == 1
    assert quarantined(tmp_path) == [f"groups-00000001-{offset:012d}.damaged"]
    path = tmp_path / "quarantine" / quarantined(tmp_path)[0]
    assert path.stat().st_mode & 0o777 == 0o600
    kept = path.read_bytes()
    assert len(kept) == place(groups[2])[1] - offset
    for index in (0, 2):
        assert read(groups[index]) == contents(index + 1, 20_000)
    groups[1].body.shed()
    assert not groups[1].body.load()
    run.journal.close()


def test_segment_that_does_not_begin_as_it_should_is_kept_whole(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    groups = written(run, 3)
    flip(tmp_path / "groups-00000001.rmq", 9)
    for one in groups:
        with pytest.raises(DamagedRecordError):
            read(one)
    assert quarantined(tmp_path) == ["groups-00000001-whole.damaged"]
    run.journal.close()


def test_segment_under_another_number_gives_nothing(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    groups = written(run, 7)
    first, second = (tmp_path / f"groups-0000000{number}.rmq" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    assert [one for one in groups if _readable(one)] == [*groups[:3], groups[6]]
    run.journal.close()


def _readable(group: StoredGroup) -> bool:
    try:
        return read(group) == contents(group.order, 20_000)
    except DamagedRecordError:
        return False


def test_disk_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    groups = written(run, 2)
    assert read(groups[0])
    disk.fail("pread", errno.EIO)
    with pytest.raises(DamagedRecordError):
        read(groups[1])
    disk.heal()
    run.journal.close()


def test_place_beyond_the_file_or_between_records_is_damage(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    (one,) = written(run, 1)
    source, offset = place(one)
    for wrong in (offset + 8, offset + 1, 0, 1 << 40):
        with pytest.raises(DamagedRecordError):
            source.read(wrong)
    run.journal.close()


def test_few_segments_are_open_at_once(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    groups = written(run, 3 * (OPEN_LIMIT + 5))
    assert all(read(one) == contents(one.order, 20_000) for one in groups)
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]  # noqa: PTH115
    assert sum("groups-" in target for target in opened) <= OPEN_LIMIT + 2  # two are there to be written
    run.journal.close()


def test_without_descriptors_others_are_given_up(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    groups = written(run, 7)
    disk.fail("open", errno.EMFILE, times=1)
    assert read(groups[0]) == contents(1, 20_000)  # for the one in reserve
    disk.fail("open", errno.EMFILE, times=1)
    assert read(groups[6]) == contents(7, 20_000)  # for the first one
    disk.heal()
    run.journal.close()


def test_reserve_is_taken_again(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    groups = written(run, 4)
    for times, number in ((1, 1), (2, 4), (2, 1), (2, 4)):  # for the reserve, then also for the other segment
        disk.fail("open", errno.EMFILE, times=times)
        assert read(groups[number - 1]) == contents(number, 20_000)
    run.journal.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM])
def test_what_cannot_be_read_now_is_not_condemned(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    groups = written(run, 7)
    for one in groups:
        one.body.shed()
    disk.fail("open", number)
    for one in groups * 2:
        with pytest.raises(JournalWaitsError, match="nothing is lost"):
            one.body.load()
    assert caplog.text.count("journal waits to read") == 1
    assert run.journal.status().quarantined == 0
    assert not (tmp_path / "quarantine").exists()
    disk.heal()
    assert all(one.body.load() for one in groups)
    run.journal.close()


def test_memory_that_lacks_in_the_middle_of_a_read_condemns_nothing(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    (one,) = written(run, 1)
    assert read(one)
    disk.fail("pread", errno.ENOMEM)
    with pytest.raises(JournalWaitsError):
        read(one)
    disk.heal()
    assert read(one) == contents(1, 20_000)
    run.journal.close()


def test_segment_that_may_not_be_read_is_damage(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    (one,) = written(run, 1)
    disk.fail("open", errno.EIO, times=1)
    with pytest.raises(DamagedRecordError):
        read(one)
    run.journal.close()
