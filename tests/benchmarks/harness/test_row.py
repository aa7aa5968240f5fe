from benchmarks.harness.row import compare, near, within


def test_medians_and_the_ratio_of_each_round() -> None:
    ours, rival = iter([4.0, 9.0, 8.0]), iter([2.0, 3.0, 1.0])
    row = compare(
        "things/s", "some", lambda: next(ours), lambda: next(rival), "the other", goal=3.0, rounds=3
    )
    assert (row.ours, row.rival, row.ratio, row.met) == (8.0, 2.0, 3.0, True)


def test_a_ratio_below_the_goal_is_unmet() -> None:
    row = compare("things/s", "some", lambda: 2.0, lambda: 1.0, "the other", goal=3.0)
    assert row.met is False
    assert "goal (ratio, at least) 3: UNMET" in row.line()


def test_without_a_goal_nothing_is_met() -> None:
    assert compare("things/s", "some", lambda: 2.0, lambda: 1.0, "the other").met is None


def test_a_limit_bounds_ours_whatever_the_rival_does() -> None:
    row = within("start, s", "some", lambda: 0.123456, lambda: 0.01, "the other", 0.5)
    assert (row.ours, row.goal, row.met, row.bound) == (0.1235, 0.5, True, "ours, at most")
    assert within("start, s", "some", lambda: 0.6, lambda: 9.0, "the other", 0.5).met is False


def test_a_ratio_may_be_bounded_from_above() -> None:
    row = near("pull, ms", "some", lambda: 3.0, lambda: 2.5, "the other", 1.5)
    assert (row.ratio, row.goal, row.met, row.bound) == (1.2, 1.5, True, "ratio, at most")
    assert near("pull, ms", "some", lambda: 4.0, lambda: 2.5, "the other", 1.5).met is False
    assert near("pull, ms", "some", lambda: 4.0, lambda: 2.5, "the other").met is None


def test_without_a_limit_nothing_is_met() -> None:
    assert within("memory, MB", "some", lambda: 0.6, lambda: 9.0, "the other").met is None
