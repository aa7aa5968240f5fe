from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.schemas.policy_lineage import PolicyLineage
from rolloutmq.schemas.wire.envelope import PolicyVersion as V

STEPS = st.integers(0, 50)


def resumed_twice() -> PolicyLineage:
    """Incarnation 1 resumes at (0, 10), incarnation 3 at (1, 14)."""
    lineage = PolicyLineage()
    lineage.resumed(V(0, 10))
    lineage.seen(V(1, 10))
    lineage.resumed(V(1, 14))
    lineage.seen(V(3, 14))
    return lineage


def test_steps_that_were_lost_and_steps_since_both_count() -> None:
    lineage = resumed_twice()
    assert lineage.distance(V(0, 12), V(0, 9)) == 3
    assert lineage.distance(V(1, 12), V(0, 9)) == 3
    assert lineage.distance(V(1, 12), V(0, 13)) == 5
    assert lineage.distance(V(3, 16), V(1, 17)) == 5
    assert lineage.distance(V(3, 16), V(0, 12)) == 2 + 4 + 2


def test_the_same_number_is_another_policy_after_a_resume() -> None:
    assert resumed_twice().distance(V(1, 12), V(0, 12)) == 4


def test_up_to_the_fork_the_policies_of_both_are_the_same() -> None:
    lineage = resumed_twice()
    assert lineage.origin(V(3, 14)) == V(1, 14)
    assert lineage.origin(V(3, 9)) == lineage.origin(V(1, 9)) == V(0, 9)
    assert lineage.distance(V(3, 9), V(0, 7)) == 2


def test_an_unknown_descent_is_measured_by_steps() -> None:
    assert PolicyLineage().distance(V(4, 12), V(2, 9)) == 3


def test_a_group_of_a_newer_policy_is_not_stale() -> None:
    assert PolicyLineage().staleness(V(0, 0), V(0, 54)) == 0
    assert PolicyLineage().staleness(V(0, 3), V(1, 54)) == 0
    lineage = resumed_twice()
    assert lineage.staleness(V(0, 8), V(3, 16)) == 0
    assert lineage.staleness(V(1, 12), V(3, 16)) == 0
    assert lineage.staleness(V(3, 16), V(3, 12)) == 4


def test_steps_that_a_resume_lost_are_no_newer_policy() -> None:
    lineage = resumed_twice()
    assert lineage.staleness(V(1, 10), V(0, 13)) == 3
    assert lineage.staleness(V(0, 12), V(3, 16)) == lineage.distance(V(0, 12), V(3, 16)) > 0


@given(st.sampled_from([0, 1, 3]), STEPS, st.sampled_from([0, 1, 3]), STEPS)
def test_the_distance_has_no_direction(a: int, step_a: int, b: int, step_b: int) -> None:
    lineage = resumed_twice()
    one, other = V(a, step_a), V(b, step_b)
    assert lineage.distance(one, other) == lineage.distance(other, one) >= 0
    assert lineage.distance(one, one) == 0


@given(st.sampled_from([0, 1, 3]), STEPS, STEPS)
def test_within_an_incarnation_staleness_is_the_distance_of_the_steps(one: int, now: int, then: int) -> None:
    lineage = resumed_twice()
    assert lineage.distance(V(one, now), V(one, then)) == abs(now - then)
    assert lineage.staleness(V(one, now), V(one, then)) == max(0, now - then)
