"""Groups as verl's keys, fields and tags, and the prompts of a batch; without verl."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.integrations.verl.played import SIZE, columns, sequence

from rolloutmq import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.trainer.integrations.verl.prompts import Prompt, Sampling, content_key, prompts_of
from rolloutmq.trainer.integrations.verl.rows import Status, trajectories

OTHER_MASKS = [sequence(7, place)[1] for place in range(1, SIZE)]


def prompt(uid: str = "u", size: int = SIZE, **fields: Any) -> Prompt:
    return Prompt(uid, {"uid": uid, "raw_prompt": [{"content": "7"}], **fields}, size, 5)


def group(**changes: Any) -> Group:
    given = columns(7) | changes
    return Group.build(
        "g7",
        **{name: value for name, value in given.items() if value is not None},
        oldest=PolicyVersion(1, 3),
        newest=PolicyVersion(1, 4),
    )


def test_tokens_masks_logprobs_and_scores_are_exact() -> None:
    found = trajectories(group(), prompt(index=7))
    assert found.keys == [f"u_{place}_0" for place in range(SIZE)]
    assert (found.missing, found.status) == (0, Status.FINISHED)
    for place, (fields, tag) in enumerate(zip(found.fields, found.tags, strict=True)):
        tokens, mask, logprobs, score = sequence(7, place)
        start, length = mask.index(1), len(tokens) - mask.index(1)
        assert fields["prompts"].tolist() == tokens[:start]
        assert fields["responses"].tolist() == tokens[start:]
        assert fields["response_mask"].tolist() == fields["loss_mask"].tolist() == mask[start:]
        assert fields["input_ids"].tolist() == tokens
        assert fields["position_ids"].tolist() == list(range(len(tokens)))
        assert (
            fields["rollout_log_probs"].numpy().tobytes()
            == np.asarray(logprobs[start:], np.float32).tobytes()
        )
        assert fields["rm_scores"].tolist() == [0.0] * (length - 1) + [score]
        assert (fields["num_turns"], fields["session_id"], fields["index"]) == (4, place, 7)
        assert fields["extra_fields"]["group_id"] == "g7"
        assert tag == {
            "status": "success",
            "prompt_len": start,
            "response_len": length,
            "seq_len": len(tokens),
            "global_steps": 5,
            "min_global_steps": 3,
            "max_global_steps": 4,
        }


def test_the_parts_of_a_score_are_found_by_their_names() -> None:
    """verl's filter of groups reads them, such as by `algorithm.filter_groups.metric=acc`."""
    scores = columns(7)["scores"]
    [first, *_] = trajectories(group(), prompt()).fields
    assert first["extra_fields"]["reward_extra_info"] == {"acc": scores[0], "score": scores[0]}
    own = group(
        metric_acc=[0.0, 1.0, 1.0, 0.0],
        seq_reward=[1, 2, 3, 4],
        ref_logprobs=columns(7)["inference_logprobs"],
        ratings=[[0.5, 1.0]] * 3 + [[0.25, 2.0]],
        raters=[{"near": 0.5, "short": -1.0}] * SIZE,
    )
    found = [one["extra_fields"]["reward_extra_info"] for one in trajectories(own, prompt()).fields]
    assert found[1] == {"acc": 1.0, "score": scores[1], "seq_reward": 2.0, "near": 0.5, "short": 1.0}
    assert [one["acc"] for one in found] == [0.0, 1.0, 1.0, 0.0]
    assert found[3]["near"] == 0.25


@settings(deadline=None)
@given(st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=8))
def test_single_precision_log_probabilities_keep_their_bits(values: list[float]) -> None:
    rated = np.asarray([0.0, *values], np.float32)
    built = Group.build(
        "g",
        tokens=[[1] * len(rated)],
        mask=[[0] + [1] * len(values)],
        scores=[0.5],
        inference_logprobs=[rated],
    )
    [fields] = trajectories(built, prompt(size=1)).fields
    assert fields["rollout_log_probs"].numpy().tobytes() == rated[1:].tobytes()


def test_a_token_that_was_not_sampled_has_log_probability_0() -> None:
    built = Group.build(
        "g", tokens=[[1, 2, 3]], mask=[[0, 1, 0]], scores=[1.0], inference_logprobs=[[-9.0, -1.0, -9.0]]
    )
    [fields] = trajectories(built, prompt(size=1)).fields
    assert fields["rollout_log_probs"].tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "size", "sessions"),
    [
        ({"inference_logprobs": None}, SIZE, []),
        ({"mask": [[0] * len(sequence(7, 0)[0]), *OTHER_MASKS]}, SIZE, [1, 2, 3]),
        ({"mask": [[1] + [0] * (len(sequence(7, 0)[0]) - 1), *OTHER_MASKS]}, SIZE, [1, 2, 3]),
        ({}, SIZE + 1, [0, 1, 2, 3]),
    ],
    ids=["no log-probabilities", "nothing sampled", "only the first marked", "short"],
)  # fmt: skip
def test_a_prompt_with_missing_trajectories_is_a_failure(
    changes: dict[str, Any], size: int, sessions: list[int]
) -> None:
    found = trajectories(group(**changes), prompt(size=size))
    assert [int(key.split("_")[1]) for key in found.keys] == sessions
    assert (found.missing, found.status) == (size - len(sessions), Status.FAILURE)


def test_trajectories_beyond_those_that_verl_asked_for_are_left_out() -> None:
    found = trajectories(group(), prompt(size=2))
    assert found.keys == ["u_0_0", "u_1_0"]
    assert found.status is Status.FINISHED


def test_a_batch_is_divided_into_its_prompts() -> None:
    rows = [
        {"uid": "a", "raw_prompt": [{"content": "1"}], "global_steps": 3, "__rollout_n__": None},
        {
            "uid": "b",
            "raw_prompt": [{"content": "2"}],
            "global_steps": 3,
            "__rollout_n__": 9,
            "__do_sample__": False,
        },
    ]
    sampling = Sampling(4, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}), Sampling(2, {"temperature": 0.5})
    first, second = prompts_of(rows, *sampling)
    assert first.payload["sampling_params"] == {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    assert second.payload["sampling_params"] == {"temperature": 0, "top_p": 1.0, "top_k": -1}
    assert (first.uid, first.size, first.step) == ("a", 4, 3)
    assert (first.partition, first.split) == ("train", Split.TRAIN)
    assert (second.uid, second.size, second.fields["raw_prompt"]) == ("b", 9, [{"content": "2"}])
    held_out = prompts_of([{**one, "validate": True} for one in rows], *sampling)
    assert held_out[1].payload["sampling_params"] == {"temperature": 0.5}
    assert (held_out[0].size, held_out[0].partition, held_out[0].split) == (2, "val", Split.EVAL)
    assert "validate" not in held_out[0].fields


def test_tasks_of_the_same_content_are_the_same_whatever_their_uid() -> None:
    one = prompt("a", index=np.int64(3), array=np.arange(2))
    again = Prompt("b", {**one.fields, "uid": "b", "global_steps": 9}, 2, 9)
    other = prompt("a", index=4, array=np.arange(2))
    assert one.payload == {
        "uid": "a",
        "raw_prompt": [{"content": "7"}],
        "index": 3,
        "array": [0, 1],
        "sampling_params": {},
    }
    assert content_key(one.task("t")) == content_key(again.task("t")) != content_key(other.task("t"))
    assert one.task("t") != again.task("t")
    long = Prompt("u" * 200, one.fields, 1, 1)
    assert len(long.task("n" * 40)) < 120
