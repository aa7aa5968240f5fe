from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling import cells
from benchmarks.scaling.cells import SEEDS, Cell, CellBound
from rolloutmq.services.orchestrator.simulation.comparison import compared
from rolloutmq.services.orchestrator.simulation.scenarios import all_scenarios
from rolloutmq.services.orchestrator.simulation.verdict import Bound, Verdict

STEP = next(one for one in all_scenarios(2.0) if one.name == "step")


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    (found,) = compared([replace(STEP, changes=(100.0,), lasts_s=200.0)], 2, ["rolloutmq"])
    return found


def test_a_cell_has_all_bounds_and_their_figures(verdict: Verdict) -> None:
    cell = Cell.of(verdict)
    assert (cell.key, cell.seeds, cell.law) == ((2.0, "step", "tool"), 2, cells.law())
    assert list(cell.bounds) == [one.name for one in verdict.bounds]
    waste = next(one for one in verdict.bounds if one.name == "waste")
    assert cell.bounds["waste"].median == pytest.approx(waste.median, rel=1e-4)
    assert cell.bounds["waste"].worst_limit == pytest.approx(waste.worst_limit, rel=1e-4)


@pytest.mark.parametrize(
    ("bound", "part"),
    [
        (CellBound(4.0, 6.0, 8.0, 12.0, "most"), 0.5),
        (CellBound(4.0, 15.0, 8.0, 12.0, "most"), 1.25),
        (CellBound(0.0, 0.0, 0.0, 0.0, "most"), 0.0),
        (CellBound(0.0, 1.0, 0.0, 0.0, "most"), float("inf")),
        (CellBound(1.0, 0.5, 0.97, 0.0, "least"), 0.97),
        (CellBound(2.0, 2.0, 4.0, 4.0, "least"), 2.0),
    ],
)
def test_the_part_of_a_bound_is_above_one_where_it_is_exceeded(bound: CellBound, part: float) -> None:
    assert bound.part == part


def test_a_cell_tells_what_it_exceeds_or_what_comes_nearest(verdict: Verdict) -> None:
    bounds = (
        Bound("flips", 3.0, 3.0, 6.0, 9.0),
        Bound("engines", 1.0, 1.0, 1.0, 1.0, is_least=True),
        Bound("waste", 0.2, 0.3, 0.25, 0.375, "x"),
    )
    assert Cell.of(replace(verdict, bounds=bounds)).told == ("waste",)
    assert Cell.of(replace(verdict, bounds=bounds, broken=("flips",))).told == ("flips",)


def test_results_are_read_as_written_and_those_of_unknown_scenarios_are_left_out(
    verdict: Verdict, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    assert cells.load(path) == {}
    one, other = Cell.of(verdict), Cell.of(replace(verdict, scenario="no such"))
    cells.save([other, one], path)
    assert cells.load(path) == {one.key: one}
    assert len(path.read_text().splitlines()) == 3


def test_only_the_present_law_with_enough_seeds_is_measured(
    verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, path = Cell.of(replace(verdict, seeds=SEEDS)), tmp_path / "results.json"
    cells.save([cell], path)

    def told() -> dict[str, bool]:
        figures = [one for one in cells.promised(path) if one.scenario == "simulated 2 s"]
        assert all(one.met is False for one in figures if one.name != "step (tool)")
        (figure,) = (one for one in figures if one.name == "step (tool)")
        return {str(figure.value): figure.met}

    assert told() == {f"{cell.bounds[cell.told[0]].part:.2f}": True}
    cells.save([Cell.of(replace(verdict, seeds=SEEDS, broken=("waste",)))], path)
    assert told() == {f"{cell.bounds['waste'].part:.2f}": False}
    cells.save([Cell.of(verdict)], path)
    assert told() == {"not measured": False}
    cells.save([cell], path)
    monkeypatch.setattr(cells, "law", lambda: "another")
    assert told() == {"not measured": False}


def test_comments_and_docstrings_do_not_change_the_law() -> None:
    told = '"""A module."""\nX = 1  # one\n"""Its docstring."""\ndef f() -> int:\n    """Return it."""\n    return X\n'
    bare = "X = 1\n\n\ndef f() -> int:\n    return X\n"
    assert cells._code(told) == cells._code(bare)
    assert cells._code(bare) != cells._code(bare.replace("1", "2"))
