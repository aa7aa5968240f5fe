"""A torn end is left out; damage in the middle is an error."""

import tracemalloc
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from rolloutmq.schemas.errors import DamagedFileError
from rolloutmq.services.monitor.text.jsonl import LINE_LIMIT_BYTES, read_lines, read_whole_lines


class Point(msgspec.Struct):
    """One record."""

    x: int


def read(path: Path, data: bytes) -> list[int]:
    path.write_bytes(data)
    return [point.x for point in read_lines(path, Point)]


def test_missing_file_is_empty(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl", Point)) == []


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", []),
        (b'{"x":1}\n{"x":2}\n', [1, 2]),
        (b'{"x":1}\n{"x":', [1]),
        (b'{"x":1}\n{"x":2}', [1, 2]),
        (b'{"x":1}\n\xff', [1]),
        (b'{"x":1,"y":2}\n', [1]),
    ],
)
def test_last_line_may_be_torn(tmp_path: Path, data: bytes, found: list[int]) -> None:
    assert read(tmp_path / "a.jsonl", data) == found


@pytest.mark.parametrize("data", [b'{"x":1}\n{"x":\n{"x":3}\n', b'{"x":1}\n\n', b'{"x":1}\n{"x":"a"}\n'])
def test_damage_in_the_middle_names_its_line(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DamagedFileError, match=r"a\.jsonl, line 2: "):
        read(tmp_path / "a.jsonl", data)


def test_damaged_lines_are_counted_by_who_can_say_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    damaged: Counter[str] = Counter()
    assert list(read_whole_lines(path, Point, damaged)) == []
    path.write_bytes(b'{"x":1}\n{"x":\n\n\xff\n{"x":3}\n{"x"')
    assert [point.x for point in read_whole_lines(path, Point, damaged)] == [1, 3]
    assert damaged == {"a.jsonl": 3}


@pytest.mark.parametrize("end", [b"\n", b'\n{"x":3}\n', b""])
def test_a_line_without_end_is_damage_and_not_read_whole(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x":1}\n' + b" " * (8 * LINE_LIMIT_BYTES) + end)
    damaged: Counter[str] = Counter()
    tracemalloc.start()
    try:
        found = [point.x for point in read_whole_lines(path, Point, damaged)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found, damaged) == ([1, 3] if end.endswith(b"}\n") else [1], {"a.jsonl": 1})
    assert most < 4 * LINE_LIMIT_BYTES
    with pytest.raises(DamagedFileError, match=r"a\.jsonl, line 2: is longer than 16 MiB"):
        list(read_lines(path, Point))


def test_lines_that_were_added_since_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert read(path, b'{"x":1}\n{"x":2}\n{"x":3}\n') == [1, 2, 3]
    assert [point.x for point in read_lines(path, Point, until=16)] == [1, 2]
    assert [point.x for point in read_lines(path, Point, until=15)] == [1], "its end came later"
