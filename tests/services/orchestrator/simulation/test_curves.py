from pathlib import Path

import pytest

from rolloutmq.services.orchestrator.simulation.curves import MOST_POINTS, csv_curve, curve
from rolloutmq.services.orchestrator.simulation.series import Series


def given(value: object) -> Series:
    return curve(value, Path(), 0.0, 100.0)


def test_a_curve_is_a_number_points_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "demand.csv").write_text("seconds,demand\n100,1\n\n110.5,2,ignored\n")
    assert given(40) == Series((0.0,), (40.0,))
    assert given([[0, 1], [10, 2.5]]) == Series((0.0, 10.0), (1.0, 2.5))
    assert given({"points": [[0, 1], [10, 2]], "lines": True}) == Series((0.0, 10.0), (1.0, 2.0), True)
    assert curve({"csv": "demand.csv"}, tmp_path, 0.0, 9.0) == Series((0.0, 10.5), (1.0, 2.0))
    assert csv_curve(tmp_path / "demand.csv", 0.0, 9.0, is_linear=True).is_linear


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (True, "must be a number, points"),
        ("40", "must be a number, points"),
        ([], "must be a number, points"),
        (float("nan"), r"must be 0 to 100 \(got nan\)"),
        (float("inf"), r"must be 0 to 100 \(got inf\)"),
        (-1, r"must be 0 to 100 \(got -1\)"),
        (10**400, "must be 0 to 100 "),
        ([40, 50], r"point 1 must be \[seconds, value\] \(got 40\)"),
        ([[0, 1], [1, 2, 3]], "point 2 must be"),
        ([[0, 1], [1, "2"]], "point 2 must be"),
        ([[0, 1], [1, 101]], r"point 2 must be 0 to 100 \(got 101\)"),
        ([[0, 1], [float("nan"), 2]], "point 2 must be 0 to 1e"),
        ([[-1, 1]], "point 1 must be 0 to 1e"),
        ([[0, 1], [5, 2], [5, 3]], r"point 3: seconds must increase \(got 5 after 5\)"),
        ([[at, 1] for at in range(MOST_POINTS + 1)], "at most 100000 points"),
        ({}, r"needs either points or csv \(got neither\)"),
        ({"points": [[0, 1]], "csv": "a"}, "needs either points or csv"),
        ({"points": [[0, 1]], "line": True}, "unknown key line; allowed: points, csv, lines"),
        ({"points": [[0, 1]], "lines": 1}, "lines must be true or false"),
        ({"csv": 3}, "csv must be a path"),
        ({"csv": "missing.csv"}, "missing.csv: cannot be read: No such file"),
        ({"csv": "."}, "cannot be read"),
        ({"csv": "/dev/zero"}, "cannot be read"),
    ],
)
def test_a_curve_that_makes_no_sense_is_refused(value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        given(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no rows; give at least one of seconds and a value"),
        ("seconds,demand\n", "has no rows"),
        ("a,b\n1,x\n", r"line 2 must be seconds and a value \(got '1,x'\)"),
        ("1\n2\n", "line 1 must be"),
        ("1,2\nseconds,value\n", "line 2 must be"),
        ("1,2\n1,3\n", "seconds must increase"),
        ("2,1\n1,1\n", "point 2 must be 0 to 1e"),
        ("1,-2\n3,4\n", "must be 0 to 100"),
        ("1,nan\n3,4\n", "must be 0 to 100"),
        ("1,2\nnan,4\n", "point 2 must be 0 to 1e"),
        ("1,2\n1e300,4\n", "point 2 must be 0 to 1e"),
        ('1,2\n3,"' + 200_000 * "4", "field larger"),
        (5_000_001 * "1\n", "is larger than 10000000 bytes"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ValueError, match=problem) as caught:
        csv_curve(tmp_path / "bad.csv", 0.0, 100.0)
    assert str(caught.value).startswith(str(tmp_path / "bad.csv"))
    assert len(str(caught.value)) < 400


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_bytes(b"1,2\n\xff\xfe,3\n")
    with pytest.raises(ValueError, match="cannot be read"):
        csv_curve(tmp_path / "bad.csv", 0.0, 100.0)
