from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from tests.trainer.toy import some_group

from rolloutmq.schemas.envelope import Dtype
from rolloutmq.schemas.trajectory import Column
from rolloutmq.trainer.collate import Bounds, Example, MicroBatch, collate, find_fault, trained_tokens

BOUNDS = Bounds(vocabulary=32, positions=16)


def examples(count: int = 3) -> list[Example]:
    made = []
    for number in range(count):
        group = some_group(f"g{number}", [0.0, 1.0, 0.5, 0.25], seed=7)
        made.append(Example(group, np.arange(4, dtype=np.float32) + 10 * number))
    return made


def one_by_one(given: list[Example]) -> list[tuple[Any, ...]]:
    """What a batch is, told in the slowest way: (prefix, token, logprob, advantage) of each trained token."""
    told = []
    for example in given:
        group = example.group
        rows = zip(
            group["tokens"], group["mask"], group["inference_logprobs"], example.advantages, strict=True
        )
        for tokens, mask, logprobs, advantage in rows:
            told += [
                (*tokens[:t].tolist(), "->", int(tokens[t]), float(logprobs[t]), float(advantage))
                for t in range(1, len(tokens))
                if mask[t]
            ]
    return sorted(told, key=repr)


def read_back(passes: list[MicroBatch]) -> list[tuple[Any, ...]]:
    told = []
    for one in passes:
        columns = (one.rows, one.positions, one.old_logprobs, one.advantages)
        for row, t, logprob, advantage in zip(*(c.tolist() for c in columns), strict=True):
            told.append((*one.tokens[row, :t].tolist(), "->", int(one.tokens[row, t]), logprob, advantage))
    return sorted(told, key=repr)


@pytest.mark.parametrize("size", [1, 2, 5, 11, 12, 64])
def test_every_trained_token_arrives_with_its_prefix_and_worth(size: int) -> None:
    given = examples()
    assert read_back(collate(given, size)) == one_by_one(given)


def test_passes_are_bounded_and_only_as_wide_as_they_must_be() -> None:
    given = examples(8)
    lengths = sorted(int(n) for e in given for n in e.group.columns["tokens"].lengths[0])
    passes = collate(given, 8)
    assert [one.tokens.shape[0] for one in passes] == [8, 8, 8, 8]
    assert [one.tokens.shape[1] for one in passes] == lengths[7::8]


def test_types() -> None:
    (one,) = collate(examples(), 64)
    assert one.tokens.dtype == one.rows.dtype == one.positions.dtype == torch.int64
    assert one.old_logprobs.dtype == one.advantages.dtype == torch.float32
    assert int(one.positions.min()) >= 1


def test_rows_without_a_trained_token_are_read_for_nothing_and_may_be_empty() -> None:
    tokens = [[1, 2, 3], [], [4, 5]]
    group = some_group(
        "g",
        [0, 1, 2],
        tokens=tokens,
        mask=[[1, 1, 1], [], [0, 0]],
        inference_logprobs=[[0.0, -1, -2], [], [0.0, 0]],
    )
    assert find_fault(group, BOUNDS) == ""
    given = [Example(group, np.array([5, 6, 7], np.float32))]
    for size in (1, 2, 3):
        passes = collate(given, size)
        assert sorted(p for one in passes for p in one.positions.tolist()) == [1, 2]
        assert {a for one in passes for a in one.advantages.tolist()} == {5.0}


@pytest.mark.parametrize(
    "mask",
    [
        [[False, False, True], [True, True]],
        [[0, 0, 1], [1, 1]],
        [[0.0, 0.0, 1.0], [1.0, 1.0]],
        [[-100, -100, 0], [7, 8]],  # labels: a token id of 0 is trained
    ],
)
def test_masks_of_every_kind(mask: list[list[Any]]) -> None:
    group = some_group(
        "g", [0, 1], tokens=[[5, 6, 0], [7, 8]], mask=mask, inference_logprobs=[[0.0] * 3, [0.0] * 2]
    )
    before = group.columns["mask"].values.copy()
    assert trained_tokens(group).tolist() == [False, False, True, False, True]
    assert_array_equal(group.columns["mask"].values, before)


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({}, ""),
        (
            {"inference_logprobs": None},
            "no inference_logprobs: nothing tells how far the policy has moved since",
        ),
        ({"tokens": [[1, 2, 32], [4, 5]]}, "a token id outside 0 to 31"),
        ({"tokens": [[1, -2, 3], [4, 5]]}, "a token id outside 0 to 31"),
        ({"mask": [[0, 0, 0], [1, 0]]}, "no token is trained"),
        (
            {"inference_logprobs": [[0, 0, float("nan")], [0.0, 0.0]]},
            "an inference_logprob of a trained token is not finite",
        ),
        ({"inference_logprobs": [[float("nan"), 0, -1.0], [0.0, 0.0]]}, ""),
        ({"inference_logprobs": [[0, 0, 1], [2, 3]]}, ""),
    ],
)
def test_faults_are_named(columns: dict[str, Any], fault: str) -> None:
    good: dict[str, Any] = {
        "tokens": [[1, 2, 3], [4, 5]],
        "mask": [[0, 1, 1], [0, 1]],
        "inference_logprobs": [[0.0, -1.0, -2.0], [0.0, -1.0]],
    }
    assert find_fault(some_group("g", [0, 1], **(good | columns)), BOUNDS) == fault


def test_a_sequence_that_the_policy_cannot_take_is_a_fault() -> None:
    n = BOUNDS.positions + 1
    group = some_group(
        "g", [0, 1], tokens=[[1] * n, [2]], mask=[[1] * n, [1]], inference_logprobs=[[0.0] * n, [0.0]]
    )
    assert find_fault(group, BOUNDS) == "a sequence of 17 tokens, the policy takes 16"


def test_columns_of_any_element_type() -> None:
    def bf16(rows: list[list[float]]) -> Column:
        flat = np.array([value for row in rows for value in row], np.float32)
        lengths = np.array([len(row) for row in rows], np.uint32)
        return Column(Dtype.BF16, (flat.view(np.uint32) >> 16).astype("<u2"), (lengths,))

    group = some_group(
        "g",
        [0, 1],
        tokens=[np.array([5, 6, 7], np.uint16), np.array([7, 8], np.uint16)],
        mask=bf16([[0, 0, 1], [0, 1]]),
        inference_logprobs=bf16([[0, 0, -0.5], [0, -1.25]]),
    )
    assert find_fault(group, BOUNDS) == ""
    (one,) = collate([Example(group, np.array([1, 2], np.float32))], 8)
    assert one.old_logprobs.tolist() == [-0.5, -1.25]
    assert one.advantages.tolist() == [1, 2]
