"""The scores of a point: the estimators against their definitions, and what counts as answered."""

from itertools import combinations
from math import comb, sqrt
from statistics import stdev

import pytest

from rolloutmq.bus.evaluation.plan import plan
from rolloutmq.bus.evaluation.scores import PointScores, pass_at_k, standard_error
from rolloutmq.schemas.wire.envelope import PolicyVersion

V1, V2, V3 = (PolicyVersion(0, step) for step in (1, 2, 3))


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_part_of_all_choices_of_k_answers_with_one_that_passes(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            chosen = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)
            assert pass_at_k(n, c, k) == pytest.approx(1 - comb(n - c, k) / comb(n, k), abs=1e-12)


@pytest.mark.parametrize(("n", "k", "p"), [(8, 1, 0.3), (8, 4, 0.1), (20, 5, 0.25), (200, 100, 0.01)])
def test_pass_at_k_has_no_bias_and_the_plain_estimate_has(n: int, k: int, p: float) -> None:
    weights = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - p) ** k
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights)) == pytest.approx(truth, abs=1e-9)
    plain = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert k == 1 or plain < truth - 1e-3


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_numbers_that_contradict_each_other_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@k: needs .* \(got n="):
        pass_at_k(n, c, k)


def test_the_standard_error_is_that_of_the_mean() -> None:
    values = [0.0, 1.0, 0.5, 0.25]
    assert standard_error(values) == pytest.approx(stdev(values) / sqrt(4))
    assert standard_error([1.0]) is None


def test_each_figure_is_a_mean_over_tasks() -> None:
    scores = PointScores(plan("p", ["a"], tasks=2, samples=4, greedy=True), pass_score=1.0)
    assert scores.answer("p/a/0/greedy", [1.0], 5, V1, V1)
    assert scores.answer("p/a/1/greedy", [0.5], 5, V1, V1)
    assert scores.answer("p/a/0/sampled", [1.0, 1.0, 0.0, 0.5], 9, V1, V2, started_at=7.0)
    assert scores.answer("p/a/1/sampled", [0.0] * 4, 9, V2, V3, started_at=5.0)
    found = scores.of_all()
    assert (found.tasks, found.answered, found.failed, found.missing, found.k) == (2, 2, 0, 0, 4)
    assert (found.greedy, found.greedy_pass) == (0.75, 0.5)
    assert found.mean == pytest.approx((0.625 + 0.0) / 2)
    assert found.mean_error == pytest.approx(stdev([0.625, 0.0]) / sqrt(2))
    assert (found.pass_1, found.pass_k) == (0.25, 0.5)
    assert (scores.oldest, scores.newest, scores.started_at) == (V1, V3, 5.0)
    assert (scores.rollouts, scores.sequences, scores.tokens, scores.left) == (4, 10, 28, 0)


def test_a_task_without_every_answer_is_failed_or_missing_and_never_a_zero() -> None:
    scores = PointScores(plan("p", ["a", "b"], tasks=2, samples=2, greedy=True), pass_score=1.0)
    scores.answer("p/a/0/greedy", [1.0], 1, V1, V1)
    scores.answer("p/a/0/sampled", [1.0], 1, V1, V1)  # one answer less than asked for
    scores.give_up("p/a/1/greedy")
    scores.answer("p/a/1/sampled", [1.0, 0.0], 1, V1, V1)
    scores.lose("p/b/0/sampled")
    found = scores.of_environments()
    a, b = found["a"], found["b"]
    assert (a.tasks, a.answered, a.failed, a.missing) == (2, 0, 1, 1)
    assert (a.greedy, a.mean, a.pass_1) == (1.0, 0.75, 0.75)
    assert a.pass_k == 1.0, "the task with one answer of two has no pass@2"
    assert (b.answered, b.failed, b.missing) == (0, 0, 2)
    assert (b.greedy, b.mean, b.mean_error, b.pass_1, b.pass_k) == (None,) * 5
    assert scores.of_all().tasks == 4
    assert scores.left == 3


def test_an_answer_counts_once_and_an_unknown_one_not_at_all() -> None:
    scores = PointScores(plan("p", ["a"], tasks=1, samples=0, greedy=True), pass_score=0.5)
    assert scores.expects("p/a/0/greedy")
    assert not scores.answer("other", [9.0], 1, V1, V1)
    assert scores.answer("p/a/0/greedy", [0.5], 1, V1, V1)
    assert not scores.answer("p/a/0/greedy", [0.0], 1, V1, V1)
    found = scores.of_all()
    assert (found.greedy, found.greedy_pass, found.k, found.pass_k, found.mean) == (0.5, 1.0, 0, None, None)


def test_the_environments_weigh_by_their_tasks() -> None:
    scores = PointScores(plan("p", ["a", "b"], tasks=2, samples=0, greedy=True), pass_score=1.0)
    for name, score in (("a/0", 1.0), ("a/1", 1.0), ("b/0", 0.0)):
        scores.answer(f"p/{name}/greedy", [score], 1, V1, V1)
    assert scores.of_all().greedy == pytest.approx(2 / 3)


def test_huge_scores_overflow_no_figure() -> None:
    scores = PointScores(plan("p", ["e"], tasks=2, samples=2, greedy=False), 1.0)
    for index, value in enumerate((0.0, 1e160)):
        scores.answer(f"p/e/{index}/sampled", [value, value], 2, PolicyVersion(), PolicyVersion())
    found = scores.of_all()
    assert found.mean == pytest.approx(5e159)
    assert found.mean_error == pytest.approx(5e159)
    assert standard_error([1.7e308, 1.7e308, -1.7e308]) is not None
    assert standard_error([0.0, 0.0]) == 0.0


def test_environments_may_have_pass_scores_of_their_own() -> None:
    scores = PointScores(plan("p", ["a", "b"], tasks=1, samples=2, greedy=True), 1.0, {"b": 50.0})
    for env, low, high in (("a", 0.5, 1.0), ("b", 1.0, 60.0)):
        scores.answer(f"p/{env}/0/greedy", [low], 1, PolicyVersion(), PolicyVersion())
        scores.answer(f"p/{env}/0/sampled", [low, high], 1, PolicyVersion(), PolicyVersion())
    found = scores.of_environments()
    assert [(found[env].greedy_pass, found[env].pass_1, found[env].pass_k) for env in "ab"] == [
        (0.0, 0.5, 1.0)
    ] * 2
    assert (scores.of_all().greedy_pass, scores.of_all().pass_1) == (0.0, 0.5)
