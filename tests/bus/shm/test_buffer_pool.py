"""The pool reuses a buffer only without references to it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rolloutmq.bus.shm import buffer_pool
from rolloutmq.bus.shm.buffer_pool import KEPT_BYTES, LEAST_BYTES, BufferPool

NBYTES = 2 * LEAST_BYTES


def filled(value: int, nbytes: int = NBYTES) -> NDArray[np.uint8]:
    return np.full(nbytes, value, np.uint8)


def address(data: bytes | NDArray[np.uint8]) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


@pytest.mark.parametrize("nbytes", [NBYTES, 10])
def test_a_copy_is_the_readers_own_and_cannot_be_written(nbytes: int) -> None:
    source = filled(1, nbytes)
    copied = np.frombuffer(BufferPool().copy(source), np.uint8)
    source[:] = 2
    assert copied.tolist() == [1] * nbytes
    assert not copied.flags.writeable
    assert not np.frombuffer(copied, np.int8).flags.writeable


def test_what_nobody_refers_to_is_used_again_and_what_somebody_keeps_is_not() -> None:
    reading = BufferPool()
    first = reading.copy(filled(1))
    kept = np.frombuffer(first[10:30], np.int8, 10)  # a column of a group, of which nothing else is left
    places = {address(first)}
    del first
    for value in range(2, 20):
        copied = reading.copy(filled(value))
        assert np.array_equal(copied, filled(value))
        places.add(address(copied))
        del copied
    assert len(places) == 2
    assert kept.tolist() == [1] * 10


def test_all_that_are_kept_are_apart() -> None:
    reading = BufferPool()
    kept = [reading.copy(filled(value, NBYTES + value)) for value in range(50)]
    assert len({address(view) for view in kept}) == 50
    assert all(np.array_equal(view, filled(value, NBYTES + value)) for value, view in enumerate(kept))


def test_little_is_remembered_however_much_was_read() -> None:
    reading = BufferPool()
    kept = [reading.copy(filled(1, 4 << 20)) for _ in range(2 * KEPT_BYTES >> 22)]
    assert sum(buffer.nbytes for buffer in reading._kept) == reading._kept_bytes <= KEPT_BYTES
    assert len(kept) > len(reading._kept)


def test_a_small_one_and_one_of_another_size_do_not_share() -> None:
    reading = BufferPool()
    large = address(reading.copy(filled(1, 10 * NBYTES)))
    assert address(reading.copy(filled(2, NBYTES))) != large
    assert reading.copy(filled(3, 10)) == bytes([3] * 10)
    assert len(reading._kept) == 2
    assert buffer_pool.LEAST_BYTES > 10
