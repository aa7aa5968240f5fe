"""Advantages of groups: values, verdicts, control experiments, and the judgement of whole batches."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from tests.trainer.support.toy import some_group

from rolloutmq.schemas.config.losses import CorrectionConfig, DapoConfig, Method
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.policy_lineage import PolicyLineage
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.step.advantages import (
    GroupAdvantages,
    GroupVerdict,
    compare,
    judge,
    judge_given,
    mean_score,
    shuffled,
    study,
)
from rolloutmq.trainer.step.collate import Bounds, Example

CENTRED = DapoConfig(advantage="dr_grpo")
METHODS: tuple[Method, ...] = ("dr_grpo", "grpo", "rloo")


def judged(scores: Any, method: Method = "dr_grpo", **rest: Any) -> GroupAdvantages:
    return judge(np.array(scores), DapoConfig(advantage=method), **rest)


def compared(scores: list[float], method: Method, ddof: int = 1, floor: float = 1e-4) -> NDArray[np.float64]:
    return compare(np.array(scores), method, ddof=ddof, floor=floor)


def test_dr_grpo_centres_the_scores() -> None:
    assert_array_equal(compared([0.0, 0.25, 1.0, 0.75], "dr_grpo"), [-0.5, -0.25, 0.5, 0.25])


@pytest.mark.parametrize(("ddof", "deviation"), [(1, 1.0), (0, (2 / 3) ** 0.5)])
def test_grpo_divides_by_the_deviation_that_is_asked_for(ddof: int, deviation: float) -> None:
    assert_allclose(compared([1.0, 2.0, 3.0], "grpo", ddof), np.array([-1, 0, 1]) / deviation, rtol=1e-15)


def test_the_guide_shows_what_the_default_deviation_makes_of_a_flat_group() -> None:
    advantages = compared([0.3, 0.3, 0.3, 0.3000001], "grpo", DapoConfig().std_ddof, floor=1e-8)
    shown = ", ".join(f"{one:.2g}".replace("-0", "\N{MINUS SIGN}") for one in advantages)
    page = Path(__file__).parents[3] / "docs" / "guides" / "losses.md"
    assert f"divided by a floor of 1e-8 give {shown}." in page.read_text(encoding="utf-8")


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    scores = [0.0, 0.25, 1.0, 0.75, 0.3]
    others = [np.mean(scores[:n] + scores[n + 1 :]) for n in range(5)]
    assert_allclose(compared(scores, "rloo"), np.array(scores) - others, rtol=1e-14)


def test_float32_comes_out_of_float64() -> None:
    scores = np.array([1e9, 1e9 + 64, 1e9 + 2000])
    found = judged(scores)
    assert found.advantages.dtype == np.float32
    assert_allclose(found.advantages, scores - scores.mean(), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "scores",
    [[0.3, 0.3, 0.3, 0.3000001], [1.0] * 8, [0.5], [-1e9, -1e9 - 100], [0, 0, 0], [True, True]],
)
def test_a_group_without_spread_is_filtered(scores: list[float], method: Method) -> None:
    found = judged(scores, method)
    assert found.verdict is GroupVerdict.FILTERED
    assert_array_equal(found.advantages, np.zeros(len(scores)))


@pytest.mark.parametrize("scale", [1e30, 1.0, 9e-7, 1e-20])
def test_small_rewards_are_learned_from_as_small_as_they_are(scale: float) -> None:
    scores = np.array([0.0, 1.0, 0.0, 1.0]) * scale
    found = judged(scores)
    assert found.verdict is GroupVerdict.USABLE
    assert_allclose(found.advantages, scores - scores.mean(), rtol=1e-6)
    divided = judged(scores, "grpo").advantages
    assert_allclose(divided, (scores - scores.mean()) / max(scores.std(ddof=1), 1e-4), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offset", [-1e6, -1000.0, 10.0, 1000.0, 1e6])
def test_an_offset_of_the_rewards_changes_no_advantage(offset: float, method: Method) -> None:
    """A floor of the deviation that grows with the mean would mute the signal of rewards such as 1000 and 1002."""
    scores = np.array([0.0, 2.0, 0.0, 2.0, 2.0])  # at an offset of 1e6 hardly more than `SPREAD_FLOOR` apart
    found = judged(scores + offset, method)
    assert found.verdict is GroupVerdict.USABLE
    assert_allclose(found.advantages, judged(scores, method).advantages, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e30, 1.0, 1e-6, 1e-20])
def test_noise_is_noise_on_every_scale(scale: float) -> None:
    assert judged(np.array([0.3, 0.3, 0.3, 0.3000001]) * scale).verdict is GroupVerdict.FILTERED
    single = np.float32(0.1) * np.arange(3, 6, dtype=np.float32) / np.arange(3, 6, dtype=np.float32)
    assert judged(single * np.float32(scale)).verdict is GroupVerdict.FILTERED


def test_what_cancelled_to_nearly_nothing_moves_next_to_nothing() -> None:
    """It cannot be told from a reward, but it is not blown up to one of full size either."""
    for method in METHODS:
        assert 0 < np.abs(judged([1e-17, -1e-17, 0.0], method).advantages).max() < 1e-12


def test_rewards_below_what_float32_knows_are_equal() -> None:
    found = judged([0.0, 1e-31, 0.0])
    assert found.verdict is GroupVerdict.FILTERED
    assert not found.advantages.any()


def test_a_nearly_flat_group_is_not_blown_up_to_full_size() -> None:
    found = judged([0.3, 0.3, 0.3, 0.300002], "grpo")
    assert found.verdict is GroupVerdict.USABLE
    assert np.abs(found.advantages).max() < 0.02  # a division by the true deviation gives 1.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_with_a_score_that_is_no_number_is_rejected(bad: float) -> None:
    found = judged([0.0, bad, 1.0], "grpo")
    assert found.verdict is GroupVerdict.REJECTED
    assert found.reason == "a score is not a finite number"
    assert_array_equal(found.advantages, np.zeros(3))


@pytest.mark.parametrize("dtype", ["i1", "?", "f4", "f2", "f8"])
def test_scores_of_any_type(dtype: str) -> None:
    found = judged(np.array([0, 1, 1, 0]).astype(dtype))
    assert_array_equal(found.advantages, np.array([-0.5, 0.5, 0.5, -0.5], np.float32))


@pytest.mark.parametrize("scale", [1e155, 1e300, 1.7e308])
def test_scores_whose_squares_overflow_are_compared_all_the_same(scale: float) -> None:
    """Their deviation was infinite, all advantages 0, and the run ended because "all scores are equal"."""
    scores = np.array([-1.0, 0.0, 0.5, 1.0])
    large = judged(scale * scores, "grpo")
    assert large.verdict is GroupVerdict.USABLE
    assert_allclose(large.advantages, judged(scores, "grpo").advantages, rtol=1e-3)


def test_shuffling_keeps_the_scores_and_repeats_itself() -> None:
    scores = np.arange(16.0)
    once = shuffled(scores, 1, "a")
    assert_array_equal(np.sort(once), scores)
    assert not np.array_equal(once, scores)
    assert_array_equal(once, shuffled(scores, 1, "a"))
    assert not np.array_equal(once, shuffled(scores, 1, "b"))
    assert not np.array_equal(once, shuffled(scores, 2, "a"))


def test_scores_without_a_finite_advantage_are_rejected_alone() -> None:
    found = judged([1e300, -1e300, 1e300, 0.0])
    assert found.verdict is GroupVerdict.REJECTED
    assert not found.advantages.any()


def test_the_noise_of_a_flat_group_never_becomes_an_advantage() -> None:
    # Divided by a floor of 1e-8, as some trainers do, these scores give -.58, -.58, -.58 and 1.73.
    for method in METHODS:
        assert not judged([0.3, 0.3, 0.3, 0.3000001], method).advantages.any()


def test_penalties_are_compared_and_never_divided() -> None:
    scores, penalties = [0.3, 0.3, 0.3, 0.300002], np.array([0.0, 0.1, 0.2, 0.5])
    for method in METHODS:
        scale = 4 / 3 if method == "rloo" else 1.0
        plain = judged(scores, method)
        found = judged(scores, method, penalties=penalties)
        lost = (plain.advantages - found.advantages).astype(np.float64)
        assert_allclose(lost, (penalties - 0.2) * scale, atol=1e-6)


def test_penalties_alone_are_no_signal() -> None:
    assert judged([1.0, 1.0], penalties=np.array([0.0, 9.0])).verdict is GroupVerdict.FILTERED


def test_penalties_that_are_no_numbers_reject_the_group() -> None:
    assert judged([0.0, 1.0], penalties=np.array([0.0, np.inf])).verdict is GroupVerdict.REJECTED


def test_given_advantages_are_used_as_they_are_where_tokens_are_trained() -> None:
    found = judge_given(np.array([np.nan, 0.5, -2.0, 7.0]), np.array([False, True, True, False]))
    assert found.verdict is GroupVerdict.USABLE
    assert found.advantages.tolist() == [0.0, 0.5, -2.0, 0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_given_advantages_that_are_no_numbers_reject_the_group(bad: float) -> None:
    found = judge_given(np.array([1.0, bad]), np.array([True, True]))
    assert found.verdict is GroupVerdict.REJECTED
    assert not found.advantages.any()


def test_given_advantages_of_zero_are_no_signal() -> None:
    assert judge_given(np.array([0.0, 9.0]), np.array([True, False])).verdict is GroupVerdict.FILTERED


BOUNDS = Bounds(vocabulary=32, positions=16)

GROUPS = [
    some_group("flat", [1.0, 1.0]),
    some_group("good", [0.0, 1.0]),
    some_group("known", [0.0, 1.0]),
    some_group("bad", [0.0, 1.0], inference_logprobs=None),
]


def by_sequence(example: Example) -> list[float]:
    """The advantage of each sequence; its tokens have the same."""
    ends = np.cumsum(example.group.columns["tokens"].lengths[0])
    rows = np.split(example.advantages, ends[:-1])
    assert all((row == row[0]).all() for row in rows)
    return [float(row[0]) for row in rows]


def test_each_group_is_judged_once() -> None:
    lesson = study(GROUPS, TrainerConfig(loss=CENTRED), BOUNDS, {"known"}, seed=0)
    assert [group.group_id for group in lesson.trained] == ["good"]
    assert [group.group_id for group in lesson.filtered] == ["flat"]
    assert [one.group_id for one in lesson.rejected] == ["bad"]
    assert lesson.repeated == ["known"]
    assert by_sequence(lesson.examples[0]) == [-0.5, 0.5]


def test_a_void_lesson_rejects_what_was_to_be_learned() -> None:
    lesson = study(GROUPS, TrainerConfig(), BOUNDS, (), seed=0)
    lesson.void("why not")
    assert lesson.trained == []
    assert [(one.group_id, one.reason) for one in lesson.rejected[1:]] == [
        ("good", "why not"),
        ("known", "why not"),
    ]


def test_the_control_shuffles_advantages_and_not_what_is_reported() -> None:
    scores = np.linspace(0, 1, 32).tolist()
    group = some_group("g", scores)
    lesson = study([group], TrainerConfig(shuffle_rewards=True), BOUNDS, (), seed=3)
    straight = study([group], TrainerConfig(), BOUNDS, (), seed=3)
    shuffled, plain = by_sequence(lesson.examples[0]), by_sequence(straight.examples[0])
    assert sorted(shuffled) == sorted(plain)
    assert abs(np.corrcoef(shuffled, plain)[0, 1]) < 0.5
    assert group.scores.tolist() == scores
    assert mean_score(lesson.trained) == pytest.approx(0.5)


def test_mean_score_is_over_sequences() -> None:
    assert mean_score([some_group("a", [1.0]), some_group("b", [0.0, 0.0, 0.0])]) == 0.25
    assert mean_score([]) == 0.0


TOKENS: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5]],
    "mask": [[0, 1, 1], [0, 1]],
    "inference_logprobs": [[0.0, -1.0, -2.0], [0.0, -0.5]],
}


def learned(group: Group, config: TrainerConfig = TrainerConfig()) -> list[float]:
    """The advantages of a group's tokens."""
    (example,) = study([group], config, BOUNDS, (), seed=0).examples
    return [float(value) for value in example.advantages]


def test_advantages_of_the_environment_take_the_place_of_those_from_scores() -> None:
    group = some_group("g", [1.0, 1.0], **TOKENS, advantages=[[9.0, 0.5, -1.0], [9.0, 2.0]])
    assert learned(group) == [0.0, 0.5, -1.0, 0.0, 2.0]


def test_the_control_knows_of_no_other_advantages_than_those_of_shuffled_scores() -> None:
    group = some_group("g", [0.0, 1.0], **TOKENS, advantages=[[9.0, 0.5, -1.0], [9.0, 2.0]])
    control = TrainerConfig(loss=CENTRED, shuffle_rewards=True)
    assert sorted(set(learned(group, control))) == [-0.5, 0.5]


def test_what_an_environment_gives_is_judged_too() -> None:
    nothing = some_group("a", [0.0, 1.0], **TOKENS, advantages=[[1.0, 0, 0], [1.0, 0]])
    wrong = some_group("b", [0.0, 1.0], **TOKENS, advantages=[[0.0, float("nan"), 0], [0.0, 1]])
    lesson = study([nothing, wrong], TrainerConfig(), BOUNDS, (), seed=0)
    assert lesson.filtered == [nothing]
    assert [one.reason for one in lesson.rejected] == [
        "an advantage of a trained token is not a finite number"
    ]


def test_a_kl_in_the_reward_is_of_the_policy_that_sampled() -> None:
    group = some_group("g", [0.0, 1.0], **TOKENS, ref_logprobs=[[5.0, -1.5, -2.25], [5.0, -0.25]])
    loss = DapoConfig(kl=0.2, kl_in="reward", kl_estimator="k1", advantage="dr_grpo")
    # k1 of the trained tokens: .5 + .25 and -.25; their mean is .25.
    expected = [-0.5 - 0.2 * 0.5] * 3 + [0.5 + 0.2 * 0.5] * 2
    assert learned(group, TrainerConfig(loss=loss)) == pytest.approx(expected)


@pytest.mark.parametrize("far", [-25.0, 25.0])
def test_a_kl_in_the_reward_grows_with_the_distance(far: float) -> None:
    """Two trained tokens of one sequence and one of the other: the penalties differ by one token's."""
    reference = [[0.0, -1.0 - far, -2.0 - far], [0.0, -0.5 - far]]
    group = some_group("g", [0.0, 1.0], **TOKENS, ref_logprobs=reference)
    loss = DapoConfig(kl=0.2, kl_in="reward", kl_estimator="k1", advantage="dr_grpo")
    expected = [-0.5 - 0.1 * far] * 3 + [0.5 + 0.1 * far] * 2
    assert learned(group, TrainerConfig(loss=loss)) == pytest.approx(expected)


def test_staleness_is_counted_from_the_oldest_policy_that_sampled() -> None:
    group = some_group("g", [0.0, 1.0], version=PolicyVersion(0, 4))
    lineage = PolicyLineage()
    lineage.forks[1] = PolicyVersion(0, 3)
    age = partial(lineage.distance, PolicyVersion(1, 7))
    lesson = study([group], TrainerConfig(), BOUNDS, (), seed=0, age=age)
    assert lesson.examples[0].staleness == 4 + 1


def test_what_is_too_old_for_the_loss_is_filtered_whatever_would_teach() -> None:
    loss = DapoConfig(correction=CorrectionConfig(max_staleness=2))
    for name, scores in (("judged", [0.0, 1.0]), ("flat", [1.0, 1.0])):
        groups = [some_group(f"{name}-{step}", scores, version=PolicyVersion(0, step)) for step in (4, 5)]
        lesson = study(
            groups, TrainerConfig(loss=loss), BOUNDS, (), seed=0, age=PolicyVersion(0, 7).staleness
        )
        assert groups[0] in lesson.filtered
        assert lesson.too_old == 1
        assert len(lesson.trained) == (name == "judged")
