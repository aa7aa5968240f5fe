import mmap
import os
from pathlib import Path

from benchmarks.broker import memory

STATUS = """\
VmRSS:\t  999999 kB
RssAnon:\t    4000 kB
RssFile:\t     500 kB
RssShmem:\t  70000 kB
"""


def test_own_memory_is_that_which_is_not_shared() -> None:
    assert memory.own_bytes(STATUS) == 4500 << 10


def test_shared_memory_counts_whole_and_once_and_only_where_it_is_used() -> None:
    before = memory.shared_bytes(Path("/proc/self/fd"))
    fd = os.memfd_create("bench")
    other = os.dup(fd)
    try:
        os.ftruncate(fd, 64 * mmap.PAGESIZE)
        os.pwrite(fd, b"x", 3 * mmap.PAGESIZE)
        assert memory.shared_bytes(Path("/proc/self/fd")) - before == mmap.PAGESIZE
    finally:
        os.close(fd)
        os.close(other)
