"""Groups built from lists and arrays: element types are kept, shapes must agree."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.group import Column, Group, numpy_dtype
from rolloutmq.schemas.wire.envelope import Dtype, PolicyVersion

Rows = list[list[int]]


def build(**more: Any) -> Group:
    given = {"tokens": [[1, 2], [3]], "mask": [[0, 1], [1]], "scores": [0.5, 1.0], **more}
    return Group.build(given.pop("group_id", "g"), **given)


def plain(rows: Any) -> Any:
    """Nested lists of whatever `Column.rows` gives."""
    return [plain(row) for row in rows] if isinstance(rows, list) else np.asarray(rows).tolist()


@given(st.lists(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4), min_size=1, max_size=5))
def test_lists_come_back_as_they_were(rows: Rows) -> None:
    column = Column.build("tokens", rows, 1)
    assert column.dtype is Dtype.I32
    assert plain(column.rows()) == rows


@given(st.lists(st.lists(st.lists(st.floats(width=64), max_size=3), max_size=3), min_size=1, max_size=4))
@settings(deadline=None)
def test_nested_lists_come_back_bit_for_bit(rows: list[list[list[float]]]) -> None:
    column = Column.build("distill_logprobs", rows, 2)
    flat = [value for row in rows for cell in row for value in cell]
    assert column.dtype is Dtype.F64
    assert column.values.tobytes() == np.array(flat, np.float64).tobytes()
    assert [[len(cell) for cell in row] for row in column.rows()] == [
        [len(cell) for cell in row] for row in rows
    ]


@given(st.lists(st.lists(st.booleans(), max_size=4), min_size=1, max_size=4), st.booleans())
def test_lists_and_arrays_of_rows_are_the_same(rows: list[list[bool]], arrays: bool) -> None:
    given = [np.array(row, bool) for row in rows] if arrays else rows
    column = Column.build("mask", given, 1)
    assert column.dtype is (Dtype.BOOL if arrays or any(rows) else Dtype.I32)
    assert plain(column.rows()) == rows


@pytest.mark.parametrize("dtype", [d for d in Dtype if d not in {Dtype.OPAQUE, Dtype.BF16}])
@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_keep_their_type_whatever_their_byte_order_and_strides(dtype: Dtype, order: str) -> None:
    kind = numpy_dtype(dtype).newbyteorder(order)  # type: ignore[arg-type]
    data = np.arange(24).reshape(4, 6).astype(kind)[::2, ::3]
    column = Column.build("mine", data)
    assert column.dtype is dtype
    assert column.values.dtype == numpy_dtype(dtype)
    assert plain(column.rows()) == data.tolist()


def test_types_of_python_numbers() -> None:
    assert Column.build("x", [1, 2]).dtype is Dtype.I32
    assert Column.build("x", [1, 1 << 40]).dtype is Dtype.I64
    assert Column.build("x", [(1 << 64) - 1]).dtype is Dtype.U64
    assert Column.build("x", [1, 0.5]).dtype is Dtype.F64
    assert Column.build("x", [True, False]).dtype is Dtype.BOOL
    assert Column.build("tokens", [[], []], 1).dtype is Dtype.I32


@pytest.mark.parametrize(
    ("data", "depth"),
    [
        ([(1 << 64) - 1, -1], None),
        ([1 << 64], None),
        (["a", "b"], None),
        ([None, 1.0], None),
        ([1j], None),
        ([[1], 2], None),
        ([1, [2]], None),
        ([1, 2], 1),
        ([[1], [2]], 0),
        ([[1], [2]], 2),
        (5, None),
        ([[[[1]]]], None),
        (np.zeros((1, 1, 1, 1)), None),
        (np.array(3), None),
        (np.zeros(3), 1),
        ([np.array([1, 2]), np.array([3])], 2),
        ([np.array([1, 2]), np.array([[3]])], 1),
        ([np.array(["a"])], 1),
    ],
)
def test_what_cannot_be_a_column_is_said(data: Any, depth: int | None) -> None:
    with pytest.raises(InvalidGroupError, match="mine"):
        build(mine=Column.build("mine", data, depth))


@pytest.mark.parametrize(
    ("column", "more"),
    [
        ("tokens", {"tokens": [[1.5, 2.0], [3.0]]}),
        ("tokens", {"tokens": [1, 2]}),
        ("mask", {"mask": [[1], [1]]}),
        ("mask", {"mask": [[0, 1]]}),
        ("scores", {"scores": [[0.5], [1.0]]}),
        ("scores", {"scores": [math.nan, 0.0]}),
        ("scores", {"scores": [0.0, -math.inf]}),
        ("scores", {"scores": [], "tokens": [], "mask": []}),
        ("scores", {"scores": 1.0}),
        ("scores", {"scores": Column(Dtype.BF16, np.array([0x7F80, 0], np.uint16))}),
        ("scores", {"scores": Column.opaque([0.0, 1.0])}),
        ("mask", {"mask": Column.opaque([[0, 1], [1]])}),
        ("inference_logprobs", {"inference_logprobs": [[0.0, 0.0], []]}),
        ("inference_logprobs", {"inference_logprobs": [[0.0]]}),
        ("distill_token_ids", {"distill_token_ids": [[1, 2], [3]]}),
        ("mine", {"mine": [1, 2, 3]}),
        ("mine", {"mine": Column(Dtype.I32, np.zeros(2, np.int64))}),
        ("mine", {"mine": Column(Dtype.I32, np.zeros(2, ">i4"))}),
        ("mine", {"mine": Column(Dtype.I32, np.zeros(2, np.int32), (np.array([1, 2], np.uint32),))}),
        ("mine", {"mine": Column(Dtype.I32, np.zeros(2, np.int32), (np.array([1, 1], np.int64),))}),
        ("Mine", {"Mine": [1, 2]}),
        ("mine-", {"mine-": [1, 2]}),
        ("group_id", {"group_id": "g" * 129}),
        ("group_id", {"group_id": ""}),
        ("group_id", {"group_id": "lone \ud800"}),
        ("group_id", {"group_id": b"g"}),
        ("task", {"task": "t" * 129}),
        ("task", {"task": "\udfff"}),
        ("task", {"task": None}),
        ("oldest", {"oldest": PolicyVersion(0, -1)}),
        ("oldest", {"oldest": PolicyVersion(0, 9), "newest": PolicyVersion(0, 3)}),
        ("oldest", {"oldest": PolicyVersion(1, 3), "newest": PolicyVersion(0, 9)}),
        ("oldest", {"oldest": PolicyVersion(0, 1 << 62 | 1)}),
        ("newest", {"newest": 3}),
        ("started_at", {"started_at": math.nan}),
        ("finished_at", {"finished_at": -math.inf}),
        ("finished_at", {"finished_at": "now"}),
        ("finished_at", {"finished_at": 1 << 64}),
        (r"\*", {f"mine_{index}": [1, 2] for index in range(64)}),
    ],
)  # fmt: skip
def test_what_cannot_be_a_group_is_said_with_its_column(column: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidGroupError, match=f"column {column}"):
        build(**more)


def test_a_changed_group_is_checked_as_a_built_one() -> None:
    with pytest.raises(InvalidGroupError, match="surrogates"):
        replace(build(), group_id="lone \ud800")
    with pytest.raises(InvalidGroupError, match="oldest"):
        replace(build(), oldest=PolicyVersion(0, -1))


def test_a_group_knows_what_is_in_it() -> None:
    group = build(messages=[{"role": "user"}], ref_logprobs=None, oldest=PolicyVersion(1, 2))
    assert (group.sequences, group.tokens) == (2, 3)
    assert group.newest == group.oldest
    assert "messages" in group
    assert "ref_logprobs" not in group
    assert plain(group["tokens"]) == [[1, 2], [3]]
    assert group["messages"] == [{"role": "user"}]
    assert group.scores.tolist() == [0.5, 1.0]
    with pytest.raises(KeyError):
        group["ref_logprobs"]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 2, 6], (3.0, 1.0, 6.0)),
        ([True, False], (0.5, 0.0, 1.0)),
        (np.array([60000, 60000], np.float16), (60000.0, 60000.0, 60000.0)),
        ([1.5e308, 1.5e308], (1.5e308, 1.5e308, 1.5e308)),
        (Column(Dtype.BF16, np.array([0x3F80, 0xBF80], np.uint16)), (0.0, -1.0, 1.0)),
        (np.array([(1 << 64) - 1, 0], np.uint64), (2.0**63, 0.0, 2.0**64)),
    ],
)
def test_rewards_are_summed_up_in_doubles(scores: Any, expected: tuple[float, float, float]) -> None:
    count = len(scores.values) if isinstance(scores, Column) else len(scores)
    rewards = build(scores=scores, tokens=[[1]] * count, mask=[[1]] * count).rewards()
    assert (rewards.mean, rewards.low, rewards.high) == expected


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_the_mean_of_finite_scores_is_finite_and_between_them(scores: list[float]) -> None:
    rows = [[1]] * len(scores)
    rewards = Group.build("g", tokens=rows, mask=rows, scores=scores).rewards()
    slack = 1e-9 * max(abs(rewards.low), abs(rewards.high))
    assert rewards.low - slack <= rewards.mean <= rewards.high + slack


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_the_second_moment_is_that_of_the_scores(scores: list[float]) -> None:
    rows = [[1]] * len(scores)
    rewards = Group.build("g", tokens=rows, mask=rows, scores=scores).rewards()
    assert rewards.m2 == pytest.approx(np.var(scores) * len(scores), rel=1e-9, abs=1e-6)


def test_a_second_moment_that_overflows_is_infinite() -> None:
    assert build(scores=[1.5e308, -1.5e308], tokens=[[1]] * 2, mask=[[1]] * 2).rewards().m2 == math.inf


def test_columns_of_tokens_have_the_lengths_of_the_tokens() -> None:
    rows = [[1, 2], [3]]
    built = Group.build("g", tokens=rows, mask=rows, scores=[0, 1], advantages=rows, mine=rows).columns
    assert built["mask"].lengths is built["advantages"].lengths is built["tokens"].lengths
    assert built["mine"].lengths is not built["tokens"].lengths
    with pytest.raises(InvalidGroupError, match="row 0 has 1 values, tokens has 2"):
        Group.build("g", tokens=rows, mask=[[1], [1, 1]], scores=[0, 1])


def test_in_a_notebook_a_group_is_a_table_of_its_sequences() -> None:
    group = build(group_id="<g>", oldest=PolicyVersion(0, 3), newest=PolicyVersion(0, 4))
    shown = group._repr_html_()
    assert "<caption>Group &lt;g&gt;: 2 sequences, 3 tokens, policy 0.3 to 0.4</caption>" in shown
    assert "<tr><td>0</td><td>0.5</td><td>2</td><td>1</td><td>1 2</td></tr>" in shown
    assert "<tr><td>1</td><td>1</td><td>1</td><td>1</td><td>3</td></tr>" in shown
    assert repr(replace(group, env="add")) == "<Group <g> of add: 2 sequences, 3 tokens, policy 0.3 to 0.4>"
    assert repr(replace(group, env="\x1b[2Ja")).startswith(r"<Group <g> of \u001b[2Ja: ")


def test_in_a_notebook_labels_empty_rows_and_masks_of_any_type_count() -> None:
    group = build(
        tokens=[[7, 8, 9], [], [5]],
        mask=[[-100, 8, 9], [], [-100]],
        scores=Column(Dtype.BF16, np.array([0x3F80, 0, 0], "<u2")),
    )
    shown = group._repr_html_()
    rows = (
        "<td>1</td><td>3</td><td>2</td>",
        "<td>0</td><td>0</td><td>0</td>",
        "<td>0</td><td>1</td><td>0</td>",
    )
    assert all(f"<tr><td>{at}</td>{row}" in shown for at, row in enumerate(rows))


def test_in_a_notebook_a_large_group_stays_small() -> None:
    rows = np.zeros((1000, 500), np.int32)
    group = Group.build("g", tokens=rows, mask=np.ones_like(rows), scores=np.zeros(1000))
    shown = group._repr_html_()
    assert "<p>and 990 more</p>" in shown
    assert len(shown) < 3000
    assert len(repr(group)) < 100
