"""The record is read once as it grows, whatever happens to the file."""

import os
from pathlib import Path

import pytest

from rolloutmq.services.dashboard.record import record_file
from rolloutmq.services.dashboard.record.record_file import LINE_LIMIT_BYTES, RecordFile


class Reader:
    """What one reader got."""

    def __init__(self, path: Path) -> None:
        self.lines: list[bytes] = []
        self.begun = 0
        self.file = RecordFile(path, self.lines.append, self._begin)

    def _begin(self) -> None:
        self.lines.clear()
        self.begun += 1

    def read(self) -> list[bytes]:
        while not self.file.apply(self.file.fetch()):
            pass
        return self.lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def reader(path: Path) -> Reader:
    return Reader(path)


def test_each_line_once_as_it_grows(path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "PART_BYTES", 7)
    assert reader.read() == []
    for part, whole in (
        (b"one\ntw", [b"one"]),
        (b"o\n", [b"one", b"two"]),
        (b"\n\nthree\n", [b"one", b"two", b"three"]),
    ):
        with path.open("ab") as file:
            file.write(part)
        assert reader.read() == whole
    assert reader.begun == 0
    assert reader.file.offset == reader.file.size == path.stat().st_size


def test_a_file_that_shrank_or_was_replaced_is_read_again(path: Path, reader: Reader) -> None:
    path.write_bytes(b"a\nb\n")
    reader.read()
    path.write_bytes(b"c\n")
    assert reader.read() == [b"c"]
    other = path.with_name("other")
    other.write_bytes(b"d\ne\nf\n")
    other.replace(path)
    assert reader.read() == [b"d", b"e", b"f"]
    path.unlink()
    assert reader.read() == []
    path.write_bytes(b"g\n")
    assert reader.read() == [b"g"]
    assert reader.begun == 3


def test_a_line_without_end_costs_bounded_memory(path: Path, reader: Reader) -> None:
    with path.open("wb") as file:
        file.write(b"one\n")
        for _ in range(8):
            file.write(b"x" * LINE_LIMIT_BYTES)
        file.write(b"\ntwo\n")
    assert reader.read() == [b"one", b"two"]
    assert reader.file.long_lines == 1


def test_what_is_no_file_is_a_problem_and_ends_nothing(path: Path, reader: Reader) -> None:
    path.mkdir()
    assert reader.read() == []
    assert "metrics.jsonl" in reader.file.problem
    path.rmdir()
    os.mkfifo(path)
    assert reader.read() == []
    assert reader.file.problem
    path.unlink()
    path.write_bytes(b"one\n")
    assert reader.read() == [b"one"]
    assert reader.file.problem == ""
