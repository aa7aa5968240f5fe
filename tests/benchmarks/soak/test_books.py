from pathlib import Path

import pytest

from benchmarks.soak.board import Board
from benchmarks.soak.books import Asked, Began, Book, Entry, Got, Saved, Told, read_producer, read_rank


def test_a_producers_book_is_read_back_up_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "p0.2"
    book = Book(path)
    for line in (b"t", b"b0", b"s0", b"b1", b"a0", b"s1"):
        book.line(line)
    book.close()
    with path.open("ab") as torn:
        torn.write(b"a1")
    life = read_producer(path)
    assert (life.producer, life.life, life.built) == ("p0", 2, 2)
    assert (life.sent, life.acked, life.took_over, life.left) == ({0, 1}, {0}, True, False)


def test_a_line_of_another_kind_is_no_line_to_skip(tmp_path: Path) -> None:
    (tmp_path / "p0.0").write_bytes(b"x1\n")
    with pytest.raises(ValueError, match="unknown line"):
        read_producer(tmp_path / "p0.0")


def test_a_ranks_book_is_read_back(tmp_path: Path) -> None:
    entries: list[Entry] = [
        Began(1.0, 0, 4),
        Got(2.0, 1, 7, 0, 5, 2, ("p0.0-1",), torn=("p0.0-1",)),
        Asked(3.0, 1, 7, filtered=("p0.0-1",)),
        Told(4.0, 1, 7, "lost"),
        Saved(5.0, 0, 4),
    ]
    book = Book(tmp_path / "t0.0.0")
    for entry in entries:
        book.note(entry)
    book.close()
    assert read_rank(tmp_path / "t0.0.0") == entries


def test_the_board_keeps_its_numbers_for_all_processes(tmp_path: Path) -> None:
    with Board(tmp_path / "board") as one, Board(tmp_path / "board") as other:
        one.settled(0, 5)
        other.settled(3, 2)
        assert one.total == other.total == 7
        before, one.leave = other.leave, True
        assert (before, other.leave) == (False, True)
    with Board(tmp_path / "board") as later:
        assert later.total == 7
