"""A group of the bus as prompts and responses."""

from typing import Any

import numpy as np

from rolloutmq import Group
from rolloutmq.trainer.integrations.task_feed.sequences import sampled_sequences


def group(**changes: Any) -> Group:
    given: dict[str, Any] = {
        "tokens": [[1, 2, 3, 4], [1, 2]],
        "mask": [[0, 1, 0, 1], [0, 1]],
        "scores": [1.0, 0.5],
        "inference_logprobs": [[0.0, -0.5, -9.0, -0.25], [0.0, -1.0]],
        **changes,
    }
    return Group.build("g", **{name: value for name, value in given.items() if value is not None})


def test_a_sequence_is_cut_at_its_first_sampled_token() -> None:
    long, short = sampled_sequences(group(stop_reasons=["length", ""]))
    assert (long.prompt.tolist(), long.response.tolist()) == ([1], [2, 3, 4])
    assert long.mask.tolist() == [True, False, True]
    assert np.array_equal(long.logprobs, [-0.5, 0.0, -0.25]), "0 where nothing was sampled"
    assert (long.score, long.stop_reason) == (1.0, "length")
    assert (short.response.tolist(), short.stop_reason) == ([2], "stop")
    assert long.usable
    assert short.usable


def test_what_cannot_be_trained_on_is_all_prompt() -> None:
    (unsampled, other), unrated = (
        sampled_sequences(group(mask=[[0] * 4, [0, 1]])),
        sampled_sequences(group(inference_logprobs=None)),
    )
    assert not unsampled.usable
    assert unsampled.prompt.tolist() == [1, 2, 3, 4]
    assert other.usable
    assert not any(one.usable for one in unrated)


def test_labels_are_a_mask() -> None:
    long, short = sampled_sequences(
        group(
            mask=[[-100, -100, 3, 4], [-100, 2]], inference_logprobs=[[-9.0, -9.0, -0.5, -0.25], [0.0, -1.0]]
        )
    )
    assert (long.prompt.tolist(), long.response.tolist()) == ([1, 2], [3, 4])
    assert (long.mask.tolist(), long.logprobs.tolist()) == ([True, True], [-0.5, -0.25])
    assert (short.prompt.tolist(), short.response.tolist()) == ([1], [2])


def test_a_marked_first_token_is_prompt_because_nothing_predicts_it() -> None:
    long, short = sampled_sequences(group(mask=[[1, 1, 0, 1], [1, 0]]))
    assert (long.prompt.tolist(), long.response.tolist()) == ([1], [2, 3, 4])
    assert long.mask.tolist() == [True, False, True]
    assert not short.usable, "no other token is marked"
