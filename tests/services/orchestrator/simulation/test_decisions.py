"""Decisions of a trial: what counts as another one, and its line."""

import pytest

from rolloutmq.services.orchestrator.simulation.decisions import (
    changed_decisions,
    decision_lines,
    kind_of,
)
from rolloutmq.services.orchestrator.simulation.scenarios import all_scenarios


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("hold: want 20.1: demand 40.0/s", "want 19.6: demand 39.0/s; not confirmed yet", True),
        ("want 20.1: demand 40.0/s; starving", "want 20.3: demand 40.0/s", True),
        ("hold: no measurement yet", "hold: want 20.1: demand 40.0/s", False),
        ("want 9.0: x; at most 4 until", "want 9.5: x; at most 8 until", True),
        ("want 9.0: x; at most 4 until", "want 9.5: x; max_workers: at most 4", False),
    ],
)
def test_reasons_of_one_kind_differ_in_numbers(one: str, other: str, *, alike: bool) -> None:
    assert (kind_of(one) == kind_of(other)) is alike


def test_a_change_of_demand_is_a_few_changes_of_the_decision() -> None:
    scenario = next(one for one in all_scenarios(20.0) if one.name == "step")
    found = changed_decisions(scenario, 0)
    assert 4 <= len(found) <= 40
    assert found == changed_decisions(scenario, 0)
    times = [one.at for one in found]
    assert times == sorted(times)
    after = next(one for one in found if one.target > 30)
    assert 600.0 < after.at < 640.0
    assert after.need == 40.0
    assert after.ready < 30
    assert len(list(decision_lines(found))) == len(found)
