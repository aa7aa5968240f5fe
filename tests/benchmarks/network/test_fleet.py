"""A small fleet: everything is killed once, and the ledger agrees with the logs of the clients."""

from dataclasses import replace
from itertools import cycle

import pytest

from benchmarks.network import fleet


@pytest.mark.extended
def test_a_fleet_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "STEADY_S", 2.0)
    monkeypatch.setattr(fleet, "RATE", 50.0)
    monkeypatch.setattr(fleet, "KILLED", 1)
    found = fleet.measured(2, 20)
    assert found.problems == 0
    assert found.accepted > 40 * (2 + fleet.KILLED)
    assert found.growth < 1.2
    assert len(found.replaced_s) == fleet.KILLED


@pytest.mark.parametrize(("problems", "met"), [(0, True), (1, False)])
def test_one_contradiction_of_the_ledger_in_any_round_is_told(
    monkeypatch: pytest.MonkeyPatch, problems: int, met: bool
) -> None:
    made = fleet.Round(1, 1, 1, 1, 1, 1, 1, 1, [1.0], [1.0], 1, 1, 1, 1, accepted=700)
    rounds = cycle([made, made, made, replace(made, problems=problems), made, made])
    monkeypatch.setattr(fleet, "measured", lambda *_: next(rounds))
    last = list(fleet.rows())[-1]
    assert (last.ours, last.rival, last.met) == (problems, 4200, met)
