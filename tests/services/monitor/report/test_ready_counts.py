"""Numbers of ready workers: exact while they change seldom, and bounded when they do not."""

from rolloutmq.services.monitor.report.ready_counts import ReadyCounts


def ready(*counts: int, limit: int = 100) -> ReadyCounts:
    found = ReadyCounts(limit)
    for t, count in enumerate(counts):
        found.add(float(t), count)
    return found


def test_workers_count_from_when_as_many_were_ready_as_were_wanted() -> None:
    found = ready(0, 1, 2, 1, 3)
    assert found.numbers(2) == [2, 1, 3]
    assert found.numbers(2, until=3.0) == [2, 1]
    assert found.numbers(9) == [1, 2, 1, 3]
    assert found.numbers(1, since=2.0) == [2, 1, 3]
    assert found.numbers(1, since=9.0) == []
    assert ReadyCounts().numbers(2) == []


def test_equal_numbers_take_one_place() -> None:
    found = ready(*[2] * 1000, *[3] * 1000, 2)
    assert len(found) == 3
    assert found.numbers(3) == [3, 2]
    assert found.numbers(until=1500.0) == [2, 3]


def test_numbers_that_change_all_the_time_keep_the_fewest_and_the_most() -> None:
    found = ready(0, 0, *(5 + number % 4 for number in range(5000)), 1, 9, limit=64)
    assert len(found) <= 64
    numbers = found.numbers(5)
    assert (min(numbers), max(numbers)) == (1, 9)
    assert min(found.numbers(5, until=1000.0)) == 5


def test_what_was_not_enough_yet_does_not_count() -> None:
    """The stretch in which the workers came was joined with one before it."""
    found = ready(0, 4, 4, 4, *(4 + number % 2 for number in range(60)), limit=16)
    assert min(found.numbers(4)) == 4
