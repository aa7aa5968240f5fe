"""The event reserve: room that grows with the log, is kept when it cannot grow, and is returned."""

import errno
from pathlib import Path

import pytest
from tests.services.broker.journal.journals import FailingDisk

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.write.event_reserve import RESERVE_BYTES, RESERVE_NAME, EventReserve

MIB = 1 << 20


def used(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def test_it_is_room_on_the_disk_until_it_is_given_up(tmp_path: Path) -> None:
    reserve = EventReserve(tmp_path, 256 * MIB, Disk())
    reserve.keep(reserve.wanted(0))
    assert used(tmp_path) == reserve.nbytes == RESERVE_BYTES
    reserve.keep(reserve.wanted(3 * MIB))
    assert used(tmp_path) == reserve.nbytes == 2 * RESERVE_BYTES
    reserve.give_up()
    reserve.give_up()
    assert list(tmp_path.iterdir()) == []
    assert reserve.nbytes == 0


def test_with_small_segments_it_is_small() -> None:
    assert EventReserve(Path(), 1 << 16, Disk()).wanted(0) == 1 << 14


@pytest.mark.parametrize("before", [0, MIB])
def test_without_room_for_more_it_stays_as_it_is(tmp_path: Path, before: int) -> None:
    disk = FailingDisk()
    reserve = EventReserve(tmp_path, 256 * MIB, disk)
    if before:
        reserve.keep(before)
    disk.fail("allocate", errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        reserve.keep(2 * MIB)
    assert used(tmp_path) == reserve.nbytes == before
    assert (tmp_path / RESERVE_NAME).exists() == bool(before)
