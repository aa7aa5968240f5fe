"""A small fleet: everything is killed once, and the ledger agrees with the logs of the clients."""

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
