"""Items made by a thread ahead: in order, bounded, and with their errors."""

import threading
from collections.abc import Iterator

import pytest

from rolloutmq.trainer.weights.stream.ahead import ahead

NAME = "made-ahead"


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == NAME]


def test_items_come_in_order_and_the_thread_ends() -> None:
    assert [*ahead(iter(range(1000)), 2, NAME)] == [*range(1000)]
    assert [*ahead(iter(()), 2, NAME)] == []
    assert not threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_at_most_one_more_than_the_depth_exist(depth: int) -> None:
    begun = threading.Semaphore(0)
    count = 0

    def items() -> Iterator[int]:
        nonlocal count
        while True:
            count += 1
            begun.release()
            yield count

    made = ahead(items(), depth, NAME)
    for number in range(1, 20):
        assert next(made) == number
        for _ in range(depth + 1 if number == 1 else 1):
            assert begun.acquire(timeout=60.0)
        assert count == number + depth  # the thread has made all that it may, and waits
    made.close()
    assert not threads()


def test_an_error_is_raised_in_its_turn() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("third")

    made = ahead(items(), 2, NAME)
    assert [next(made), next(made)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(made)
    assert not threads()


def test_a_caller_that_leaves_ends_the_thread() -> None:
    made = ahead(iter(range(1000)), 1, NAME)
    next(made)
    assert threads()
    made.close()
    assert not threads()
