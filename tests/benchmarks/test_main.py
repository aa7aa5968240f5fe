from collections.abc import Iterator

import pytest

from benchmarks import __main__ as bench
from benchmarks.__main__ import Part
from benchmarks.harness import results
from benchmarks.harness.row import Row

ONE = Row("things/s", "some", 4.0, 2.0, "the other", 2.0, 3.0, met=False)


def test_a_part_without_its_rival_is_left_out_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {
        "here": Part(lambda: iter([ONE])),
        "away": Part(lambda: iter([ONE, ONE]), lambda: "it is not there"),
    }
    kept: list[Row] = []
    assert bench.measured(parts, kept.append) == ([ONE], ["away"])
    assert kept == [ONE]
    assert "away skipped: it is not there" in capsys.readouterr().out


def test_a_part_that_there_is_not_is_refused() -> None:
    assert bench.main(["nothing"]) == 2


@pytest.mark.parametrize(("skipped", "whole"), [(False, True), (True, False)])
def test_rows_of_what_is_left_out_stay(monkeypatch: pytest.MonkeyPatch, skipped: bool, whole: bool) -> None:
    kept = []
    monkeypatch.setattr(bench, "PARTS", {"one": Part(lambda: iter([ONE]), lambda: "away" if skipped else "")})
    monkeypatch.setattr(results, "keep", lambda rows, *, whole: kept.append((list(rows), whole)))
    assert bench.main([]) == int(not skipped)
    assert kept == [([], False)] if skipped else [([ONE], False), ([ONE], whole)]


def test_a_row_outlives_the_error_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[Row]:
        yield ONE
        raise ZeroDivisionError

    kept = []
    monkeypatch.setattr(bench, "PARTS", {"one": Part(rows)})
    monkeypatch.setattr(results, "keep", lambda rows, *, whole: kept.append((list(rows), whole)))
    with pytest.raises(ZeroDivisionError):
        bench.main([])
    assert kept == [([ONE], False)]
