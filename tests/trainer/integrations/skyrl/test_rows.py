"""Prompt groups and rows, without SkyRL."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rolloutmq.schemas.group import Group
from rolloutmq.trainer.integrations.skyrl.rows import (
    TASK_CHARS,
    Rows,
    bus_metrics,
    prompt_groups,
    task_name,
    why_nothing_came,
)
from rolloutmq.trainer.integrations.task_feed.answers import Answer, Missing
from rolloutmq.trainer.integrations.task_feed.connection import NAME_CHARS


@dataclass
class Trajectory:
    instance_id: str
    repetition_id: int


def given(*uids: str, **changes: Any) -> dict[str, Any]:
    """An input of one trajectory for each uid."""
    return {
        "prompts": [[{"role": "user", "content": uid}] for uid in uids],
        "env_classes": ["math"] * len(uids),
        "env_extras": [{"answer": np.int64(3), "row": np.arange(2)} for _ in uids],
        "sampling_params": {"temperature": 1.0, "stop": None},
        "trajectory_ids": [Trajectory(uid, number) for number, uid in enumerate(uids)],
        **changes,
    }


def group(**changes: Any) -> Group:
    """Two sequences; the second has a tool's tokens inside, and a token of the tool at its end."""
    columns: dict[str, Any] = {
        "tokens": [[5, 6, 7], [5, 6, 8, 9, 4, 3]],
        "mask": [[0, 0, 1], [0, 0, 1, 0, 1, 0]],
        "inference_logprobs": [[0.0, 0.0, -0.5], [-9.0, -9.0, -1.5, -9.0, -0.25, -9.0]],
        "scores": [1.0, 0.0],
        "stop_reasons": ["length", ""],
        "started_at": 10.0,
        "finished_at": 12.5,
    }
    return Group.build("g", **(columns | changes))


def test_an_input_is_divided_into_its_instances_in_order() -> None:
    found = prompt_groups(given("b", "a", "b", "b"))
    assert [(one.uid, one.env, one.places) for one in found] == [
        ("b", "math", (0, 2, 3)),
        ("a", "math", (1,)),
    ]
    assert found[0].payload == {
        "uid": "b",
        "messages": [{"role": "user", "content": "b"}],
        "env_class": "math",
        "env_extras": {"answer": 3, "row": [0, 1]},
        "sampling_params": {"temperature": 1.0, "stop": None},
    }


def test_trajectories_without_ids_are_instances_of_their_own() -> None:
    found = prompt_groups(given("x", "x", trajectory_ids=None, env_extras=None, sampling_params=None))
    assert [one.places for one in found] == [(0,), (1,)]
    assert found[0].payload["env_extras"] == {}


def name_of(given_input: dict[str, Any], epoch: str = "e0", env: str = "math") -> str:
    [group] = prompt_groups(given_input)
    return task_name("skyrl", "train", epoch, group, env)


def test_a_task_has_the_same_name_in_every_life_and_another_in_every_epoch() -> None:
    name = name_of(given("17"))
    assert name == "skyrl/train/e0/231fe4a2943640f86404bb02/17"
    assert name_of(given("17")) == name
    assert name_of(given("17"), epoch="e1") == name.replace("e0", "e1")


def test_an_instance_of_another_content_is_another_task_though_its_uid_is_the_same() -> None:
    others = [
        given("17", prompts=[[{"role": "user", "content": "other"}]]),
        given("17", env_extras=[{"answer": 4}]),
        given("17", sampling_params={"temperature": 0.5}),
        given("17", "17"),
    ]
    names = [name_of(given("17")), name_of(given("17"), env="code"), *map(name_of, others)]
    assert len({*names}) == len(names)
    assert all(name.endswith("/17") for name in names)


@pytest.mark.parametrize("uid", ["x" * 300, "a b", "ä", "~1"])
def test_names_that_the_broker_would_refuse_or_mix_up_have_no_uid(uid: str) -> None:
    name = name_of(given(uid))
    assert len(name) <= TASK_CHARS
    assert "~" not in name
    assert name == name_of(given(uid))
    assert name != name_of(given(uid + "x"))


def test_the_longest_name_leaves_room_for_the_attempt() -> None:
    [group] = prompt_groups(given("x" * 300))
    part = f"s{1 << 40}-{'f' * 8}"
    assert len(task_name("n" * NAME_CHARS, "train", part, group, "math")) <= TASK_CHARS


def test_rows_are_exact_and_a_token_that_was_not_sampled_has_mask_and_logprob_0() -> None:
    rows = Rows(3, pad=1)
    assert rows.fill((2, 0), Answer(group())) == 0
    assert rows.prompts == [[5, 6], [], [5, 6]]
    assert rows.responses == [[8, 9, 4, 3], [], [7]]
    assert rows.masks == [[1, 0, 1, 0], [], [1]]
    assert rows.logprobs == [[-1.5, 0.0, -0.25, 0.0], [], [-0.5]]
    assert rows.rewards == [0.0, 0.0, 1.0]
    assert rows.stop_reasons == ["stop", "", "length"]
    assert rows.times == [2.5, 0.0, 2.5]


def test_the_bits_of_a_float32_stay() -> None:
    exact = float(np.float32(-0.1))
    rows = Rows(1)
    rows.fill((0,), Answer(group(tokens=[[1, 2]], mask=[[0, 1]], scores=[1.0], stop_reasons=["stop"],
                                 inference_logprobs=[np.array([0, -0.1], np.float32)])))  # fmt: skip
    assert rows.logprobs == [[exact]]


def test_missing_trajectories_are_masked_and_move_neither_the_baseline_nor_the_deviation() -> None:
    rows = Rows(4, pad=1)
    assert rows.fill((0, 1, 2, 3), Answer(group())) == 2
    assert rows.prompts[2:] == [[5, 6]] * 2
    assert rows.responses[2:] == [[1]] * 2
    assert rows.masks[2:] == [[0]] * 2
    assert rows.logprobs[2:] == [[0.0]] * 2
    assert rows.rewards == [1.0, 0.0, 1.0, 0.0]
    assert [float(np.mean(rows.rewards)), float(np.std(rows.rewards))] == [0.5, 0.5], (
        "as of the two that came"
    )
    assert rows.stop_reasons[2:] == ["short"] * 2


def test_a_prompt_without_a_group_is_masked_whole_and_no_row_is_empty() -> None:
    rows = Rows(2, pad=1)
    assert rows.fill((0, 1), Answer(missing=Missing.FAILED, waited_s=3.0), [4, 4]) == 2
    assert (rows.prompts, rows.responses, rows.masks) == ([[4, 4]] * 2, [[1]] * 2, [[0]] * 2)
    assert (rows.rewards, rows.stop_reasons, rows.times) == ([0.0] * 2, ["failed"] * 2, [3.0] * 2)
    nothing = Rows(1, pad=1)
    nothing.fill((0,), Answer(missing=Missing.CLOSED))
    assert nothing.prompts == [[1]]


def test_what_cannot_be_trained_on_is_masked() -> None:
    rows = Rows(2, pad=1)
    assert rows.fill((0, 1), Answer(group(mask=[[0, 0, 1], [0] * 6]))) == 1
    assert rows.stop_reasons == ["length", "unusable"]
    without = Rows(2, pad=1)
    assert without.fill((0, 1), Answer(group(inference_logprobs=None))) == 2
    assert without.stop_reasons == ["unusable"] * 2


def test_more_sequences_than_trajectories_are_left_out() -> None:
    rows = Rows(1)
    assert rows.fill((0,), Answer(group())) == 0
    assert rows.rewards == [1.0]


def unfinished(**settings: bool) -> Rows:
    """Rows of a group whose first sequence did not end by itself; two more are missing and repeat its rewards."""
    rows = Rows(4, pad=1)
    rows.fill((0, 1, 2, 3), Answer(group(scores=[1.0, 0.5])))
    rows.follow_stop_reasons(**{"zero_rewards": False, "mask": False, **settings})
    return rows


def test_unfinished_trajectories_follow_the_settings_of_skyrl() -> None:
    assert (unfinished().rewards, unfinished().masks[:2]) == ([1.0, 0.5, 1.0, 0.5], [[1], [1, 0, 1, 0]])
    zeroed = unfinished(zero_rewards=True)
    assert zeroed.rewards == [0.0, 0.5, 0.0, 0.5], "those that repeat it follow"
    assert zeroed.masks[:2] == [[1], [1, 0, 1, 0]]
    masked = unfinished(mask=True)
    assert masked.masks == [[0], [1, 0, 1, 0], [0], [0]]
    assert masked.rewards == [1.0, 0.5, 1.0, 0.5]


def test_a_step_for_which_nothing_came_is_told_by_the_setting_to_change() -> None:
    assert why_nothing_came(["deadline"] * 3 + ["failed"], 7) == (
        "generator.bus.deadline_s: step 7 has no trajectory to learn from (got 3 deadline, 1 failed); "
        "raise it, or see in `rolloutmq status` why no group comes"
    )
    assert why_nothing_came(["refused"], 1).startswith("generator.bus.environments: step 1 has no")
    assert why_nothing_came(["failed"], 1).startswith("generator.bus: step 1 has no")
    assert why_nothing_came(["deadline", "length"], 1) == "", "one came, and SkyRL has masked it"


def test_metrics_have_the_same_names_in_every_call_and_add_up() -> None:
    some = bus_metrics([Answer(group(), staleness=2), Answer(missing=Missing.LOST)], 3)
    assert some["bus/groups"] == 1
    assert some["bus/groups_lost"] == 1
    assert some["bus/masked_trajectories"] == 3
    assert (some["bus/staleness_mean"], some["bus/staleness_max"]) == (2, 2)
    assert some.keys() == bus_metrics([], 0).keys()
    added = [name for name in some if not any(part in name for part in ("avg", "mean", "min", "max"))]
    assert len(added) == len(some) - 2
