"""Values at trained tokens: what no trainer could use is refused with its row, whatever stands elsewhere."""

import math
from typing import Any

import numpy as np
import pytest

from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.token_values import LOGPROB_MAX
from rolloutmq.schemas.wire.envelope import Dtype


def build(mask: Any = ((0, 1, 1), (0, 1)), **more: Any) -> Group:
    return Group.build("g", tokens=[[1, 2, 3], [4, 5]], mask=mask, scores=[0.0, 1.0], **more)


@pytest.mark.parametrize("name", ["inference_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("bad", [7.0, 1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_an_impossible_logprob_is_refused_with_its_row(name: str, bad: float, dtype: type) -> None:
    rows: Any = [np.array([-1, -1, -2], dtype), np.array([-1, bad], dtype)]
    with pytest.raises(InvalidGroupError, match=f"column {name}: row 1, token 1: .*got {bad}"):
        build(**{name: rows})


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
@pytest.mark.parametrize("mask", [[[0, 1], [0, 1]], [[-100, 2], [-100, -100]]])
def test_a_negative_token_is_refused_wherever_it_stands(dtype: type, mask: Any) -> None:
    with pytest.raises(InvalidGroupError, match=r"column tokens: row 1, token 1: must be .*\(got -3\)"):
        Group.build("g", tokens=np.array([[1, 2], [3, -3]], dtype), mask=mask, scores=[0, 1])


@pytest.mark.parametrize("bad", [0.5, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_a_mask_that_is_neither_marks_nor_labels_is_refused(bad: float, dtype: type) -> None:
    rows: Any = [np.array([0, 1, 1], dtype), np.array([bad, 1], dtype)]
    with pytest.raises(InvalidGroupError, match=rf"column mask: row 1, token 0: must be .*\(got {bad}\)"):
        build(rows)
    half = np.array([0, 1, 1, 0, 0.5], np.float32).view(np.uint32) >> 16
    with pytest.raises(InvalidGroupError, match=r"column mask: row 1, token 1: must be .*\(got 0.5\)"):
        build(Column(Dtype.BF16, half.astype(np.uint16), (np.array([3, 2], np.uint32),)))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("advantages", math.nan),
        ("advantages", math.inf),
        ("temperatures", math.nan),
        ("temperatures", -0.5),
    ],
)
def test_other_unusable_values_are_refused_with_their_row(name: str, bad: float) -> None:
    rows: Any = [[1.0, 0.5, bad], [1.0, 0.5]]
    with pytest.raises(InvalidGroupError, match=f"column {name}: row 0, token 2"):
        build(**{name: rows})


def test_bfloat16_is_compared_by_its_value() -> None:
    lengths = (np.array([3, 2], np.uint32),)

    def column(*values: float) -> Column:
        bits = (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return Column(Dtype.BF16, bits, lengths)

    build(inference_logprobs=column(-1, -1, -2, -1, -1))
    with pytest.raises(InvalidGroupError, match="row 1, token 1"):
        build(inference_logprobs=column(-1, -1, -2, -1, 7))


@pytest.mark.parametrize("placeholder", [1.0, 7.0, math.nan, -math.inf])
@pytest.mark.parametrize("mask", [((0, 1, 1), (0, 1)), ((-100, 8, 9), (-100, 9)), ((1, 1, 1), (1, 1))])
def test_placeholders_stand_where_nothing_is_trained(placeholder: float, mask: Any) -> None:
    rows = [[placeholder, -1.0, -2.0], [placeholder, -1.0]]
    group = build(mask, inference_logprobs=rows, advantages=rows, ref_logprobs=rows)
    assert group["inference_logprobs"][0][1] == -1.0


def test_values_at_the_bounds_are_taken() -> None:
    build(
        inference_logprobs=[[0.0, LOGPROB_MAX, -1e300], [0.0, -0.0]],
        ref_logprobs=[[0, -1, -2], [0, -3]],
        temperatures=[[0.0, 0.0, 1.0], [2.0, 0.0]],
        advantages=[[1e300, -1e300, 0.0], [3.0, 2.0]],
    )
