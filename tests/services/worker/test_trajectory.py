"""Trajectories, and the groups built from them."""

import pickle
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rolloutmq.bus.encoding.codec import decode_group, encode_group, header_of
from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.wire.envelope import Dtype, PolicyVersion
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.trajectory import Trajectory, TurnMismatchError, group_of

V = [PolicyVersion(0, step) for step in range(6)]


def completion(prompt: list[int], sampled: list[int], oldest: int = 0, newest: int = 0) -> Completion:
    return Completion("text", prompt, sampled, [-0.5] * len(sampled), V[oldest], V[newest], "stop")


def test_a_completion_becomes_a_sequence_of_prompt_and_answer() -> None:
    one = Trajectory.of(completion([1, 2, 3], [7, 8], 2, 3), 0.25)
    assert one.token_ids == [1, 2, 3, 7, 8]
    assert one.mask == [False, False, False, True, True]
    assert one.logprobs == [0.0, 0.0, 0.0, -0.5, -0.5]
    assert (one.score, one.oldest, one.newest, one.finish_reason) == (0.25, V[2], V[3], "stop")


def test_a_turn_is_appended_with_what_was_given_between() -> None:
    first = Trajectory.of(completion([1, 2], [7], 3, 4))
    both = first.then(completion([1, 2, 7, 50, 51], [8, 9], 2, 3)).scored(1.0)
    assert both.token_ids == [1, 2, 7, 50, 51, 8, 9]
    assert both.mask == [False, False, True, False, False, True, True]
    assert both.logprobs == [0.0, 0.0, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert (both.oldest, both.newest, both.score) == (V[2], V[4], 1.0)
    assert first.token_ids == [1, 2, 7]


def test_a_group_without_versions_gets_the_one_that_its_worker_knew() -> None:
    """It had version 0, and beyond `max_staleness` steps every group of such an environment expired."""
    plain = Trajectory(token_ids=[1, 2], mask=[False, True], logprobs=[0.0, -0.5], score=0.0)
    group = group_of("w-0/1", [plain, plain])
    header = header_of(group, encode_group(group, 1 << 20), seq=1, position=1, policy=V[4])
    assert (header.oldest, header.newest) == (V[4], V[4])
    some = group_of("w-0/2", [plain, replace(plain, oldest=V[2]), replace(plain, oldest=V[1], newest=V[3])])
    header = header_of(some, encode_group(some, 1 << 20), seq=1, position=1, policy=V[4])
    assert (header.oldest, header.newest) == (V[1], V[3])
    initial = group_of("w-0/3", [replace(plain, oldest=V[0])])
    assert header_of(initial, encode_group(initial, 1 << 20), seq=1, position=1, policy=V[4]).oldest == V[0]
    assert plain.then(completion([1, 2], [7], 3, 4)).oldest == V[3]


def test_a_trajectory_without_versions_has_the_one_its_worker_knew_beside_others() -> None:
    """The group took the versions of the others alone, so it seemed fresher than it was."""
    plain = Trajectory(token_ids=[1, 2], mask=[False, True], logprobs=[0.0, -0.5], score=0.0)
    late = replace(plain, oldest=V[4], newest=V[5])

    def span(*rows: Trajectory) -> tuple[PolicyVersion, PolicyVersion, bool]:
        group = group_of("g", rows, known=V[2])
        return group.oldest, group.newest, group.stamped

    assert span(plain, late) == (V[2], V[5], True)
    assert span(plain, replace(plain, oldest=V[1])) == (V[1], V[2], True)
    assert span(late) == (V[4], V[5], True)
    assert span(replace(plain, newest=V[3])) == (V[2], V[3], True)
    assert span(replace(plain, oldest=V[3])) == (V[3], V[3], True)
    assert not span(plain)[2], "its producer knows it"


def test_a_new_turn_has_no_score_until_it_is_scored() -> None:
    first = Trajectory.of(completion([1, 2], [7]), 0.5)
    both = first.then(completion([1, 2, 7, 50], [8]))
    with pytest.raises(InvalidGroupError, match="sequence 1: must be finite"):
        group_of("g", [first, both])
    assert group_of("g", [first, both.scored(1.0)]).scores.tolist() == [0.5, 1.0]


def test_each_turn_keeps_the_temperature_it_was_sampled_at() -> None:
    cold, warm = (replace(completion([1, 2], [7]), temperature=t) for t in (0.5, 1.0))
    later = completion([1, 2, 7, 50], [8])
    assert Trajectory.of(cold).temperatures == [1.0, 1.0, 0.5]
    assert Trajectory.of(warm).temperatures is None
    assert Trajectory.of(cold).then(later).temperatures == [1.0, 1.0, 0.5, 1.0, 1.0]
    both = Trajectory.of(warm, 0.0).then(replace(later, temperature=2.0))
    assert both.temperatures == [1.0, 1.0, 1.0, 1.0, 2.0]
    group = group_of("g", [both.scored(0.0), Trajectory.of(warm, 0.0)])
    assert [row.tolist() for row in group["temperatures"]] == [[1, 1, 1, 1, 2], [1, 1, 1]]
    plain = Trajectory.of(warm, 0.0)
    assert "temperatures" not in group_of("g", [plain, plain.then(later).scored(0.0)])


@pytest.mark.parametrize("prompt", [[1, 2], [1, 2, 8], [9, 1, 2, 7]])
def test_a_turn_that_rewrites_the_past_is_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidGroupError, match="does not begin with the turns before"):
        Trajectory.of(completion([1, 2], [7])).then(completion(prompt, [8]))


def test_the_first_token_that_differs_is_named_with_the_remedy() -> None:
    with pytest.raises(TurnMismatchError) as caught:
        Trajectory.of(completion([1, 2], [7])).then(completion([1, 2, 8], [8]))
    remedy = (
        "; continue the sampled tokens: policy.complete(text, after=trajectory), or policy.chat(messages, "
        "after=trajectory) with the new messages alone"
    )
    begin = "column tokens: the turn's prompt does not begin with the turns before it: token 2 is "
    assert str(caught.value) == f"{begin}8, was 7{remedy}"
    caught.value.name_tokens({8: " 4", 7: "</s>"})
    assert str(caught.value) == f"{begin}8 ' 4', was 7 '</s>'{remedy}"
    with pytest.raises(TurnMismatchError, match="token 2 is the end, was 7;") as caught:
        Trajectory.of(completion([1, 2], [7])).then(completion([1, 2], [8]))
    assert caught.value.found is None


def test_a_group_is_ragged_and_spans_all_versions() -> None:
    group = group_of(
        "w-0/1",
        [
            Trajectory.of(completion([1, 2, 3], [4], 3, 3), 1.0),
            Trajectory.of(completion([1], [4, 5, 6], 1, 2), 0),
            Trajectory.of(completion([1, 2], [], 2, 5), 0.5),
        ],
        started_at=10.0,
        finished_at=11.5,
    )
    assert [row.tolist() for row in group["tokens"]] == [[1, 2, 3, 4], [1, 4, 5, 6], [1, 2]]
    assert [row.tolist() for row in group["mask"]] == [
        [False] * 3 + [True],
        [False] + [True] * 3,
        [False] * 2,
    ]
    assert group.scores.tolist() == [1.0, 0.0, 0.5]
    assert (group.oldest, group.newest) == (V[1], V[5])
    assert (group.started_at, group.finished_at) == (10.0, 11.5)
    assert (group.sequences, group.tokens) == (3, 10)
    dtypes = {name: column.dtype for name, column in group.columns.items()}
    assert dtypes == {
        "tokens": Dtype.I32,
        "mask": Dtype.BOOL,
        "scores": Dtype.F64,
        "inference_logprobs": Dtype.F32,
        "stop_reasons": Dtype.OPAQUE,
    }
    assert group["stop_reasons"] == ["stop"] * 3


def test_a_group_survives_the_wire() -> None:
    said = [{"role": "user", "content": "hi"}]
    group = group_of(
        "w-0/1",
        [
            Trajectory(
                token_ids=np.array([1, 2]),
                mask=np.array([False, True]),
                logprobs=np.array([0.0, -1.5], np.float32),
                score=2,
                messages=said,
                columns={"ref_logprobs": [0.0, -2.0], "difficulty": 3},
            )
        ],
    )
    encoded = encode_group(group, 1 << 20)
    header = header_of(group, encoded, seq=1, position=encoded.nbytes)
    back = decode_group(header, encoded.table, encoded.frames)
    assert back["tokens"][0].tolist() == [1, 2]
    assert back["inference_logprobs"][0].tolist() == [0.0, -1.5]
    assert back["ref_logprobs"][0].tolist() == [0.0, -2.0]
    assert back["difficulty"] == [3]
    assert back["messages"] == [said]
    assert "stop_reasons" not in back


@pytest.mark.parametrize(
    ("tokens", "mask", "logprobs"),
    [
        ([1, 2], [0, 1], [0, -1]),
        ((1, 2), (False, True), (0.0, -1.0)),
        (np.array([1, 2], np.uint8), np.array([0, 1], np.int8), np.array([0, -1])),
        (np.array([1, 2], np.uint64), np.array([0.0, 1.0], np.float32), np.array([0, -1], np.float16)),
        (array("q", [1, 2]), array("b", [0, 1]), array("d", [0, -1])),
        (range(1, 3), [np.False_, np.True_], [np.float32(0), np.float32(-1)]),
        (torch.tensor([1, 2]), torch.tensor([0.0, 1.0]), torch.tensor([0, -1], dtype=torch.bfloat16)),
    ],
)
def test_rows_are_any_sequence_whose_values_fit(tokens: Any, mask: Any, logprobs: Any) -> None:
    group = group_of("g", [Trajectory(token_ids=tokens, mask=mask, logprobs=logprobs, score=0.0)])
    assert [group[name][0].tolist() for name in ("tokens", "mask", "inference_logprobs")] == [
        [1, 2],
        [False, True],
        [0.0, -1.0],
    ]
    assert [group.columns[name].dtype for name in ("tokens", "mask", "inference_logprobs")] == [
        Dtype.I32,
        Dtype.BOOL,
        Dtype.F32,
    ]


def test_a_placeholder_may_be_beyond_the_type_on_the_wire() -> None:
    group = group_of("g", [sequence(logprobs=[-1e300, -1.0])])
    assert group["inference_logprobs"][0].tolist() == [float("-inf"), -1.0]


def sequence(**changes: Any) -> Trajectory:
    given: dict[str, Any] = {
        "token_ids": [1, 2],
        "mask": [False, True],
        "logprobs": [0.0, -1.0],
        "score": 0.0,
    }
    return Trajectory(**(given | changes))


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (None, "got NoneType"),
        ("text", "got str"),
        (sequence(), "got Trajectory"),
        ([], "got none"),
        ([sequence(), 3], "the list has a int"),
        ([sequence(mask=[True])], "column mask: row 0 has 1 values, tokens has 2"),
        ([sequence(logprobs=[])], "column inference_logprobs: row 0 has 0 values, tokens has 2"),
        ([sequence(token_ids=None)], "column tokens: each row must be a sequence of int32"),
        ([sequence(token_ids=["a", "b"])], "column tokens: each row must be a sequence of int32"),
        ([sequence(token_ids=[1, 1 << 40])], "column tokens: each row must be a sequence of int32"),
        (
            [sequence(token_ids=[1.5, 2.9])],
            "column tokens: each row must be a sequence of int32 (got float64)",
        ),
        ([sequence(token_ids=np.array([1.5, 2.9], np.float32))], "a sequence of int32 (got float32)"),
        ([sequence(token_ids=["1", "2"])], "column tokens: each row must be a sequence of int32"),
        ([sequence(token_ids="12")], "column tokens: each row must be a sequence of int32"),
        ([sequence(token_ids=np.array([1, (1 << 32) + 5]))], "a sequence of int32 (got 4294967301)"),
        ([sequence(token_ids=np.array([1, (1 << 31) + 7], np.uint32))], "of int32 (got 2147483655)"),
        ([sequence(token_ids=[1, -2])], "column tokens: row 0, token 1: must be not negative (got -2)"),
        ([sequence(mask=["False", "True"])], "column mask: each row must be a sequence of bool"),
        ([sequence(mask="01")], "column mask: each row must be a sequence of bool"),
        ([sequence(mask=[0, 2])], "column mask: each row must be a sequence of bool (got 2)"),
        ([sequence(mask=[0.0, 0.5])], "column mask: each row must be a sequence of bool (got 0.5)"),
        ([sequence(mask=[-100, 2])], "column mask: each row must be a sequence of bool (got -100)"),
        ([sequence(mask=[None, True])], "column mask: each row must be a sequence of bool"),
        (
            [sequence(logprobs=["0.0", "-1.0"])],
            "column inference_logprobs: each row must be a sequence of float",
        ),
        (
            [sequence(), sequence(oldest=V[4], newest=V[2])],
            "column oldest: sequence 1: must not be newer than newest 0.2 (got 0.4)",
        ),
        ([sequence(mask=[False, False])], "column mask: no token was sampled"),
        ([sequence(score=float("nan"))], "column scores: sequence 0: must be finite (got nan)"),
        ([sequence(score="good")], "column scores: sequence 0: must be a number (got 'good')"),
        ([sequence(score=None)], "column scores: sequence 0: must be a number (got None)"),
        ([sequence(columns={"a": 1}), sequence()], "different columns"),
    ],
)
def test_nonsense_is_refused_with_what_is_wrong(returned: Any, problem: str) -> None:
    with pytest.raises(InvalidGroupError) as caught:
        group_of("w-0/1", returned)
    assert problem in str(caught.value)


@pytest.mark.parametrize("copied", [False, True])
def test_a_trajectory_without_a_score_is_refused(copied: bool) -> None:
    """NaN that was computed reads the same, so the error says both; a copy of another process has its own NaN."""
    turns = Trajectory.of(completion([1, 2], [7]))
    unscored = pickle.loads(pickle.dumps(turns)) if copied else turns
    problem = (
        r"scores: sequence 1: must be finite \(got nan\); the score is NaN, or there is none: "
        r"end the trajectory with `\.scored\(reward\)`"
    )
    for given in (unscored, turns.scored(float("nan"))):
        with pytest.raises(InvalidGroupError, match=problem):
            group_of("g", [turns.scored(0.5), given])
    with pytest.raises(InvalidGroupError, match=r"sequence 0: must be finite \(got inf\)$"):
        group_of("g", [turns.scored(float("inf"))])
