from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.services.broker.batches import exact
from rolloutmq.services.broker.batches.exact import (
    Counts,
    LaneSupply,
    compose,
    compose_below,
    greedy,
    largest_below,
    quotas,
)
from rolloutmq.services.broker.batches.subset_sum import reach


def supply(*sizes: int, weight: float = 1.0, floor: int = 0, carry: float = 0.0) -> LaneSupply:
    """Return a lane whose queue holds groups of these sizes, oldest first."""
    return LaneSupply(dict(Counter(sizes)), lambda: iter(sizes), weight, floor, carry)


def total(counts: Counts) -> int:
    return sum(size * n for size, n in counts.items())


QUEUES = st.lists(st.integers(1, 9), max_size=12)


@given(st.lists(QUEUES, min_size=1, max_size=3), st.integers(1, 60), st.data())
@settings(max_examples=150, deadline=None)
def test_exact_whenever_a_combination_exists(
    queues: list[list[int]], target: int, data: st.DataObject
) -> None:
    supplies = [supply(*sizes, weight=data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))) for sizes in queues]
    everything = Counter(size for sizes in queues for size in sizes)
    plan = compose(supplies, target)
    assert (plan is not None) == bool(reach(everything, target) >> target & 1)
    if plan is not None:
        assert sum(map(total, plan)) == target
        for counts, lane in zip(plan, supplies, strict=True):
            assert all(n <= lane.counts.get(size, 0) for size, n in counts.items())


@given(st.lists(QUEUES, min_size=2, max_size=3), st.integers(1, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_floors_are_kept_whenever_they_can_be(
    queues: list[list[int]], target: int, data: st.DataObject
) -> None:
    floors = [data.draw(st.integers(0, target)) for _ in queues]
    supplies = [supply(*q, floor=f) for q, f in zip(queues, floors, strict=True)]
    reachable = {0}
    for sizes, floor in zip(queues, floors, strict=True):
        bits = reach(Counter(sizes), target)
        own = {i for i in range(floor, target + 1) if bits >> i & 1}
        reachable = {a + b for a in reachable for b in own if a + b <= target}
    plan = compose(supplies, target)
    assert (plan is not None) == (target in reachable)
    if plan is not None:
        assert sum(map(total, plan)) == target
        assert all(total(c) >= f for c, f in zip(plan, floors, strict=True))


def test_one_lane_of_one_size_takes_the_oldest() -> None:
    assert compose([supply(*[16] * 100)], 256) == [{16: 16}]
    assert compose([supply(*[16] * 15)], 256) is None
    assert compose([supply(*[16] * 100)], 250) is None


def test_the_oldest_come_first_where_sizes_allow() -> None:
    assert greedy([supply(2, 4, 2, 4, 4)], 8) == ([{2: 2, 4: 1}], 0)
    plan = compose([supply(4, 4, 4, 6, 6)], 14)
    assert plan == [{4: 2, 6: 1}]


@pytest.mark.parametrize(
    ("weights", "expected"), [((1.0, 1.0), [128, 128]), ((3.0, 1.0), [192, 64]), ((0.0, 1.0), [0, 256])]
)
def test_weights_share_a_batch(weights: tuple[float, float], expected: list[int]) -> None:
    plan = compose([supply(*[16] * 99, weight=w) for w in weights], 256)
    assert plan is not None
    assert [total(counts) for counts in plan] == expected


def test_what_one_lane_lacks_the_others_give() -> None:
    plan = compose([supply(16, weight=9.0), supply(*[16] * 99)], 256)
    assert plan is not None
    assert [total(counts) for counts in plan] == [16, 240]
    plan = compose([supply(*[16] * 99, weight=0.0), supply(16)], 64)
    assert plan is not None
    assert [total(counts) for counts in plan] == [48, 16]


def test_what_is_owed_comes_later() -> None:
    owed = [supply(*[16] * 9, carry=16.0), supply(*[16] * 9, carry=-16.0)]
    assert quotas(owed, 64) == [48.0, 16.0]


def test_the_largest_below() -> None:
    assert largest_below([supply(6, 6), supply(4)], 15) == 12
    assert largest_below([supply(20)], 15) == 0


def test_the_most_below_the_number() -> None:
    assert compose_below([supply(6, 6), supply(4)], 15) == [{6: 2}, {}]
    assert compose_below([supply(20)], 15) is None
    lanes = [supply(3, 3, 3, 3), supply(5, 5, floor=5)]
    for target, expected in ((15, [9, 5]), (12, [12, 0])):
        plan = compose_below(lanes, target)
        assert plan is not None
        assert list(map(total, plan)) == expected, "a floor is kept where that costs no sequence"


@given(QUEUES.filter(bool), st.integers(9, 60))
@settings(max_examples=100, deadline=None)
def test_beyond_the_bound_of_the_search_something_comes_all_the_same(sizes: list[int], target: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "CELLS_LIMIT", 20)
        plan = compose_below([supply(*sizes)], target)
    assert plan is not None
    taken = greedy([supply(*sizes)], target)
    assert target >= total(plan[0]) >= target - taken[1]


def test_the_cost_does_not_grow_with_the_queue() -> None:
    """Counted, not timed: ages examined."""
    looked = []
    for length in (100, 100_000):
        seen = 0

        def ages(length: int = length) -> Iterator[int]:
            nonlocal seen
            for i in range(length):
                seen += 1
                yield 3 if i % 2 else 5

        lane = LaneSupply({5: length // 2, 3: length // 2}, ages)
        assert compose([lane], 64) is not None
        looked.append(seen)
    assert looked[0] == looked[1] < 30
