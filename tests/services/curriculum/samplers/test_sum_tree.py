"""The tree of weights against plain sums."""

import random
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.services.curriculum.samplers.sum_tree import SumTree

WEIGHTS = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=40)


def naive(weights: list[float], u: float) -> int:
    sums = list(accumulate(weights))
    return next(number for number, end in enumerate(sums) if u * sums[-1] < end)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.floats(0.0, 1.0, exclude_max=True))
def test_a_draw_is_that_of_the_running_sum(weights: list[int], u: float) -> None:
    tree = SumTree([float(weight) for weight in weights])
    assert tree.total == sum(weights)
    if not tree.total:
        with pytest.raises(ValueError, match="no number has a weight"):
            tree.draw(u)
        return
    assert tree.draw(u) == naive([float(weight) for weight in weights], u)


@given(WEIGHTS, st.lists(st.tuples(st.integers(0, 39), st.floats(0.0, 1e6)), max_size=40))
def test_the_sums_do_not_depend_on_the_order_of_changes(
    weights: list[float], changes: list[tuple[int, float]]
) -> None:
    tree = SumTree(weights)
    now = list(weights)
    for number, weight in changes:
        if number < len(now):
            tree[number] = now[number] = weight
    fresh = SumTree(now)
    assert [tree[number] for number in range(len(now))] == now
    assert (tree.total, tree._nodes) == (fresh.total, fresh._nodes)


@given(WEIGHTS, st.floats(0.0, 1.0, exclude_max=True))
def test_a_number_without_weight_is_never_drawn(weights: list[float], u: float) -> None:
    tree = SumTree(weights)
    if tree.total > 0:
        assert weights[tree.draw(u)] > 0


def test_the_sum_before_is_told() -> None:
    tree = SumTree([2.0, 0.0, 3.0])
    assert [tree.find(at + 0.5) for at in range(5)] == [(0, 0.0), (0, 0.0), (2, 2.0), (2, 2.0), (2, 2.0)]
    assert tree.find(99.0) == (2, 2.0), "beyond the end by rounding"


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.floats(0.0, 1.0, exclude_max=True))
def test_a_difference_of_two_trees_is_drawn_like_one_tree(times: list[int], u: float) -> None:
    now = 20
    ones, at = SumTree(np.ones(len(times))), SumTree([float(time) for time in times])
    waits = [float(now - time) for time in times]
    if not sum(waits):
        with pytest.raises(ValueError, match="no number has a weight"):
            ones.draw_less(at, u, now)
        return
    assert ones.draw_less(at, u, now) == naive(waits, u)


def test_draws_follow_the_weights() -> None:
    rng = random.Random(1)
    weights = [1.0, 0.0, 2.0, 5.0]
    tree, drawn = SumTree(weights), [0] * 4
    for _ in range(8000):
        drawn[tree.draw(rng.random())] += 1
    assert drawn[1] == 0
    for number, weight in enumerate(weights):
        assert abs(drawn[number] / 8000 - weight / 8.0) < 0.02
