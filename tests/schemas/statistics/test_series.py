"""Series stay bounded, keep what they fold, and tell a reader exactly what changed."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.schemas.statistics.series import Fold, Series, SeriesBook

COLUMNS = {"mean": Fold.MEAN, "low": Fold.LOW, "high": Fold.HIGH, "last": Fold.LAST, "sum": Fold.SUM}


def added(series: Series, t: float, value: float | None, version: int) -> None:
    series.add(t, dict.fromkeys(COLUMNS, value), version)


def columns(series: Series) -> dict[str, list[float | None]]:
    change = series.since(-1)
    assert change is not None
    assert change.since == 0
    return change.columns


def test_a_row_folds_its_bucket() -> None:
    series = Series(COLUMNS)
    for version, value in enumerate((4.0, 1.0, 7.0), 1):
        added(series, 100.2 + version / 10, value, version)
    assert columns(series) == {
        "t": [100.4],
        "mean": [4.0],
        "low": [1.0],
        "high": [7.0],
        "last": [7.0],
        "sum": [12.0],
    }


def test_a_long_run_has_few_rows_that_keep_their_folds() -> None:
    series = Series(COLUMNS, limit=16)
    for second in range(1000):
        added(series, 5000.0 + second, float(second), second + 1)
        assert len(series) <= 16
    found = columns(series)
    assert series.width_s == 64.0
    assert sum(value or 0 for value in found["sum"]) == sum(range(1000))
    assert found["low"][0] == 0
    assert found["high"][-1] == found["last"][-1] == 999
    assert all(a < b for a, b in pairwise(t or 0 for t in found["t"]))


def test_a_pause_of_years_costs_no_row() -> None:
    series = Series(COLUMNS, limit=8)
    for version, t in enumerate((1.0, 2.0, 1e9, 1e9 + 1, 2e9), 1):
        added(series, t, 1.0, version)
    assert len(series) == 5
    assert series.width_s == 1.0


def test_what_is_no_time_or_no_number_is_left_out() -> None:
    series = Series(COLUMNS)
    for t in (float("nan"), float("inf"), -1.0, 1e300):
        added(series, t, 1.0, 1)
    assert len(series) == 0
    for value in (None, float("nan"), float("-inf")):
        added(series, 1.0, value, 2)
    assert columns(series)["mean"] == [None]


def test_a_clock_that_was_set_back_counts_in_the_last_bucket() -> None:
    series = Series(COLUMNS)
    added(series, 100.0, 1.0, 1)
    added(series, 50.0, 3.0, 2)
    assert columns(series)["sum"] == [4.0]
    assert columns(series)["t"] == [100.0]


def test_a_reader_that_is_up_to_date_gets_nothing() -> None:
    series = Series(COLUMNS)
    added(series, 1.0, 1.0, 7)
    assert series.since(7) is None
    change = series.since(6)
    assert change is not None
    assert change.columns["t"] == [1.0]


@given(
    st.lists(st.tuples(st.floats(0, 400), st.floats(-1e6, 1e6), st.booleans()), max_size=120),
    st.integers(2, 12),
)
def test_the_parts_a_reader_gets_make_the_whole(steps: list[tuple[float, float, bool]], limit: int) -> None:
    series = Series(COLUMNS, limit=limit)
    seen, known = 0, {name: list[float | None]() for name in ("t", *COLUMNS)}
    for version, (gap, value, reads) in enumerate(steps, 1):
        added(series, 1000.0 + gap * version, value, version)
        assert len(series) <= limit
        if reads and (change := series.since(seen)) is not None:
            for name, values in change.columns.items():
                known[name][change.since :] = values
            seen = version
            assert known == columns(series)


def test_a_book_bounds_its_keys() -> None:
    book = SeriesBook({"a": {"x": Fold.MEAN}, "b": {"x": Fold.SUM}}, keys=2)
    for key in ("one", "two", "three", "one"):
        book.add("a", key, 10.0, {"x": 1.0})
    book.add("b", "", 10.0, {"x": 2.0})
    told: list[dict[str, Any]] = book.since(-1)
    assert [(one["name"], one["key"]) for one in told] == [("a", "one"), ("a", "two"), ("b", "")]
    version = book.version
    assert book.since(version) == []
    book.add("b", "", 11.0, {"x": 3.0})
    (change,) = book.since(version)
    assert (change["name"], change["from"], change["columns"]["x"]) == ("b", 1, [3.0])
