from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.trainer.toy import some_group

from rolloutmq.bus.lineage import Lineage
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.losses import CorrectionConfig, DapoConfig
from rolloutmq.schemas.training import TrainerConfig
from rolloutmq.schemas.trajectory import Group
from rolloutmq.trainer.collate import Bounds, Example
from rolloutmq.trainer.lesson import mean_score, study

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
    lesson = study(GROUPS, TrainerConfig(), BOUNDS, {"known"}, seed=0)
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
    assert sorted(set(learned(group, TrainerConfig(shuffle_rewards=True)))) == [-0.5, 0.5]


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
    loss = DapoConfig(kl=0.2, kl_in="reward", kl_estimator="k1")
    # k1 of the trained tokens: .5 + .25 and -.25; their mean is .25.
    expected = [-0.5 - 0.2 * 0.5] * 3 + [0.5 + 0.2 * 0.5] * 2
    assert learned(group, TrainerConfig(loss=loss)) == pytest.approx(expected)


def test_staleness_is_counted_from_the_oldest_policy_that_sampled() -> None:
    group = some_group("g", [0.0, 1.0], version=PolicyVersion(0, 4))
    lineage = Lineage()
    lineage.forks[1] = PolicyVersion(0, 3)
    age = partial(lineage.distance, PolicyVersion(1, 7))
    lesson = study([group], TrainerConfig(), BOUNDS, (), seed=0, age=age)
    assert lesson.examples[0].staleness == 4 + 1


def test_what_is_too_old_for_the_loss_is_filtered_whatever_would_teach() -> None:
    loss = DapoConfig(correction=CorrectionConfig(max_staleness=2))
    for name, scores in (("judged", [0.0, 1.0]), ("flat", [1.0, 1.0])):
        groups = [some_group(f"{name}-{step}", scores, version=PolicyVersion(0, step)) for step in (4, 5)]
        lesson = study(groups, TrainerConfig(loss=loss), BOUNDS, (), seed=0, age=PolicyVersion(0, 7).distance)
        assert groups[0] in lesson.filtered
        assert lesson.too_old == 1
        assert len(lesson.trained) == (name == "judged")
