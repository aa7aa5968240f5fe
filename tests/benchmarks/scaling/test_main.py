from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling import cells
from rolloutmq.services.orchestrator.simulation.comparison import compared
from rolloutmq.services.orchestrator.simulation.scenarios import all_scenarios
from rolloutmq.services.orchestrator.simulation.site import Scenario


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Shorten the scenarios, and return a list of how many each call measures."""
    measured: list[int] = []

    def shortened(start_s: float) -> list[Scenario]:
        return [
            replace(one, changes=(100.0,), lasts_s=200.0) if one.name == "step" else one
            for one in all_scenarios(start_s)
        ]

    def counted(scenarios: list[Scenario], *others: Any) -> Iterator[Any]:
        measured.append(len(scenarios))
        return compared(scenarios, *others)

    monkeypatch.setattr(scaling, "all_scenarios", shortened)
    monkeypatch.setattr(scaling, "compared", counted)
    return measured


def test_what_this_law_was_measured_on_is_not_measured_again(
    short: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    words = ["step", "--start", "2", "--seeds", "2", "--out", str(path)]
    code = scaling.main(words)
    (cell,) = cells.load(path).values()
    assert (cell.key, cell.seeds, code) == ((2.0, "step", "tool"), 2, int(bool(cell.broken)))
    assert "0 of 1 scenarios are measured" in capsys.readouterr().out

    scaling.main(words)
    scaling.main([*words, "--seeds", "1"])
    assert capsys.readouterr().out.count("1 of 1 scenarios are measured") == 2
    scaling.main([*words, "--seeds", "3"])
    monkeypatch.setattr(cells, "law", lambda: "another")
    scaling.main([*words, "--seeds", "3"])
    assert short == [1, 0, 0, 1, 1]


def test_what_exceeds_a_bound_is_told_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    words = ["step", "--start", "2", "--seeds", "1", "--out", str(path)]
    scaling.main(words)
    (cell,) = cells.load(path).values()
    cells.save(
        [cells.Cell(cell.start_s, cell.scenario, cell.env, 1, cell.law, ("waste",), cell.bounds)], path
    )
    capsys.readouterr()
    assert scaling.main(words) == 1
    *_, count, last = capsys.readouterr().out.splitlines()
    assert count == "0 cells keep their bounds, 1 do not"
    assert last.startswith("OVER  step (tool), start 2 s: waste ")


def test_an_unknown_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        scaling.main(["stepp"])
    assert "unknown scenario (got 'stepp'); use one of 'start', 'step'" in capsys.readouterr().err
