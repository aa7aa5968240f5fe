from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.broker.bench import stored

from rolloutmq.services.broker.batches.by_tokens import LOOK_AHEAD, LaneOffer, compose
from rolloutmq.services.broker.journal.stored_group import StoredGroup


def queue(*lengths: int, env: str = "e", first: int = 1) -> list[StoredGroup]:
    """Return groups of so many tokens, oldest first."""
    return [stored(order, 1, tokens=tokens, env=env) for order, tokens in enumerate(lengths, first)]


def offer(
    groups: Sequence[StoredGroup], *, weight: float = 1.0, floor: int = 0, carry: float = 0.0
) -> LaneOffer:
    return LaneOffer(iter(groups), sum(g.header.tokens for g in groups), weight, floor, carry)


def orders(groups: Sequence[StoredGroup]) -> list[int]:
    return sorted(group.order for group in groups)


def total(groups: Sequence[StoredGroup]) -> int:
    return sum(group.header.tokens for group in groups)


LANES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=3)


@given(LANES, st.integers(1, 120), st.data())
@settings(max_examples=200, deadline=None)
def test_never_above_the_budget_and_nothing_left_that_fits(
    lanes: list[list[int]], budget: int, data: st.DataObject
) -> None:
    queues = [queue(*lengths, env=f"e{i}", first=1 + 100 * i) for i, lengths in enumerate(lanes)]
    offers = [offer(groups, weight=data.draw(st.sampled_from([0.0, 1.0, 3.0]))) for groups in queues]
    taken = compose(offers, budget)
    assert taken
    assert len(set(orders(taken))) == len(taken)
    if total(taken) > budget:
        assert len(taken) == 1
        return
    room = budget - total(taken)
    for groups in queues:
        mine = [group for group in groups if group in taken]
        left = [group for group in groups if group not in taken]
        if not mine:
            assert groups[0].header.tokens > room, "a lane whose oldest group fits gave nothing"
            continue
        assert mine[0] is groups[0], "the oldest group was overtaken"
        assert all(group.header.tokens > room for group in left[:LOOK_AHEAD])


def test_the_oldest_come_first_and_what_does_not_fit_is_passed_over() -> None:
    assert orders(compose([offer(queue(40, 30, 50, 20, 10, 9))], 100)) == [1, 2, 4, 5]


def test_a_group_above_the_budget_goes_alone() -> None:
    assert orders(compose([offer(queue(101, 10, 10))], 100)) == [1]
    assert orders(compose([offer(queue(10, 101, 10))], 100)) == [1, 3]


def test_weights_share_the_tokens() -> None:
    one, two = queue(*[10] * 50), queue(*[5] * 50, first=100)
    taken = compose([offer(one, weight=3.0), offer(two)], 100)
    assert [sum(g.header.tokens for g in lane if g in taken) for lane in (one, two)] == [75 // 10 * 10, 30]


@given(
    st.lists(st.integers(1, 9), min_size=40, max_size=60),
    st.lists(st.integers(1, 9), min_size=40, max_size=60),
    st.integers(20, 60),
    st.integers(0, 20),
)
@settings(max_examples=100, deadline=None)
def test_a_minimum_share_is_kept_to_within_one_group(
    one: list[int], two: list[int], budget: int, floor: int
) -> None:
    favoured, humble = queue(*one), queue(*two, first=100)
    taken = compose([offer(favoured, weight=99.0), offer(humble, weight=1.0, floor=floor)], budget)
    assert sum(g.header.tokens for g in humble if g in taken) > floor - 9


@given(st.lists(st.lists(st.integers(1, 30), min_size=3, max_size=12), min_size=2, max_size=3))
@settings(max_examples=20, deadline=None)
def test_every_group_goes_in_the_end(lanes: list[list[int]]) -> None:
    """Lanes are refilled without end with groups of one token; the first groups are delivered all the same."""
    budget, fresh = 20, iter(range(1000, 10**9))
    queues = [queue(*lengths, env=f"e{i}", first=1 + 100 * i) for i, lengths in enumerate(lanes)]
    carries = [0.0] * len(queues)
    for _ in range(25 * len(lanes)):
        for groups in queues:
            groups += [stored(next(fresh), 1, tokens=1) for _ in range(12)]
        taken = compose([offer(g, carry=c) for g, c in zip(queues, carries, strict=True)], budget)
        for i, groups in enumerate(queues):
            got = sum(g.header.tokens for g in groups if g in taken)
            carries[i] += total(taken) / len(queues) - got
            carries[i] = max(-total(taken), min(total(taken), carries[i]))
            queues[i] = [group for group in groups if group not in taken]
    assert all(group.order >= 1000 for groups in queues for group in groups)


def test_the_cost_does_not_grow_with_the_queue() -> None:
    """Counted, not timed: groups examined."""
    looked = []
    for length in (200, 20_000):
        seen = 0

        def heads(length: int = length) -> Iterator[StoredGroup]:
            nonlocal seen
            for order in range(length):
                seen += 1
                yield stored(order, 1, tokens=7)

        taken = compose([LaneOffer(heads(), length * 7)], 100)
        assert len(taken) == 14
        looked.append(seen)
    assert looked[0] == looked[1] <= 14 + LOOK_AHEAD + 2


def test_groups_above_a_limit_are_passed_over_for_the_sake_of_many() -> None:
    assert orders(compose([offer(queue(60, 30, 20, 20, 10))], 100, largest=25)) == [3, 4, 5]
