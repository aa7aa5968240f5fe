import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.services.orchestrator.autoscaling.budget import WorkerClaim, allot, divide


def test_who_wants_less_leaves_it_to_the_others() -> None:
    assert allot([WorkerClaim(1, 20, 1.0, 3), WorkerClaim(1, 20, 1.0, 20)], 12) == [3, 9]
    assert allot([WorkerClaim(1, 20, 1.0, 20), WorkerClaim(1, 20, 3.0, 20)], 12) == [3, 9]


def test_what_nobody_wants_is_room_to_grow() -> None:
    assert allot([WorkerClaim(1, 20, 1.0, 2), WorkerClaim(1, 20, 1.0, 2)], 12) == [6, 6]
    assert allot([WorkerClaim(0, 4, 1.0, 0), WorkerClaim(1, 5, 1.0, 2)], 100) == [4, 5]


def test_the_fewest_are_sure_and_a_weight_of_nothing_comes_last() -> None:
    assert allot([WorkerClaim(2, 9, 0.0, 9), WorkerClaim(1, 9, 1.0, 9)], 6) == [2, 4]
    assert allot([WorkerClaim(3, 9, 1.0, 9), WorkerClaim(3, 9, 1.0, 9)], 2) == [3, 3]


claims = st.builds(
    lambda least, more, weight, want: WorkerClaim(least, least + more, weight, want),
    st.integers(0, 5),
    st.integers(0, 30),
    st.floats(0.0, 10.0),
    st.integers(0, 60),
)


@given(st.lists(claims, max_size=6), st.integers(0, 120))
def test_rooms_are_within_the_bounds_and_together_within_the_budget(
    asked: list[WorkerClaim], budget: int
) -> None:
    rooms = allot(asked, budget)
    assert all(one.least <= room <= one.most for one, room in zip(asked, rooms, strict=True))
    assert sum(rooms) <= max(budget, sum(one.least for one in asked))
    if sum(one.most for one in asked) > budget >= sum(one.least for one in asked):
        assert sum(rooms) == budget


def test_an_amount_is_divided_by_weights_and_what_nobody_wants_too() -> None:
    assert divide(12.0, [2.0, 1.0], [100.0, 100.0]) == pytest.approx([8.0, 4.0])
    assert divide(12.0, [2.0, 1.0], [3.0, 100.0]) == pytest.approx([3.0, 9.0])
    assert divide(12.0, [2.0, 1.0], [3.0, 3.0]) == pytest.approx([7.0, 5.0])
    assert divide(12.0, [0.0, 0.0], [0.0, 0.0]) == pytest.approx([6.0, 6.0])


@given(
    st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 100.0)), min_size=1, max_size=6),
    st.floats(0.0, 500.0),
)
def test_parts_sum_up_to_the_amount(asked: list[tuple[float, float]], amount: float) -> None:
    parts = divide(amount, [weight for weight, _ in asked], [want for _, want in asked])
    assert all(part >= 0.0 for part in parts)
    assert sum(parts) == pytest.approx(amount, abs=1e-6)
