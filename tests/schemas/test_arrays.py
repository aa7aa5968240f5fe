"""Lists to arrays: the result equals numpy's, on the fast path too."""

import enum
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rolloutmq.schemas.arrays import FEW_NUMBERS, plain_numbers
from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.group import Column


class Half(enum.Enum):
    HALF = 0.5


class Five(enum.IntEnum):
    FIVE = 5


class Whole(int): ...


class Real(float): ...


def by_numpy(flat: list[Any]) -> NDArray[Any] | None:
    """What a column of such values has been since there are columns; None if it cannot be."""
    try:
        values = np.array(flat)
    except (ValueError, OverflowError):
        return None
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        return None
    if values.dtype.kind == "f" and all(isinstance(value, int) for value in flat):
        return None
    if values.dtype == np.int64 and values.min() >= -(1 << 31) and values.max() < 1 << 31:
        return values.astype(np.int32)
    return values


def built(rows: Any, depth: int | None = None) -> NDArray[Any] | None:
    try:
        values: NDArray[Any] = Column.build("mine", rows, depth).values
    except InvalidGroupError:
        return None
    return values


def assert_same(one: NDArray[Any] | None, other: NDArray[Any] | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


PLAIN = [
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(-32, 127),
    st.integers(-130, 130),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.sampled_from([-(1 << 31) - 1, -(1 << 31), (1 << 31) - 1, 1 << 31, (1 << 63) - 1, -(1 << 63), 1 << 63, 1 << 64]),
    st.booleans(),
    st.floats(),
    st.floats() | st.integers(-5, 5),
    st.floats() | st.integers((1 << 63) - 2, 1 << 70),
    st.booleans() | st.integers(-5, 5),
    st.booleans() | st.floats(),
]  # fmt: skip
ODD: list[Any] = [
    None, "1", b"1", 1j, Half.HALF, Five.FIVE, Whole(7), Real(0.5), msgspec.Raw(b"\xcb" + bytes(8)),
    msgspec.Raw(b"\xc3"), msgspec.Raw(b"\x01"), np.float64(1.5), np.float32(1.5), np.int8(3), np.int64(3),
    np.bool_(True), np.uint64(1 << 63), [1], (1.0,), [], {}, object(), 1 << 70, -1, 2.5, True, math.nan,
]  # fmt: skip


@given(st.sampled_from(PLAIN).flatmap(lambda kind: st.lists(kind, min_size=1, max_size=40)), st.data())
@settings(max_examples=300, deadline=None)
def test_numbers_are_what_numpy_makes_of_them(numbers: list[Any], data: st.DataObject) -> None:
    flat = numbers * (2 * FEW_NUMBERS // len(numbers) + 1)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(flat)), max_size=4)))
    kind = data.draw(st.sampled_from([list, tuple]))
    rows = [kind(flat[a:b]) for a, b in zip([0, *cuts], [*cuts, len(flat)], strict=True)]
    assert_same(built(rows, 1), by_numpy(flat))
    assert_same(built(flat, 0), by_numpy(flat))


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{type(odd).__name__}-{odd!r:.20}")
@pytest.mark.parametrize("others", [[1, 2], [0.5, 1.5], [True, False], [70_000, 3]], ids=repr)
@pytest.mark.parametrize("at", [0, 1, 300])
def test_one_that_is_of_another_type_counts_as_before(odd: Any, others: list[Any], at: int) -> None:
    flat = others * 150
    flat.insert(at, odd)
    if isinstance(odd, list | tuple | dict):
        assert built([flat], 1) is None
    else:
        assert_same(built([flat], 1), by_numpy(flat))


@pytest.mark.parametrize(
    "odd",
    [Half.HALF, Real(0.5), Five.FIVE, Whole(7), *ODD[8:12]],
    ids=lambda odd: f"{type(odd).__name__}-{odd!r:.20}",
)
def test_a_list_of_nothing_else_counts_as_before(odd: Any) -> None:
    assert_same(built([[odd] * 200], 1), by_numpy([odd] * 200))


@pytest.mark.parametrize("number", [0, 1.5, True, 70_000, 1 << 40])
@pytest.mark.parametrize("length", [FEW_NUMBERS, 65_535, 65_536, 70_000])
def test_rows_of_every_length_are_taken_at_once(number: float, length: int) -> None:
    values = plain_numbers([[number] * length, [], (number,) * length], 2 * length)
    assert values is not None
    assert values.tolist() == [number] * (2 * length)
    assert values.flags.writeable


def test_many_short_rows_are_joined() -> None:
    rows = [[index, index + 1, 1 << 20] for index in range(300)]
    values = plain_numbers(rows, 900)
    assert values is not None
    assert values.tolist() == [number for row in rows for number in row]


@pytest.mark.parametrize(
    "rows",
    [
        [range(200)],
        [np.arange(200)],
        [{index: 1 for index in range(200)}],
        ["1" * 200],
        [[1] * 63],
        [],
        [[]],
        [[0.5] * 100, [1] * 100],
        [[1] * 100, [0.5] * 100],
        [[True] * 100, [1] * 100],
        [[0.5] * 100, [1 << 40] * 100],
        [[1 << 63] * 100],
    ],
    ids=lambda rows: f"{rows!r:.30}",
)
def test_the_rest_is_for_numpy_to_judge(rows: list[Any]) -> None:
    assert plain_numbers(rows, sum(map(len, rows))) is None
