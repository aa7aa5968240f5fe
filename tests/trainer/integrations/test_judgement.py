"""Which groups another project's trainer would learn something wrong from."""

from typing import Any

import pytest

from rolloutmq import Group
from rolloutmq.trainer.integrations.judgement import Judge

JUDGE = Judge("SkyRL", 1.0, "trainer.algorithm.temperature")


def group(**changes: Any) -> Group:
    given: dict[str, Any] = {
        "tokens": [[1, 2, 3], [1, 2]],
        "mask": [[0, 1, 1], [0, 1]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[0.0, -0.5, -0.25], [0.0, -1.0]],
        **changes,
    }
    return Group.build("g", **{name: value for name, value in given.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"temperatures": [[1.0, 0.7, 0.7], [1.0, 0.7]]},
            "temperatures: the group was sampled at 0.7, SkyRL scores at",
        ),
        ({"advantages": [[1.0] * 3, [1.0] * 2]}, "advantages: SkyRL computes its own"),
        ({"inference_logprobs": None}, "inference_logprobs: required"),
        ({"mask": [[0] * 3, [0] * 2]}, "mask: no trained token"),
        ({"group_overrides": {"sft": True}}, "group_overrides: sft"),
        ({"generation_params": {"top_p": 0.9}}, "generation_params: top_p 0.9 cuts off tokens"),
        (
            {"overrides": [{"set_advantage_to_zero": True}, {}]},
            "overrides: SkyRL knows no set_advantage_to_zero",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_would_give_wrong_numbers_is_a_fault(changes: dict[str, Any], fault: str) -> None:
    assert JUDGE.find_fault(group(**changes)).startswith(fault)


def test_what_a_trainer_can_do_is_none() -> None:
    assert JUDGE.find_fault(group()) == ""
    warm = group(temperatures=[[1.0, 0.7, 0.7], [1.0, 0.7]])
    assert JUDGE._replace(temperature=0.7).find_fault(warm) == "", "tokens that are not trained do not count"
    zeroed = group(overrides=[{"set_advantage_to_zero": True}, {}])
    assert JUDGE._replace(zeroes=True).find_fault(zeroed) == ""


def test_the_remedy_names_the_setting_of_the_trainer() -> None:
    fault = JUDGE.find_fault(group(temperatures=[[0.7] * 3, [0.7] * 2]))
    assert fault.endswith("set trainer.algorithm.temperature to the same number")
