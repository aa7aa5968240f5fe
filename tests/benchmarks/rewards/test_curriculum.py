"""The verdict over pairs of runs, without the runs."""

import math
from statistics import median

from benchmarks.rewards.curriculum import Pair, judged, upper_end
from benchmarks.rewards.learning import Course, Point, held_out


def course(filtered: int, *scores: float) -> Course:
    points = tuple(Point(10 * number, 160 * number, score) for number, score in enumerate(scores, 1))
    return Course(1000, filtered, points)


def test_the_groups_are_those_of_the_first_checkpoint_with_the_score() -> None:
    one = course(250, 0.5, 0.9, 0.8, 0.95)
    assert (one.groups_to(0.9), one.groups_to(0.95), one.groups_to(0.99)) == (320.0, 640.0, math.inf)
    assert one.filtered_share == 0.25


def test_rows_compare_paired_runs_by_their_median_ratio() -> None:
    pairs = [
        Pair(0, course(100, 0.9), course(400, 0.1, 0.9)),
        Pair(1, course(100, 0.1, 0.9), course(200, 0.1, 0.1, 0.9)),
        Pair(2, course(100, 0.9), course(250, 0.1, 0.9)),
    ]
    filtered, groups, upper = judged(pairs)
    assert (filtered.ratio, filtered.met) == (0.4, True)
    assert (groups.ours, groups.rival, groups.ratio, groups.met) == (160.0, 320.0, 0.5, True)
    assert (upper.ratio, upper.met) == (0.667, True)


def test_a_run_that_never_has_the_score_meets_no_goal() -> None:
    never = [Pair(seed, course(500, 0.1), course(400, 0.9)) for seed in range(3)]
    assert [row.met for row in judged(never)] == [False, False, False]
    assert [row.ratio for row in judged(never)] == [1.25, math.inf, math.inf]


def test_a_control_that_never_has_the_score_needs_more_than_its_whole_run() -> None:
    pairs = [Pair(0, course(100, 0.1, 0.9), course(400, 0.1, 0.2))]
    _, groups, _ = judged(pairs)
    assert (groups.ours, groups.rival, groups.ratio) == (320.0, 1000.0, 0.32)


def test_the_interval_is_that_of_the_median() -> None:
    assert upper_end([0.5] * 5) == 0.5
    ratios = [0.5, 0.6, 0.7, 0.8, 1.2]
    assert median(ratios) <= upper_end(ratios) <= 1.2
    assert upper_end([0.6] * 30 + [1.2]) == 0.6, "one of many does not move it"


def test_the_evaluation_set_is_fixed_and_has_every_length() -> None:
    tasks = held_out()
    assert tasks == held_out()
    assert sorted({len(task) for task in tasks}) == [2, 3, 4, 5]
    assert len(tasks) == 256
