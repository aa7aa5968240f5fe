"""Trim: the reserved room of a killed broker is returned, and no byte of a record is lost."""

import shutil
from pathlib import Path

import msgspec
import pytest
from tests.services.broker.journal.journals import (
    SMALL,
    CrashingDisk,
    Driven,
    acceptances,
    config,
    group,
    orders,
    served,
    snapshot,
)
from tests.services.broker.journal.other_versions import OTHERS, as_version, listing

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.services.broker.journal.format.events import Dropped
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES, FILE_MAGIC
from rolloutmq.services.broker.journal.read.trim import trim
from rolloutmq.services.broker.journal.stored_group import GroupBody


def segments(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.glob("groups-*"))}


RESERVED = SMALL // 4
"""The event reserve."""


def killed(tmp_path: Path, count: int) -> Path:
    """Return the journal of a broker killed after so many groups, with the next segment prepared."""
    run, left = Driven(tmp_path / "journal", config()).start(), tmp_path / "left"
    run.write(*(group(number, 20_000) for number in range(1, count + 1)))
    expected = (count + 2) // 3 + 1  # three of them fit into a segment
    newest = tmp_path / "journal" / f"groups-{expected:08d}.rmq"
    run.until(lambda: newest.exists() and newest.read_bytes().startswith(FILE_MAGIC))
    shutil.copytree(tmp_path / "journal", left)
    run.journal.close()
    return left


def found(directory: Path) -> tuple[list[int], set[int], list[str]]:
    """Return the groups the next life knows, the readable ones, and the damage."""
    run = Driven(directory, config())
    result = orders(run.found), served(run.found), run.found.damage
    run.journal.close()
    return result


def test_rest_of_the_last_segment_and_the_next_one_go_back(tmp_path: Path) -> None:
    left = killed(tmp_path, 7)
    before = segments(left)
    assert list(before.values())[2:] == [SMALL, SMALL]
    freed = trim(left)
    after = segments(left)
    assert list(after) == list(before)[:3]
    assert after["groups-00000003.rmq"] < 25_000
    assert freed == sum(before.values()) - sum(after.values()) - FILE_HEADER_BYTES + RESERVED
    assert trim(left) == 0
    assert found(left) == (list(range(1, 8)), set(range(1, 8)), [])


def test_a_journal_without_groups_has_no_segments_left(tmp_path: Path) -> None:
    left = killed(tmp_path, 0)
    assert trim(left) == SMALL - FILE_HEADER_BYTES + RESERVED
    assert list(left.glob("*.tmp")) == []
    assert segments(left) == {}
    assert found(left) == ([], set(), [])
    assert trim(tmp_path / "none") == 0


def test_room_whose_segment_was_never_begun_goes_back(tmp_path: Path) -> None:
    left = killed(tmp_path, 7)
    (left / "groups-00000005.rmq").write_bytes(bytes(SMALL))
    trim(left)
    assert len(segments(left)) == 3


def test_zeros_that_belong_to_a_record_stay(tmp_path: Path) -> None:
    run, left = Driven(tmp_path / "journal", config()).start(), tmp_path / "left"
    one = group(1, 9_000)
    zeros = bytes(9_000)
    one.header = msgspec.structs.replace(one.header, nbytes=9_000, frames=1, crc=checksum([zeros]))
    one.body = GroupBody((zeros,), 9_000)
    run.write(one)
    shutil.copytree(tmp_path / "journal", left)
    run.journal.close()
    trim(left)
    again = Driven(left, config())
    (event,) = acceptances(again.found.events)
    body = again.found.body(event)
    assert body.load()
    assert list(map(bytes, body.frames)) == [bytes(9_000)]
    body.release()
    again.journal.close()


@pytest.mark.parametrize("garbage", [b"\1", b"\xa7RMQ" + bytes(100), b"x" * 5_000])
def test_end_that_is_not_understood_is_left_to_the_next_life(tmp_path: Path, garbage: bytes) -> None:
    left = killed(tmp_path, 7)
    last = left / "groups-00000003.rmq"
    with last.open("r+b") as file:
        file.seek(24_600)
        file.write(garbage)
    trim(left)
    assert last.stat().st_size == SMALL
    assert found(left) == (list(range(1, 8)), set(range(1, 8)), [])


def test_what_a_segment_had_before_it_was_written_over_goes_back(tmp_path: Path) -> None:
    left = killed(tmp_path, 7)
    last = left / "groups-00000003.rmq"
    with last.open("r+b") as file:
        file.seek(30_000)
        file.write(b"\xa7RMQ" + bytes(range(256)) * 20)
    (left / "spare-00000001.rmq").write_bytes(bytes(100))
    trim(left)
    assert last.stat().st_size < 25_000
    assert list(left.glob("spare-*")) == []
    assert found(left) == (list(range(1, 8)), set(range(1, 8)), [])


def test_whenever_it_is_killed_the_next_life_finds_the_same(tmp_path: Path) -> None:
    journal, lefts = tmp_path / "journal", list[Path]()

    def instant(disk: CrashingDisk) -> None:
        lefts.append(tmp_path / f"left-{len(lefts)}")
        disk.kill(lefts[-1])

    run = Driven(journal, config(), CrashingDisk(journal, instant)).start()
    for number in range(1, 12):
        run.write(group(number, 17_000), *([Dropped(number - 3, "expired", "stale")] if number > 3 else []))
    run.journal.rotate(snapshot())
    run.settle()
    run.journal.close()
    assert len(lefts) > 30
    for left in lefts:
        twin = left.with_name(f"{left.name}-trimmed")
        shutil.copytree(left, twin)
        trim(twin)
        assert found(twin) == found(left), left.name


@pytest.mark.parametrize("version", OTHERS)
def test_nothing_of_another_version_is_touched(tmp_path: Path, version: int) -> None:
    left = killed(tmp_path, 7)
    spare = left / "spare-00000009.rmq"
    shutil.copy(left / "groups-00000001.rmq", spare)
    for path in left.glob("*.rmq"):
        as_version(path, version)
    before = listing(left)
    with pytest.raises(RecordVersionError, match=f"got version {version}"):
        trim(left)
    assert listing(left) == before
