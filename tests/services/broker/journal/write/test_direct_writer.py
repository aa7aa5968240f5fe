"""The direct writer: whole blocks, straight from arenas, in new files and in reused ones."""

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.broker.journal.journals import FailingDisk

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.bus.shm.arena_allocator import PAGED_BYTES
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.records import (
    BLOCK_BYTES,
    FILE_HEADER_BYTES,
    Damage,
    Record,
    file_header,
    scan,
)
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.write.direct_writer import DirectWriter, StagingBuffer
from rolloutmq.services.broker.journal.write.record_writer import WRITE_BYTES, DiskRetry

NONCE = bytes(range(8))
ROOM = 16 << 20
SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([PAGED_BYTES - 1, PAGED_BYTES, 10 * BLOCK_BYTES, 10 * BLOCK_BYTES + 1]),
    st.integers(PAGED_BYTES, 5 * PAGED_BYTES),
)
STEPS = st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 3)), max_size=40)
"""Bytes of a group, whether it lies in blocks, and whether a flush, a sync, or a flush through the cache follows."""


class Watched(Disk):
    """A disk that records how it was written.

    Attributes:
        writes: Offset, bytes, and whether it bypassed the cache, of each write.
    """

    def __init__(self) -> None:
        self.writes: list[tuple[int, int, bool]] = []
        self.refuse = ""
        """`switch` or `write`: where this file system says that it cannot go past its cache."""
        self.short = 0

    def go_direct(self, fd: int, *, direct: bool) -> None:
        if direct and self.refuse == "switch":
            raise OSError(errno.EINVAL, "not here")
        super().go_direct(fd, direct=direct)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if direct and self.refuse == "write":
            raise OSError(errno.EINVAL, "not here either")
        if self.short:
            data = b"".join(map(bytes, buffers))[: self.short]
            count = os.pwrite(fd, data, offset)  # EINVAL past the cache: these bytes lie anywhere
        else:
            count = super().pwritev(fd, buffers, offset)
        self.writes.append((offset, count, direct))
        return count


def body(number: int, nbytes: int, *, in_blocks: bool) -> memoryview:
    """Return a group's bytes, which begin at a block boundary of memory or not."""
    memory = mmap.mmap(-1, nbytes + 2 * BLOCK_BYTES)
    start = 0 if in_blocks else 64
    memory[start : start + nbytes] = (b"%08d" % number * (nbytes // 8 + 1))[:nbytes]
    return memoryview(memory)[start : start + nbytes]


def appender(disk: Disk, path: Path, *, over: bytes = b"") -> DirectWriter:
    """Begin a segment, on a reused file if one is given."""
    fd = None
    if over:
        path.write_bytes(over)
        fd = disk.reopen(path)
    one = DirectWriter(disk, path, NONCE, DiskRetry.none(), StagingBuffer(), for_sync=True, fd=fd)
    one.allocate(ROOM)
    one.add_raw(file_header(NONCE))
    one.flush()
    one.sync()
    return one


def add(one: DirectWriter, number: int, nbytes: int, *, in_blocks: bool) -> tuple[int, bytes]:
    frame = body(number, nbytes, in_blocks=in_blocks)
    return one.add_group(1, b"m%d" % number, (frame,), checksum([frame]), in_blocks=in_blocks), bytes(frame)


def found(path: Path) -> list[tuple[int, bytes, bytes]]:
    """Read a segment in both ways, compare them, and find no damage."""
    whole = list(scan(path.read_bytes(), sealed=False))
    file = RecordFile(Disk(), path)
    pieces = list(file.scan(FILE_HEADER_BYTES))
    file.close()
    assert whole == pieces
    assert not [item for item in whole if isinstance(item, Damage)]
    return [
        (item.offset, bytes(item.meta), b"".join(item.frames)) for item in whole if isinstance(item, Record)
    ]


@settings(deadline=None, max_examples=60)
@given(STEPS, st.booleans(), st.sampled_from(["", "switch", "write", "short"]))
def test_what_is_added_is_read_whatever_was_there_and_no_block_is_written_twice(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, int]], over: bool, trouble: str
) -> None:
    path, disk = tmp_path_factory.mktemp("blocks") / "s.rmq", Watched()
    disk.refuse, disk.short = ("", 9973) if trouble == "short" else (trouble, 0)
    one = appender(disk, path, over=os.urandom(1 << 16) * 64 if over else b"")
    expected = []
    for number, (nbytes, in_blocks, then) in enumerate(steps):
        offset, data = add(one, number, nbytes, in_blocks=in_blocks)
        expected.append((offset, b"m%d" % number, data))
        if then:
            one.flush(cache=then == 3)
            assert found(path) == expected
        if then == 2:
            one.sync()
            one.forget_cached()
    one.flush()
    assert found(path) == expected
    ends = [offset for offset, _, _ in expected]
    one.cut()
    assert path.stat().st_size == one.end
    assert found(path) == expected
    one.close()
    assert ends == sorted(ends)
    if not disk.short:
        starts = [offset for offset, _, _ in disk.writes]
        assert all(start % BLOCK_BYTES == 0 for start in starts)
        # What is written again is only the zeros behind the end.
        assert all(
            before + count - BLOCK_BYTES <= after
            for (before, count, _), after in zip(disk.writes, starts[1:], strict=False)
        )


def test_what_lies_in_blocks_goes_past_the_cache_and_nothing_else_does(tmp_path: Path) -> None:
    disk = Watched()
    one = appender(disk, tmp_path / "s.rmq")
    cases = [(200_000, True, True), (100, True, False), (100, False, False), (200_000, False, False)]
    for number, (nbytes, in_blocks, past) in enumerate(cases):
        disk.writes.clear()
        add(one, number, nbytes, in_blocks=in_blocks)
        one.flush()
        assert [direct for _, _, direct in disk.writes] == [past], (nbytes, in_blocks)
    disk.writes.clear()
    for number, in_blocks in enumerate((True, False)):
        add(one, number, 200_000 if in_blocks else 100, in_blocks=in_blocks)
    one.flush()
    assert [direct for _, _, direct in disk.writes] == [True]
    disk.writes.clear()
    add(one, 9, 200_000, in_blocks=True)
    one.flush(cache=True)
    assert [direct for _, _, direct in disk.writes] == [False]
    one.close()


def test_where_the_file_system_refuses_it_goes_through_the_cache(tmp_path: Path) -> None:
    for refuse in ("switch", "write"):
        disk = Watched()
        disk.refuse = refuse
        one = appender(disk, tmp_path / f"{refuse}.rmq")
        add(one, 1, 200_000, in_blocks=True)
        one.flush()
        assert {direct for _, _, direct in disk.writes} == {False}
        one.close()
        assert len(found(one.path)) == 1


def test_another_error_is_the_callers(tmp_path: Path) -> None:
    disk = FailingDisk()
    one = appender(disk, tmp_path / "s.rmq")
    disk.fail("pwritev", errno.EIO)
    add(one, 1, 10, in_blocks=False)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        one.flush()
    one.close()


def test_much_is_written_before_it_is_flushed(tmp_path: Path) -> None:
    disk = Watched()
    one = appender(disk, tmp_path / "s.rmq")
    expected = [add(one, number, 300_000, in_blocks=True) for number in range(20)]
    assert sum(count for _, count, _ in disk.writes) > 20 * 300_000 - WRITE_BYTES
    one.flush()
    assert [(offset, data) for offset, _, data in found(one.path)] == expected
    one.close()


def test_a_meta_larger_than_the_memory_for_blocks_is_written_all_the_same(tmp_path: Path) -> None:
    one = appender(Watched(), tmp_path / "s.rmq")
    meta = os.urandom(2 << 20)
    frame = body(1, 50_000, in_blocks=True)
    offset = one.add_group(1, meta, (frame,), checksum([frame]), in_blocks=True)
    one.flush()
    one.close()
    assert found(one.path) == [(offset, meta, bytes(frame))]


def test_at_the_end_of_its_room_no_zeros_follow(tmp_path: Path) -> None:
    disk = Watched()
    one = appender(disk, tmp_path / "s.rmq")
    one.allocate(BLOCK_BYTES * 3)
    add(one, 1, 2 * BLOCK_BYTES - 1000, in_blocks=False)
    one.flush()
    assert one.path.stat().st_size == ROOM
    assert disk.writes[-1][:2] == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert len(found(one.path)) == 1
    one.close()
