"""Task spaces, options, and random numbers without a state."""

from statistics import fmean
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from rolloutmq.services.curriculum.samplers.sampler import (
    TASKS_LIMIT,
    OptionError,
    TaskSpace,
    chance,
    options_of,
    pick,
    require_memory,
)


class Options(msgspec.Struct, frozen=True):
    rate: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    count: int = 3


@pytest.mark.parametrize(("count", "levels"), [(1, 1), (10, 3), (20_000, 4), (7, 7), (1 << 62, 16)])
def test_levels_divide_the_tasks_without_gap_or_overlap(count: int, levels: int) -> None:
    space = TaskSpace(count, levels)
    assert (space.start_of(0), space.start_of(levels)) == (0, count)
    for level in range(levels):
        first, last = space.start_of(level), space.start_of(level + 1) - 1
        assert space.level_of(first) == space.level_of(last) == level
        assert abs((last - first + 1) - count / levels) <= 1


@pytest.mark.parametrize(("count", "levels"), [(0, 1), (3, 0), (3, 4)])
def test_a_level_has_a_task(count: int, levels: int) -> None:
    with pytest.raises(ValueError, match="levels must be from 1"):
        TaskSpace(count, levels)


def test_options_have_defaults_and_types() -> None:
    assert options_of(Options, {}) == Options()
    assert options_of(Options, {"rate": 1}) == Options(rate=1.0)


@pytest.mark.parametrize(
    ("given", "option", "problem"),
    [
        ({"rat": 1}, "rat", "unknown option; allowed: rate, count"),
        ({"rate": 0}, "rate", "must be `float` > 0.0 (got 0)"),
        ({"rate": "x"}, "rate", "must be `float`, got `str` (got 'x')"),
        ({"rate": 0.1, "count": 1.5}, "count", "must be `int`, got `float` (got 1.5)"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, object], option: str, problem: str) -> None:
    with pytest.raises(OptionError) as caught:
        options_of(Options, given)
    assert (caught.value.option, caught.value.problem) == (option, problem)


def test_a_space_too_large_to_remember_is_refused() -> None:
    require_memory(TaskSpace(TASKS_LIMIT))
    with pytest.raises(OptionError, match="task_count: must be at most"):
        require_memory(TaskSpace(TASKS_LIMIT + 1))


def test_random_numbers_are_uniform_and_depend_on_each_part() -> None:
    drawn = [chance("s", number) for number in range(4000)]
    assert all(0.0 <= one < 1.0 for one in drawn)
    assert abs(fmean(drawn) - 0.5) < 0.02
    assert abs(fmean(one * one for one in drawn) - 1 / 3) < 0.02
    assert len({chance("s", 1), chance("s", 2), chance("t", 1), chance("s", 1, "use")}) == 4
    assert chance("s", 1) == chance("s", 1)


def test_every_number_can_be_picked() -> None:
    assert [pick(4, u / 8) for u in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert pick(3, 1.0 - 2.0**-53) == 2
    assert pick(1 << 62, 1.0 - 2.0**-53) < 1 << 62
    assert pick(2, 0.9, start=5) == 6
