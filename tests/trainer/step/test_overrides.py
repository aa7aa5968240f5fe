"""What an environment asks of the trainer changes the step, or the group is rejected by name."""

from typing import Any

import pytest
from tests.trainer.support.toy import some_group

from rolloutmq.schemas.config.distillation import DistillationConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.group import Group
from rolloutmq.trainer.step.advantages import BatchAdvantages, study
from rolloutmq.trainer.step.collate import Bounds
from rolloutmq.trainer.step.overrides import find_fault, zeroed

SCORES = [0.0, 0.25, 1.0]
TOKENS: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5], [6, 7]],
    "mask": [[0, 1, 1], [0, 1], [0, 1]],
    "inference_logprobs": [[0.0, -1.0, -2.0], [0.0, -0.5], [0.0, -0.7]],
}
ZERO: dict[str, Any] = {"set_advantage_to_zero": True}


def asking(scores: Any = SCORES, **columns: Any) -> Group:
    return some_group("g", scores, **TOKENS, **columns)


def studied(group: Group, **trainer: Any) -> BatchAdvantages:
    return study([group], TrainerConfig(**trainer), Bounds(20, 16), (), seed=0)


def learned(group: Group, **trainer: Any) -> list[float]:
    (example,) = studied(group, **trainer).examples
    return [round(float(one), 6) for one in example.advantages]


def test_a_zeroed_sequence_is_not_learned_from_and_still_compared_with() -> None:
    loss = {"advantage": "dr_grpo"}
    plain = learned(asking(), loss=loss)
    assert plain == pytest.approx([-5 / 12] * 3 + [-1 / 6] * 2 + [7 / 12] * 2, abs=1e-6)
    without_last = learned(asking(overrides=[{}, {"note": 1}, ZERO]), loss=loss)
    assert without_last == plain[:5] + [0.0] * 2


@pytest.mark.parametrize("absent", [None, [], [{}, {}, {}], [{"set_advantage_to_zero": False}, {}, {}]])
def test_nothing_is_zeroed_that_was_not_named(absent: Any) -> None:
    assert not zeroed(asking(overrides=absent)).any()


def test_advantages_of_the_environment_are_zeroed_too() -> None:
    own = {"advantages": [[0.0, 2.0, 3.0], [0.0, 4.0], [0.0, 5.0]]}
    assert learned(asking(**own, overrides=[ZERO, {}, {}])) == [0.0, 0.0, 0.0, 0.0, 4.0, 0.0, 5.0]


def test_a_group_of_zeroed_sequences_has_nothing_to_learn_from() -> None:
    whole = asking(overrides=[ZERO, {}, ZERO], scores=[0.0, 0.5, 1.0])
    assert studied(whole).filtered == [whole], "the one that is left is the mean"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"overrides": [{"sft": True}, {}, {}]}, "overrides: sft asks for supervised fine-tuning"),
        ({"group_overrides": {"sft": True}}, "group_overrides: sft asks for supervised fine-tuning"),
        (
            {"overrides": [ZERO]},
            "overrides: must have one map for each sequence (got 1 entries, 3 sequences)",
        ),
        (
            {"overrides": {"sft": False}},
            "overrides: must have one map for each sequence (got dict, 3 sequences)",
        ),
        ({"images": [None, "data:,"]}, "images: the policy reads text alone"),
        ({"generation_params": {"top_p": 0.9}}, "generation_params: top_p 0.9 cuts off tokens"),
        ({"generation_params": {"top_k": 50}}, "generation_params: top_k 50 cuts off tokens"),
        ({"generation_params": {"min_p": 0.05}}, "generation_params: min_p 0.05 cuts off tokens"),
    ],
)
def test_what_the_trainer_does_not_do_is_rejected_by_name(columns: dict[str, Any], reason: str) -> None:
    (rejected,) = studied(asking(**columns)).rejected
    assert rejected.reason.startswith(reason)


@pytest.mark.parametrize(
    "columns",
    [
        {
            "generation_params": {
                "temperature": 1.0,
                "top_p": 1,
                "top_k": -1,
                "min_p": 0,
                "n": 8,
                "stop": ["x"],
            }
        },
        {"generation_params": {"top_k": 0, "top_p": None}},
        {"overrides": [{"case": "a"}, {"sft": False}, {}], "group_overrides": {"group_size": 3}},
        {"images": [None, None, []]},
        {"images": {"a": [{}]}},
        {"messages": [[{"role": "user", "content": "x"}]] * 3},
    ],
)
def test_notes_are_ignored(columns: dict[str, Any]) -> None:
    assert find_fault(asking(**columns)) == ""
    assert learned(asking(**columns)) == learned(asking())


@pytest.mark.parametrize("odd", [7, "sft", [1, "sft", None], [[{"sft": True}], 2, 3], {"a": 1}, True])
@pytest.mark.parametrize("name", ["overrides", "group_overrides", "generation_params", "images"])
def test_values_of_any_kind_harm_nobody(name: str, odd: Any) -> None:
    """Producers put any value there; the trainer must outlive it."""
    lesson = studied(asking(**{name: odd}))
    assert len(lesson.examples) + len(lesson.rejected) + len(lesson.filtered) == 1


def test_values_of_any_depth_harm_nobody() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert find_fault(asking(images=deep)) == ""


def test_a_zeroed_sequence_is_still_taught() -> None:
    """Its score does not count; the teacher's log-probabilities do."""
    candidates: dict[str, Any] = {
        "distill_token_ids": [[[1]] * len(row) for row in TOKENS["tokens"]],
        "distill_logprobs": [[[-1.0]] * len(row) for row in TOKENS["tokens"]],
    }
    group = asking(overrides=[ZERO] * 3, **candidates)
    (example,) = studied(group, distillation=DistillationConfig(kind="top_k", top_k=1)).examples
    assert not example.judged
    assert not example.advantages.any()
