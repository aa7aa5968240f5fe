"""The count of values without decoding: exact for every msgpack value."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.bus.encoding.opaque_columns import (
    DEPTH_LIMIT,
    UNCOUNTED_BYTES,
    VALUES_LIMIT,
    _count,
    check_values,
    encode_opaque,
    require_few,
)
from rolloutmq.schemas.errors import InvalidGroupError, LimitExceededError


def extension(code: int, size: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, bytes(size))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.sampled_from([300, 70_000]).map(lambda n: "x" * n)
    | st.sampled_from([300, 70_000]).map(bytes)
    | st.builds(extension, st.integers(0, 127), st.sampled_from([1, 2, 3, 16, 300, 70_000]))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.integers(0, 1 << 40), inner, max_size=8),
    max_leaves=30,
)


def count(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count(inner) for inner in value.values())
    return 1


@given(VALUES)
def test_every_value_is_counted_once(value: Any) -> None:
    data = encode_opaque("mine", [value] * 17)
    assert _count(memoryview(data), 5) == 5 + 1 + 17 * count(value)


@given(st.binary(max_size=200))
def test_noise_is_counted_somehow(data: bytes) -> None:
    assert _count(memoryview(data), 0) <= len(data)


def test_too_many_values_are_refused_on_both_sides() -> None:
    most = [None] * (VALUES_LIMIT - 1)
    data = encode_opaque("mine", most)
    check_values([data])
    with pytest.raises(LimitExceededError):
        check_values([data, b"\xc0"])
    require_few({"mine": data})
    with pytest.raises(InvalidGroupError, match="mine"):
        require_few({"small": b"\xc0", "mine": data})


def test_small_blocks_are_not_worth_counting() -> None:
    check_values([b"\xc0" * UNCOUNTED_BYTES])


def test_large_strings_are_few_values() -> None:
    check_values([encode_opaque("mine", ["x" * (8 << 20)] * 3)])


@pytest.mark.parametrize(
    "wrap", [lambda inner: [inner], lambda inner: {"a": inner}, lambda inner: (inner, 1)]
)
def test_values_may_be_nested_up_to_the_limit(wrap: Callable[[Any], Any]) -> None:
    value: Any = 0
    for _ in range(DEPTH_LIMIT):
        value = wrap(value)
    assert encode_opaque("x", value)
    with pytest.raises(InvalidGroupError, match="x: must be nested at most 64 levels deep"):
        encode_opaque("x", wrap(value))
    for _ in range(5000):
        value = wrap(value)
    with pytest.raises(InvalidGroupError, match="levels deep"):
        encode_opaque("x", value)
