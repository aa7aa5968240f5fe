"""Separators are counted as a decoder would find them, and pieces are the whole."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.group import Column
from rolloutmq.services.gateway.web import json_pieces
from rolloutmq.services.gateway.web.json_pieces import (
    Separators,
    elements,
    fields,
    number_column,
    separators_of,
)

values = st.recursive(
    st.none() | st.integers() | st.text('"\\[]{},: a\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[a', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def counted(value: Any) -> Separators:
    """Count by walking through the decoded value."""
    if isinstance(value, dict):
        inner = [counted(one) for one in value.values()]
        own = Separators(1, len(value) + max(0, len(value) - 1))
    elif isinstance(value, list):
        inner = [counted(one) for one in value]
        own = Separators(1, max(0, len(value) - 1))
    else:
        return Separators(0, 0)
    return Separators(*map(sum, zip(own, *inner, strict=True)))


@pytest.fixture(params=[2, 3, 1 << 20])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "_CHUNK_BYTES", request.param)


whatever = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.usefixtures("_chunks")
@whatever
@given(value=values)
def test_the_exact_count_is_that_of_a_decoder(value: Any) -> None:
    assert separators_of(json.dumps(value).encode(), exact=True) == counted(value)


@given(value=values)
def test_the_quick_count_is_never_less(value: Any) -> None:
    quick = separators_of(json.dumps(value).encode(), exact=False)
    assert all(one >= other for one, other in zip(quick, counted(value), strict=True))


@pytest.mark.usefixtures("_chunks")
@whatever
@given(value=st.lists(values, max_size=4), indent=st.sampled_from([None, 0, 3]))
def test_the_elements_are_those_of_the_list(value: list[Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    assert [json.loads(bytes(one)) for one in elements(b"\n" + text + b"  ", "body")] == value


def test_any_amount_of_white_space_around_a_member_is_cut_off() -> None:
    for space in (b" ", b" \n\r\t" * 1024, b"\t" * 4096, b" " * 4097):
        found = elements(
            space + b"[" + space + b"1" + space + b"," + space + b"[2]" + space + b"]" + space, "x"
        )
        assert list(map(bytes, found)) == [b"1", b"[2]"]
        assert elements(b"[" + space + b"]", "x") == []


def test_letters_that_resemble_brackets_are_none() -> None:
    assert list(map(bytes, elements(b"[Y,_,y,\x7f,[Y]]", "x"))) == [b"Y", b"_", b"y", b"\x7f", b"[Y]"]


@pytest.mark.usefixtures("_chunks")
@whatever
@given(value=st.dictionaries(st.text('"\\[:,a', max_size=3), values, max_size=4))
def test_the_fields_are_those_of_the_map(value: dict[str, Any]) -> None:
    found = fields(json.dumps(value).encode())
    assert {name: json.loads(bytes(text)) for name, text in found.items()} == value


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"1",
        b"[",
        b"]",
        b"[1",
        b"[1]]",
        b"[1],[2]",
        b"[1}",
        b'["]',
        b"{",
        b"{1}",
        b'{"a"}',
        b'{"a":1}}',
    ],
)
def test_a_text_that_is_no_list_or_map_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        elements(text, "body")
    with pytest.raises(msgspec.MsgspecError):
        fields(text)


@pytest.mark.parametrize(
    "text", [b"[" + b"{}," * 70_000 + b"{}]", b"[" + b"0," * 70_000 + b"0]", b"[" + b"[] " * 300_000 + b"]"]
)
def test_more_elements_than_are_of_use_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidGroupError, match="members"):
        elements(text, "body")


@pytest.mark.parametrize("piece_bytes", [1, 5, 1 << 16])
@pytest.mark.parametrize("depth", [1, 2])
@given(data=st.data())
def test_a_column_from_pieces_is_that_of_the_lists(data: st.DataObject, depth: int, piece_bytes: int) -> None:
    numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-100, 100)
    inner = st.lists(numbers, max_size=5)
    rows = data.draw(st.lists(inner if depth == 1 else st.lists(inner, max_size=4), max_size=4))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_pieces, "PIECE_BYTES", piece_bytes)
        made = number_column("mask", json.dumps(rows).encode(), int, depth, 1 << 20)
    whole = Column.build("mask", rows, depth)
    assert made.dtype == whole.dtype
    np.testing.assert_array_equal(made.values, whole.values)
    for one, other in zip(made.lengths, whole.lengths, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("blank", ["", "  \n"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_comma_without_a_value_is_refused_wherever_the_pieces_end(
    monkeypatch: pytest.MonkeyPatch, depth: int, blank: str
) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", 4)
    one = "1" if depth == 1 else "[1]"
    for count in range(1, 12):
        values = ",".join([one] * count)
        assert (
            number_column("mask", f"[[{values}{blank}]]".encode(), int, depth, 1 << 20).values.size == count
        )
        for row in (f"{values},{blank}", f"{values},{blank * 4},{one}", f"{blank * 4},{values}"):
            with pytest.raises(msgspec.DecodeError, match="malformed"):
                number_column("mask", f"[[{row}]]".encode(), int, depth, 1 << 20)


def test_integers_without_a_common_type_are_refused() -> None:
    with pytest.raises(InvalidGroupError, match="64-bit"):
        number_column("mask", b"[[1, -1], [9223372036854775808]]", int, 1, 1 << 20)


def test_more_rows_than_sequences_are_refused() -> None:
    with pytest.raises(InvalidGroupError, match="members"):
        number_column("mask", b"[" + b"[]," * 70_000 + b"[]]", int, 1, 1 << 20)
