import json
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.harness import results
from benchmarks.harness.row import Row

FIELDS = {"figure", "payload", "ours", "rival", "rival_name", "ratio", "goal", "met"}
ONE = Row("things/s", "some", 4.0, 2.0, "the other", 2.0, None, None)
TWO = replace(ONE, figure="more/s")


def rows(path: Path) -> list[tuple[str, float]]:
    return [(row["figure"], row["ours"]) for row in json.loads(path.read_text())["rows"]]


def test_part_of_the_rows_takes_the_place_of_the_same_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.keep([ONE, TWO], path=path, whole=True)
    results.keep([replace(ONE, ours=5.0)], path=path, whole=False)
    assert rows(path) == [("things/s", 5.0), ("more/s", 4.0)]


def test_all_rows_leave_none_of_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.keep([ONE, TWO], path=path, whole=True)
    results.keep([TWO], path=path, whole=True)
    assert rows(path) == [("more/s", 4.0)]


def test_rows_of_another_machine_do_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.keep([ONE], path=path, whole=True)
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"machine": {"cores": 4096}}))
    results.keep([TWO], path=path, whole=False)
    assert rows(path) == [("more/s", 4.0)]


def test_what_is_kept_in_the_repository_is_well_formed() -> None:
    found = json.loads(results.RESULTS.read_text())
    assert found["machine"].keys() == results.this_machine().keys()
    for row in found["rows"]:
        assert row.keys() >= FIELDS
        assert row.keys() <= {field.name for field in fields(Row)}
        assert (row["goal"] is None) == (row["met"] is None)
