import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import accept
from benchmarks.harness.row import Row

ONE = Row("things/s", "some", 4.0, 2.0, "the other", 2.0, 3.0, met=False)


def promises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **rows: int) -> None:
    """Promise so many rows of each figure."""
    path = tmp_path / "promises.toml"
    listed = [f'{{ figure = "{figure}", rows = {least} }}' for figure, least in rows.items()]
    path.write_text(f"row = [{', '.join(listed)}]")
    monkeypatch.setattr(accept, "PROMISES", path)


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
    promises(monkeypatch, tmp_path)
    told = [(figure.value, figure.bound, figure.met) for figure in accept.measured_rows()]
    assert told == [
        (2.0, ">= 3, the other", False),
        (2.0, "<= 3, the other", True),
        (4.0, "<= 3, the other", False),
    ]


def test_a_figure_that_was_never_measured_is_unmet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [replace(ONE, figure=name, goal=None, met=None) for name in ("once", "twice", "twice")]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}))
    monkeypatch.setattr(accept, "RESULTS", path)
    promises(monkeypatch, tmp_path, once=2, twice=2, never=1)
    told = [(figure.name, figure.value, figure.bound, figure.met) for figure in accept.measured_rows()]
    assert told == [("once, rows", 1, ">= 2, measured", False), ("never, rows", 0, ">= 1, measured", False)]


def test_a_scenario_that_cannot_be_played_is_unmet_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(accept, "VLLM", tmp_path / "bin" / "python")
    (one,) = (scenario for scenario in accept.SCENARIOS if scenario.name == "vllm")
    (figure,) = accept.play(one, tmp_path)
    assert (figure.value, figure.met) == ("not played", False)
    assert "does not exist; install `rolloutmq[vllm]`" in figure.bound
    assert "`make .venv-vllm/.installed`" in figure.bound


def test_the_run_with_vllm_is_judged_by_its_reward_and_its_time() -> None:
    fine = {
        f"groups_{state}": 0
        for state in ("trained", "filtered", "expired", "dead", "in_flight", "discarded", "lost", "accepted")
    }
    fine |= {"groups_trained_twice": 0, "staleness_max": 0, "staleness_bound": 2}

    def unmet(**told: float) -> list[str]:
        summary = {**fine, "reward_last": 0.9, "wall_s": 600.0, **told}
        return [one.name for one in accept.learned_with_vllm("vllm", summary) if not one.met]

    assert unmet() == []
    assert unmet(reward_last=0.89) == ["reward_last"]
    assert unmet(wall_s=601.0) == ["wall_s"]


def test_tests_inside_of_foreign_software_are_run_by_its_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(accept, "THEIR_PYTHON", {"tests/inside": python})
    names = ["tests/inside/test_a.py::test_b", "tests/outside.py"]
    own, rival = accept.runs_of_tests(names)
    assert [name in own for name in names] == [True, True]
    assert [name in rival for name in names] == [False, True]
    python.touch()
    *_, inside = accept.runs_of_tests(names)
    assert inside == [str(python), "-m", "pytest", "-m", "rival", names[0]]


def test_every_promise_is_made_once() -> None:
    told = tomllib.loads(accept.PROMISES.read_text())
    said = [promise["says"] for promise in told["promise"]]
    assert sorted(set(said)) == sorted(said)
    figures = [row["figure"] for row in told["row"]]
    assert sorted(set(figures)) == sorted(figures)


def test_a_promise_may_name_a_test_a_file_or_a_folder(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuite><testcase classname="tests.a.test_b" name="test_c[1]"/>'
        '<testcase classname="tests.d.test_e" name="test_f"><failure/></testcase></testsuite>'
    )
    passed = accept._passed([report])
    named = ("tests/a/test_b.py::test_c", "tests/a/test_b.py", "tests/a")
    assert [passed(name) for name in named] == [True] * 3
    assert not any(map(passed, ("tests/d/test_e.py::test_f", "tests/d", "tests", "tests/never")))
