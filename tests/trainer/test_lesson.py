import numpy as np
import pytest
from tests.trainer.toy import some_group

from rolloutmq.schemas.config import TrainerConfig
from rolloutmq.trainer.collate import Bounds
from rolloutmq.trainer.lesson import mean_score, study

BOUNDS = Bounds(vocabulary=32, positions=16)
GROUPS = [
    some_group("flat", [1.0, 1.0]),
    some_group("good", [0.0, 1.0]),
    some_group("known", [0.0, 1.0]),
    some_group("bad", [0.0, 1.0], inference_logprobs=None),
]


def test_each_group_is_judged_once() -> None:
    lesson = study(GROUPS, TrainerConfig(), BOUNDS, {"known"}, seed=0)
    assert [group.group_id for group in lesson.trained] == ["good"]
    assert [group.group_id for group in lesson.filtered] == ["flat"]
    assert [one.group_id for one in lesson.rejected] == ["bad"]
    assert lesson.repeated == ["known"]
    assert lesson.examples[0].advantages.tolist() == [-0.5, 0.5]


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
    shuffled, plain = lesson.examples[0].advantages, straight.examples[0].advantages
    assert sorted(shuffled.tolist()) == sorted(plain.tolist())
    assert abs(np.corrcoef(shuffled, plain)[0, 1]) < 0.5
    assert group.scores.tolist() == scores
    assert mean_score(lesson.trained) == pytest.approx(0.5)


def test_mean_score_is_over_sequences() -> None:
    assert mean_score([some_group("a", [1.0]), some_group("b", [0.0, 0.0, 0.0])]) == 0.25
    assert mean_score([]) == 0.0
