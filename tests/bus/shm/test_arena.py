"""Arenas: reading, refused files, and the memory they use."""

import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.services.process.open_descriptors import opened

from rolloutmq.bus.shm import arena
from rolloutmq.bus.shm.arena import TRIM_S, Arena, MappedArena, MappedArenas
from rolloutmq.schemas.errors import SegmentGoneError
from rolloutmq.schemas.wire.envelope import ArenaRef

NBYTES = 1 << 20


@contextmanager
def made(nbytes: int = NBYTES) -> Iterator[Arena]:
    one = Arena(nbytes)
    try:
        yield one
    finally:
        one.close()


def resident(one: Arena) -> int:
    """Bytes of memory that an arena takes."""
    return os.fstat(one.ref.fd).st_blocks * 512


def test_a_reader_sees_what_was_laid_and_can_change_nothing() -> None:
    with made() as one:
        slot = one.slots.allocate(100)
        assert slot is not None
        one.memory[slot.offset : slot.offset + slot.nbytes] = bytes(range(100))
        mapped = MappedArena(one.ref)
        assert mapped.view[slot.offset : slot.offset + 100] == bytes(range(100))
        assert mapped.view.readonly
        again = MappedArena(mapped.ref)  # as a trainer does, by the broker's descriptor
        mapped.close()
        assert again.view[:100] == bytes(range(100))
        again.close()


def test_the_bytes_outlive_whoever_made_them() -> None:
    with made() as one:
        slot = one.slots.allocate(3)
        assert slot is not None
        one.memory[slot.offset : slot.offset + slot.nbytes] = b"abc"
        mapped = MappedArena(one.ref)
    view = mapped.view
    mapped.close()
    assert bytes(view[:3]) == b"abc"


def test_an_arena_takes_only_the_memory_in_use_and_gives_a_peak_back() -> None:
    with made(256 << 20) as one:
        assert resident(one) == 0
        for seq in range(1, 11):
            slot = one.slots.allocate(1 << 20)
            assert slot is not None
            slot.number(seq)
            one.memory[slot.offset : slot.offset + slot.nbytes] = bytes(1 << 20)
        assert resident(one) == 10 << 20
        one.trim(0.0)
        one.slots.release(10)
        one.trim(TRIM_S)
        assert resident(one) == 10 << 20
        one.trim(TRIM_S)  # too soon
        one.trim(2 * TRIM_S)
        assert resident(one) == 0


def test_it_can_neither_shrink_nor_grow_under_a_reader() -> None:
    with made() as one:
        for nbytes in (0, NBYTES - mmap.PAGESIZE, NBYTES + mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(one.ref.fd, nbytes)


@contextmanager
def _memory(nbytes: int, seals: int) -> Iterator[ArenaRef]:
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    yield ArenaRef(os.getpid(), fd, os.fstat(fd).st_ino, nbytes)
    os.close(fd)


@pytest.mark.parametrize(
    "lie",
    [
        lambda ref: replace(ref, ino=ref.ino + 1),
        lambda ref: replace(ref, nbytes=ref.nbytes * 2),
        lambda ref: replace(ref, nbytes=ref.nbytes // 2),
        lambda ref: replace(ref, nbytes=0),
        lambda ref: replace(ref, fd=1 << 40),
        lambda ref: replace(ref, fd=ref.fd + 1000),
        lambda ref: replace(ref, pid=1 << 40),
        lambda ref: replace(ref, pid=0),
    ],
)
def test_what_is_not_there_as_it_was_named_is_not_read(lie: Callable[[ArenaRef], ArenaRef]) -> None:
    with made() as one, pytest.raises(SegmentGoneError):
        MappedArena(lie(one.ref))


def test_what_could_become_shorter_is_not_read(tmp_path: Path) -> None:
    with _memory(4096, fcntl.F_SEAL_GROW) as ref, pytest.raises(SegmentGoneError, match="shorter"):
        MappedArena(ref)
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened, pytest.raises(SegmentGoneError):
        MappedArena(ArenaRef(os.getpid(), opened.fileno(), os.fstat(opened.fileno()).st_ino, 4096))


def test_a_pipe_and_a_socket_are_not_waited_for() -> None:
    one, other = socket.socketpair()
    ends = os.pipe()
    with one, other:
        for fd in (*ends, one.fileno()):
            with pytest.raises(SegmentGoneError):
                MappedArena(ArenaRef(os.getpid(), fd, os.fstat(fd).st_ino, 4096))
    for fd in ends:
        os.close(fd)


def test_another_users_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with made() as one:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(SegmentGoneError, match="user"):
            MappedArena(one.ref)


def test_a_refusal_leaves_no_descriptor_open() -> None:
    before = opened().total()
    with _memory(4096, 0) as ref, pytest.raises(SegmentGoneError):
        MappedArena(ref)
    assert opened().total() == before


def test_a_trainer_opens_an_arena_once_and_closes_what_no_batch_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("rolloutmq.bus.shm.arena.time.monotonic", lambda: now[0])
    with made() as one, made() as other:
        before = opened().total()
        arenas = MappedArenas()
        first, second = arenas.open([one.ref, other.ref])
        assert arenas.open([other.ref]) == [second]
        del first, second
        open_now = opened().total()
        assert open_now == before + 2
        now[0] = arena.UNUSED_S - 1
        arenas.open([other.ref])
        arenas.sweep()
        assert opened().total() == open_now
        now[0] = arena.UNUSED_S
        arenas.sweep()
        assert opened().total() == open_now - 1
        arenas.close()
        assert opened().total() == before
