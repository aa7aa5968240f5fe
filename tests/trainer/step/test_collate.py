from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.trainer.support.toy import some_group

from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.wire.envelope import Dtype
from rolloutmq.trainer.step.collate import Bounds, Example, MicroBatch, collate, find_fault

BOUNDS = Bounds(vocabulary=32, positions=16)


def per_token(group: Group, values: Any) -> NDArray[np.float32]:
    """One value a sequence, for each of its tokens."""
    return np.asarray(values, np.float32).repeat(group.columns["tokens"].lengths[0])


def examples(count: int = 3) -> list[Example]:
    made = []
    for number in range(count):
        group = some_group(f"g{number}", [0.0, 1.0, 0.5, 0.25], seed=7)
        made.append(Example(group, per_token(group, np.arange(4) + 10 * number), staleness=number))
    return made


def one_by_one(given: list[Example]) -> list[tuple[Any, ...]]:
    """What a batch is, told in the slowest way: (prefix, token, logprob, advantage, staleness) of a trained token."""
    told = []
    for example in given:
        group, stale = example.group, example.staleness
        rows = zip(group["tokens"], group["mask"], group["inference_logprobs"], strict=True)
        worth = iter(example.advantages.tolist())
        for tokens, mask, logprobs in rows:
            advantages = [next(worth) for _ in tokens]
            told += [
                (*tokens[:t].tolist(), "->", int(tokens[t]), float(logprobs[t]), advantages[t], stale)
                for t in range(1, len(tokens))
                if mask[t]
            ]
    return sorted(told, key=repr)


def read_back(passes: list[MicroBatch]) -> list[tuple[Any, ...]]:
    told = []
    for one in passes:
        columns = (one.rows, one.positions, one.behaviour_logprobs, one.advantages, one.staleness)
        for row, t, *values in zip(*(c.tolist() for c in columns), strict=True):
            start = 0 if one.position_ids is None else t - int(one.position_ids[row, t])
            told.append((*one.tokens[row, start:t].tolist(), "->", int(one.tokens[row, t]), *values))
    return sorted(told, key=repr)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [1, 10, 24, 40, 1000])
def test_every_trained_token_arrives_with_its_prefix_and_worth(size: int, pack: bool) -> None:
    given = examples()
    assert read_back(collate(given, size, pack=pack)) == one_by_one(given)


def test_passes_are_bounded_and_only_as_wide_as_they_must_be() -> None:
    given = examples(8)
    lengths = sorted((int(n) for e in given for n in e.group.columns["tokens"].lengths[0]), reverse=True)
    passes = collate(given, 64, pack=False)
    assert len(passes) > 1
    assert all(one.tokens.numel() <= 64 for one in passes)
    firsts = np.cumsum([0, *(one.tokens.shape[0] for one in passes)])
    assert [one.tokens.shape[1] for one in passes] == [lengths[first] for first in firsts[:-1]]
    assert firsts[-1] == len(lengths)


@pytest.mark.parametrize("pack", [False, True])
def test_temperatures_stay_with_their_tokens_and_are_one_where_nobody_says_so(pack: bool) -> None:
    plain, other = examples(2)
    told = other.group["inference_logprobs"]  # any number that tells the tokens apart
    warm = some_group("g1", [0.0, 1.0, 0.5, 0.25], seed=7, temperatures=[1 - row for row in told])
    passes = collate([plain, Example(warm, other.advantages, staleness=1)], 24, pack=pack)
    assert len(passes) > 1
    for one in passes:
        assert one.temperatures is not None
        expected = torch.where(one.staleness == 1, 1 - one.behaviour_logprobs, 1.0)
        torch.testing.assert_close(one.temperatures, expected)
    assert all(one.temperatures is None for one in collate([plain, other], 24, pack=pack))


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_that_is_none_is_a_fault_at_trained_tokens_only(value: float) -> None:
    mask = some_group("g", [0, 1])["mask"]
    for spoilt, fault in ((True, "temperatures: must be above 0 at trained tokens"), (False, "")):
        rows = [[value if bool(m) == spoilt else 1.0 for m in row] for row in mask]
        assert find_fault(some_group("g", [0, 1], temperatures=rows), BOUNDS) == fault


def test_types() -> None:
    (one,) = collate(examples(), 1000)
    assert one.tokens.dtype == one.rows.dtype == one.positions.dtype == torch.int64
    assert one.behaviour_logprobs.dtype == one.advantages.dtype == torch.float32
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
    given = [Example(group, per_token(group, [5, 6, 7]))]
    for size in (1, 2, 3):
        passes = collate(given, size)
        assert sorted(p for one in passes for p in one.positions.tolist()) == [1, 2]
        assert {a for one in passes for a in one.advantages.tolist()} == {5.0}


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({}, ""),
        (
            {"inference_logprobs": None},
            "inference_logprobs: required to correct for the policy's age",
        ),
        ({"tokens": [[1, 2, 32], [4, 5]]}, "tokens: ids must be from 0 to 31"),
        ({"mask": [[0, 0, 0], [1, 0]]}, "mask: no trained token"),
        (
            {"inference_logprobs": [[0, 0, float("nan")], [0.0, 0.0]]},
            "inference_logprobs: must be finite at trained tokens",
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


def test_a_negative_id_is_a_fault() -> None:
    """`Group.build` refuses it; a producer without this package may send it."""
    group = some_group(
        "g",
        [0, 1],
        tokens=[[1, 2, 3], [4, 5]],
        mask=[[0, 1, 1], [0, 1]],
        inference_logprobs=[[0.0, -1.0, -2.0], [0.0, -1.0]],
    )
    group.columns["tokens"].values[1] = -2
    assert find_fault(group, BOUNDS) == "tokens: ids must be from 0 to 31"


def test_a_sequence_that_the_policy_cannot_take_is_a_fault() -> None:
    n = BOUNDS.positions + 1
    group = some_group(
        "g", [0, 1], tokens=[[1] * n, [2]], mask=[[1] * n, [1]], inference_logprobs=[[0.0] * n, [0.0]]
    )
    assert find_fault(group, BOUNDS) == "tokens: a sequence has 17, the policy takes 16"


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
    (one,) = collate([Example(group, per_token(group, [1, 2]))], 8)
    assert one.behaviour_logprobs.tolist() == [-0.5, -1.25]
    assert one.advantages.tolist() == [1, 2]
    assert one.sequences.tolist() == [0, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_no_sequence_is_cut(size: int) -> None:
    given = examples()
    passes = collate(given, size)
    for one in passes:
        assert one.sequences.max() < one.sequence_count <= size
    assert sum(one.judged_sequences for one in passes) == 12
    lengths = [n for one in passes for n in torch.bincount(one.sequences).tolist() if n]
    masks = [row for example in given for row in example.group["mask"]]
    assert sorted(lengths) == sorted(int(row[1:].sum()) for row in masks)


def two_sequences(**columns: Any) -> Group:
    """A group of three tokens and of two, the first of each untrained."""
    return some_group(
        "g",
        [0, 1],
        tokens=[[5, 6, 7], [8, 9]],
        mask=[[0, 1, 1], [0, 1]],
        inference_logprobs=[[0.0] * 3, [0.0] * 2],
        **columns,
    )


def test_further_columns_are_carried_to_the_tokens_they_are_of() -> None:
    group = two_sequences(
        ref_logprobs=[[0.0, -1, -2], [0.0, -3]],
        distill_token_ids=[[[1], [2, 3], [4]], [[5], [6, 7, 8]]],
        distill_logprobs=[[[0.0], [-0.5, -1], [-2.0]], [[0.0], [-1.0, -2, -3]]],
    )
    names = ("ref_logprobs", "distill_token_ids", "distill_logprobs")
    assert find_fault(group, Bounds(32, 16, names)) == ""
    (one,) = collate([Example(group, per_token(group, [1, 2]))], 8, names)
    order = one.columns["ref_logprobs"].argsort(descending=True)
    assert one.columns["ref_logprobs"][order].tolist() == [-1, -2, -3]
    assert one.columns["distill_token_ids"][order].tolist() == [[2, 3, -1], [4, -1, -1], [6, 7, 8]]
    rest = -float("inf")
    assert one.columns["distill_logprobs"][order].tolist() == [
        [-0.5, -1, rest],
        [-2, rest, rest],
        [-1, -2, -3],
    ]


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (None, "ref_logprobs: required by the loss"),
        ([[0.0, float("nan"), -1], [0.0, -1]], "ref_logprobs: must be finite at trained tokens"),
        ([[float("nan"), 0.0, -1], [0.0, -1]], ""),
    ],
)
def test_columns_that_the_loss_needs_are_asked_for(rows: Any, fault: str) -> None:
    group = two_sequences(ref_logprobs=rows)
    assert find_fault(group, Bounds(32, 16, ("ref_logprobs",))) == fault


def test_cells_of_other_lengths_than_the_tokens_are_a_fault() -> None:
    group = two_sequences(distill_logprobs=[[[0.0]], [[0.0]]])
    fault = "distill_logprobs: lengths differ from those of tokens"
    assert find_fault(group, Bounds(32, 16, ("distill_logprobs",))) == fault


def test_what_only_a_teacher_speaks_of_is_told_apart() -> None:
    group = some_group("g", [0.0, 1.0])
    quiet = some_group("q", [1.0, 1.0])
    flat = [Example(group, per_token(group, [1, -1])), Example(quiet, per_token(quiet, [0, 0]), judged=False)]
    passes = collate(flat, 1000)
    alone = collate(flat[:1], 1000)
    assert sum(int(one.judged.sum()) for one in passes) == sum(one.rows.numel() for one in alone)
    assert sum(one.judged_sequences for one in passes) == sum(one.judged_sequences for one in alone)
