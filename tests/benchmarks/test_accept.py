import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import accept
from benchmarks.row import Row

ONE = Row("things/s", "some", 4.0, 2.0, "the other", 2.0, 3.0, met=False)


def test_each_row_with_a_goal_is_told_by_what_its_goal_bounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        ONE,
        replace(ONE, bound="ratio, at most", met=True),
        replace(ONE, bound="ours, at most"),
        replace(ONE, goal=None, met=None),
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}))
    monkeypatch.setattr(accept, "RESULTS", path)
    told = [(figure.value, figure.bound, figure.met) for figure in accept.measured_rows()]
    assert told == [
        (2.0, ">= 3, the other", False),
        (2.0, "<= 3, the other", True),
        (4.0, "<= 3, the other", False),
    ]
