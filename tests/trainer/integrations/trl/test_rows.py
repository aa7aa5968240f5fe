"""Groups as rows: tokens stay, masks and log-probabilities follow the mask of the group, and what cannot be is told."""

from typing import Any

import numpy as np
import pytest
from tests.trainer.integrations.trl.support import SIZE, VOCABULARY, group

from rolloutmq import Column, Group
from rolloutmq.trainer.integrations.trl.rows import Demand, PulledGroup, filled, pulled, without_signal
from rolloutmq.trainer.integrations.trl.training import fields
from rolloutmq.trainer.step.collate import Bounds

DEMAND = Demand(SIZE, 1.0, Bounds(VOCABULARY, 16))


def made(**changes: Any) -> Group:
    """A group of two rows, the second with a turn of a tool."""
    given: dict[str, Any] = {
        "tokens": [[3, 4, 5, 6], [3, 4, 7, 8, 9, 10]],
        "mask": [[0, 0, 1, 1], [0, 0, 1, 0, 0, 1]],
        "scores": [0.25, 1.0],
        "inference_logprobs": [[9.0, 9.0, -1.5, -2.5], [9.0, 9.0, -0.5, 7.0, 7.0, -3.5]],
    }
    return Group.build("g", **(given | changes))


def of(one: Group, demand: Demand = DEMAND, staleness: int = 0) -> PulledGroup:
    return pulled(one, staleness, 1, demand._replace(group_size=2))


def test_a_row_is_cut_at_its_first_trained_token() -> None:
    found = of(made(), staleness=3)
    assert (found.group_id, found.rank, found.fault, found.staleness, found.reward) == ("g", 1, "", 3, 0.625)
    assert fields(found.rows) == {
        "prompt_ids": [[3, 4], [3, 4]],
        "completion_ids": [[5, 6], [7, 8, 9, 10]],
        "logprobs": [[-1.5, -2.5], [-0.5, 0.0, 0.0, -3.5]],
        "env_mask": [[1, 1], [1, 0, 0, 1]],
        "bus_score": [0.25, 1.0],
        "bus_staleness": [3, 3],
        "bus_env": ["", ""],
    }


def test_labels_are_a_mask_too() -> None:
    labels = [[-100, -100, 5, 6], [-100, -100, 7, -100, -100, 10]]
    assert fields(of(made(mask=labels)).rows) == fields(of(made()).rows)


def test_the_bits_of_a_float32_stay() -> None:
    """TRL makes float32 of them again."""
    rng = np.random.default_rng(0)
    known = [np.concatenate([[0, 0], -rng.random(n)]).astype(np.float32) for n in (2, 4)]
    rows = of(made(inference_logprobs=known)).rows
    for row, before in zip(rows, known, strict=True):
        assert np.array_equal(np.array(fields([row])["logprobs"][0], np.float32), before[2:] * row.mask)


@pytest.mark.parametrize("tokens", [[3], [3, 4]])
def test_a_sequence_without_a_trained_token_is_in_no_loss(tokens: list[int]) -> None:
    """Its score still counts for the mean of its group."""
    short = made(
        tokens=[[3, 4, 5, 6], tokens],
        mask=[[0, 0, 1, 1], [0] * len(tokens)],
        inference_logprobs=[[0.0, 0.0, -1.0, -1.0], [0.0] * len(tokens)],
    )
    row = of(short).rows[1]
    assert row.prompt.size
    assert row.completion.size
    assert row.mask.tolist() == [0] * len(row.completion)
    assert row.score == 1.0


def test_a_sequence_whose_advantage_is_to_be_zero_is_in_no_loss() -> None:
    rows = of(made(overrides=Column.opaque([{}, {"set_advantage_to_zero": True}]))).rows
    assert [row.mask.tolist() for row in rows] == [[1, 1], [0, 0, 0, 0]]


FAULTS: list[tuple[dict[str, object], str]] = [
    ({"inference_logprobs": None}, "inference_logprobs: required"),
    ({"tokens": [[3, 4, 5, 99], [3, 4, 7, 8, 9, 10]]}, "tokens: ids must be from 0 to 13"),
    ({"mask": [[0] * 4, [0] * 6]}, "mask: no trained token"),
    ({"temperatures": [[0.7] * 4, [0.7] * 6]}, "temperatures: the group was sampled at 0.7, TRL scores at"),
    ({"advantages": [[1.0] * 4, [1.0] * 6]}, "advantages: TRL computes its own and would ignore the column"),
    ({"generation_params": Column.opaque({"top_k": 5})}, "generation_params: "),
]


@pytest.mark.parametrize(("changes", "fault"), FAULTS)
def test_what_trl_cannot_train_on_is_told(changes: dict[str, object], fault: str) -> None:
    columns = {"tokens": made()["tokens"], "mask": made()["mask"], "scores": [0.25, 1.0]}
    known = {"inference_logprobs": made()["inference_logprobs"]}
    given: dict[str, Any] = {
        name: value for name, value in (columns | known | changes).items() if value is not None
    }
    found = of(Group.build("g", **given))
    assert found.fault.startswith(fault)
    assert found.rows == ()


def test_a_group_of_another_size_is_told_with_its_remedy() -> None:
    fault = pulled(made(), 0, 0, DEMAND).fault
    assert fault == (
        "group g: has 2 sequences, num_generations is 4; set environment.NAME.group_size to the same number"
    )


def test_a_temperature_that_trl_scores_at_is_fine() -> None:
    warm = made(temperatures=[[1.0, 1.0, 0.7, 0.7], [1.0, 1.0, 0.7, 1.0, 1.0, 0.7]])
    assert of(warm, DEMAND._replace(temperature=0.7)).fault == ""


def test_filler_has_no_trained_token_and_no_score() -> None:
    rows = filled([pulled(group(0), 0, 0, DEMAND)], SIZE, 3 * SIZE, 2)
    assert len(rows) == 3 * SIZE
    assert fields(rows[SIZE : SIZE + 1]) == {
        "prompt_ids": [[2]],
        "completion_ids": [[2]],
        "logprobs": [[0.0]],
        "env_mask": [[0]],
        "bus_score": [None],
        "bus_staleness": [0],
        "bus_env": [""],
    }


def test_a_group_has_no_signal_if_every_reward_function_gave_its_rows_the_same() -> None:
    nan = float("nan")
    first = [0.3, 0.3, 0.3, 0.3, 0.1, 0.2, 0.1, 0.1, 1.0, nan, 1.0, 1.0]
    assert without_signal([first], 3, 4) == [True, False, True]
    second = [0.0] * 8 + [0.0, 0.0, 0.0, 1.0]
    assert without_signal([first, second], 3, 4) == [True, False, False]
    assert without_signal([[*first, nan, nan, nan, nan]], 3, 4) == [True, False, True]  # filler behind them
