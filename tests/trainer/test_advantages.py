import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rolloutmq.trainer.advantages import Method, Verdict, dr_grpo, grpo, judge, shuffled

METHODS: tuple[Method, ...] = ("dr_grpo", "grpo")


def test_dr_grpo_centres_the_scores() -> None:
    assert_array_equal(dr_grpo(np.array([0.0, 0.25, 1.0, 0.75])), [-0.5, -0.25, 0.5, 0.25])


def test_grpo_divides_by_the_standard_deviation_of_the_sample() -> None:
    assert_allclose(grpo(np.array([1.0, 2.0, 3.0])), [-1, 0, 1], rtol=1e-15)


def test_float32_comes_out_of_float64() -> None:
    scores = np.array([1e9, 1e9 + 64, 1e9 + 2000])
    judged = judge(scores, "dr_grpo")
    assert judged.advantages.dtype == np.float32
    assert_allclose(judged.advantages, scores - scores.mean(), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "scores",
    [[0.3, 0.3, 0.3, 0.3000001], [1.0] * 8, [0.5], [-1e9, -1e9 - 100], [0, 0, 0], [True, True]],
)
def test_a_group_without_spread_is_filtered(scores: list[float], method: Method) -> None:
    judged = judge(np.array(scores), method)
    assert judged.verdict is Verdict.FILTERED
    assert_array_equal(judged.advantages, np.zeros(len(scores)))


def test_a_nearly_flat_group_is_not_blown_up_to_full_size() -> None:
    judged = judge(np.array([0.3, 0.3, 0.3, 0.300002]), "grpo")
    assert judged.verdict is Verdict.USABLE
    assert np.abs(judged.advantages).max() < 0.02  # a division by the true deviation gives 1.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_with_a_score_that_is_no_number_is_rejected(bad: float) -> None:
    judged = judge(np.array([0.0, bad, 1.0]), "grpo")
    assert judged.verdict is Verdict.REJECTED
    assert judged.reason == "a score is not a finite number"
    assert_array_equal(judged.advantages, np.zeros(3))


@pytest.mark.parametrize("dtype", ["i1", "?", "f4", "f2", "f8"])
def test_scores_of_any_type(dtype: str) -> None:
    judged = judge(np.array([0, 1, 1, 0]).astype(dtype), "dr_grpo")
    assert_array_equal(judged.advantages, np.array([-0.5, 0.5, 0.5, -0.5], np.float32))


def test_shuffling_keeps_the_scores_and_repeats_itself() -> None:
    scores = np.arange(16.0)
    once = shuffled(scores, 1, "a")
    assert_array_equal(np.sort(once), scores)
    assert not np.array_equal(once, scores)
    assert_array_equal(once, shuffled(scores, 1, "a"))
    assert not np.array_equal(once, shuffled(scores, 1, "b"))
    assert not np.array_equal(once, shuffled(scores, 2, "a"))


def test_scores_without_a_finite_advantage_are_rejected_alone() -> None:
    found = judge(np.array([1e300, -1e300, 1e300, 0.0]), "dr_grpo")
    assert found.verdict is Verdict.REJECTED
    assert not found.advantages.any()
