"""The control page: versions, and the waits of readers and writers, on a plain file."""

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rolloutmq.schemas.errors import WeightsBusyError, WeightsTornError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.lock import _PENDING, PAGE_BYTES, WeightLock

V = PolicyVersion


class Page:
    """One control page, and locks on it that do not know of each other, as other processes would have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(PAGE_BYTES))
        self.opened: list[tuple[WeightLock, int]] = []

    def open(self) -> WeightLock:
        fd = os.open(self.path, os.O_RDWR)
        lock = WeightLock(mmap.mmap(fd, 0), fd)
        self.opened.append((lock, fd))
        return lock


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page(tmp_path / "page")
    yield made
    for lock, fd in made.opened:
        lock.close()
        os.close(fd)


def test_a_write_becomes_the_version_at_its_end(page: Page) -> None:
    writer, reader = page.open(), page.open()
    assert reader.version == V(0, 0)
    for step in range(1, 6):
        with writer.writing(V(2, step)):
            assert reader.version == V(2 if step > 1 else 0, step - 1)
            assert not reader.is_torn()
        assert reader.version == V(2, step)
        with reader.reading() as version:
            assert version == V(2, step)


def test_readers_do_not_exclude_each_other(page: Page) -> None:
    one, other = page.open(), page.open()
    with one.reading(), other.reading(patience_s=0.0):
        pass


def test_a_writer_waits_for_readers_and_they_for_it(page: Page) -> None:
    writer, reader = page.open(), page.open()
    with reader.reading(), pytest.raises(WeightsBusyError, match=f"reader {os.getpid()} holds it"):
        writer.writing(V(0, 1), patience_s=0.01).__enter__()
    assert reader.version == V(0, 0)
    assert not reader.is_torn()
    with writer.writing(V(0, 1)), pytest.raises(WeightsBusyError, match=f"writer {os.getpid()} holds it"):
        reader.reading(patience_s=0.01).__enter__()


def test_where_the_kernel_does_not_tell_there_is_a_reader_all_the_same(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = page.open(), page.open()
    monkeypatch.setattr("rolloutmq.trainer.weights.lock.LOCKS", page.path.with_name("nothing"))
    with reader.reading(), pytest.raises(WeightsBusyError, match="a reader holds it"):
        writer.writing(V(0, 1), patience_s=0.01).__enter__()
    assert "reader 3 and reader 4 hold it" in str(WeightsBusyError(0, 1.0, (3, 4)))


def test_a_write_that_ends_while_it_is_looked_at_is_not_torn(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = page.open(), page.open()
    look = WeightLock._held_by_living_writer
    with ExitStack() as stack:

        def late(lock: WeightLock) -> bool:
            stack.close()
            return look(lock)

        monkeypatch.setattr(WeightLock, "_held_by_living_writer", late)
        stack.enter_context(writer.writing(V(0, 1)))
        assert not reader.is_torn()
    assert reader.version == V(0, 1)


def fail_in_mid_write(writer: WeightLock) -> None:
    with writer.writing(V(0, 2)):
        raise ZeroDivisionError


def test_a_block_that_raises_leaves_the_weights_torn(page: Page) -> None:
    writer, reader = page.open(), page.open()
    with writer.writing(V(0, 1)):
        pass
    with pytest.raises(ZeroDivisionError):
        fail_in_mid_write(writer)
    assert reader.is_torn()
    assert reader.version == V(0, 1)
    with pytest.raises(WeightsTornError, match=r"since version 0\.1"):
        reader.reading().__enter__()
    with pytest.raises(WeightsTornError):
        writer.writing(V(0, 2)).__enter__()
    with writer.writing(V(1, 1), restoring=True):
        pass
    assert not reader.is_torn()
    with reader.reading() as version:
        assert version == V(1, 1)


def test_a_busy_reader_does_not_starve_the_writer(page: Page) -> None:
    """Two readers whose turns overlap hold the lock without a gap, unless they stand back."""
    writer, ended, reads = page.open(), threading.Event(), [0, 0]

    def read(number: int, lock: WeightLock) -> None:
        while not ended.is_set():
            with lock.reading():
                reads[number] += 1
                time.sleep(0.004)

    threads = [threading.Thread(target=read, args=(number, page.open())) for number in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        worst = 0.0
        for step in range(25):
            started = time.monotonic()
            with writer.writing(V(0, step)):
                worst = max(worst, time.monotonic() - started)
            time.sleep(0.002)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert worst < 1.0
    assert min(reads) > 5


WAITING_WRITER = """
import mmap, os, sys
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.lock import WeightLock
assert "torch" not in sys.modules
fd = os.open(sys.argv[1], os.O_RDWR)
with WeightLock(mmap.mmap(fd, 0), fd).writing(PolicyVersion(0, 1)):
    pass
"""


def test_a_dead_pending_writer_holds_nobody_up(page: Page) -> None:
    """A writer that was killed while it waited left its mark on the page, and no lock."""
    reader, held = page.open(), page.open()
    with held.reading():
        child = subprocess.Popen([sys.executable, "-c", WAITING_WRITER, str(page.path)])
        try:
            while not reader._fields[_PENDING]:
                assert child.poll() is None
                time.sleep(0.001)
        finally:
            child.kill()
            child.wait()
    assert reader._fields[_PENDING] == 1
    started = time.monotonic()
    with reader.reading() as version:
        assert version == V(0, 0)
    assert time.monotonic() - started < 10.0


def test_a_reader_that_keeps_the_lock_gives_it_to_a_writer_at_its_next_turn(page: Page) -> None:
    writer, reader, other = page.open(), page.open(), page.open()
    written = threading.Event()

    def write() -> None:
        with writer.writing(V(0, 1), patience_s=30.0):
            pass
        written.set()

    with reader.keeping():
        with reader.reading() as version:
            assert version == V(0, 0)
        with pytest.raises(WeightsBusyError), other.writing(V(0, 9), patience_s=0.0):
            pass
        waiting = threading.Thread(target=write)
        waiting.start()
        while not written.is_set():
            with reader.reading():
                pass
        with reader.reading() as seen:
            assert seen == V(0, 1)
        waiting.join()
    with other.writing(V(0, 2), patience_s=0.0):
        pass


def test_a_kept_lock_is_let_go_however_the_block_ends(page: Page) -> None:
    writer, reader = page.open(), page.open()
    with pytest.raises(ZeroDivisionError), reader.keeping(), reader.reading():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), writer.writing(V(0, 1), patience_s=0.0):
        raise ZeroDivisionError
    with pytest.raises(WeightsTornError), reader.keeping(), reader.reading():
        pass
    with writer.writing(V(0, 2), restoring=True, patience_s=0.0):
        pass


def test_the_lock_is_cheap(page: Page) -> None:
    """A reader takes it for every decoding step; the bound is generous for a machine under load."""
    reader, best = page.open(), 1.0
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            with reader.reading():
                pass
        best = min(best, (time.perf_counter() - started) / 100)
    assert best < 40e-6
