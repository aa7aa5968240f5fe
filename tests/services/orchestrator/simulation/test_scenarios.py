"""The law on every scenario, and what scenarios are."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from rolloutmq.services.orchestrator.simulation.comparison import compared
from rolloutmq.services.orchestrator.simulation.scenarios import STARTS_S, all_scenarios, traced
from rolloutmq.services.orchestrator.simulation.series import constant, lines, steps

NORMAL_S: Final = 20.0
SEEDS: Final = 3


def cases() -> Iterator[Any]:
    for start_s in STARTS_S:
        for one in all_scenarios(start_s):
            marks = [] if start_s == NORMAL_S else [pytest.mark.extended]
            yield pytest.param(one, id=f"{one.name}-{start_s:g}", marks=marks)


@pytest.mark.parametrize("scenario", list(cases()))
def test_the_law_keeps_its_bounds(scenario: Any) -> None:
    found = list(compared([scenario], SEEDS, ["rolloutmq"]))
    assert {one.env: one.broken for one in found if one.broken} == {}


def test_scenarios_have_names_and_end_after_their_last_change() -> None:
    for start_s in STARTS_S:
        scenarios = all_scenarios(start_s)
        assert len({one.name for one in scenarios}) == len(scenarios)
        for one in scenarios:
            assert one.counts_from_s + 60.0 < one.lasts_s <= 8000.0
            assert one.start_s == start_s
            for change in one.changes:
                before, after = (
                    [one.site.need(env, change + shift) for env in one.site.environments]
                    for shift in (-1.0, 1.0)
                )
                returns = any(change == end for _, end in one.site.trainer.away)
                has_lost = any(worker.lost for worker in one.site.environments.values())
                assert before != after or returns or has_lost, f"{one.name} at {change:g} s"


def test_a_trace_begins_with_enough_workers_and_counts_from_its_first_change() -> None:
    one = traced("mine", steps((0.0, 10.0), (50.0, 10.0), (100.0, 30.0), (400.0, 30.0)), 5.0)
    assert (one.counts_from_s, one.lasts_s, one.start_s, one.changes) == (100.0, 400.0, 5.0, ())
    (worker,) = one.site.environments.values()
    assert worker.ready == 5
    assert traced("flat", lines((0.0, 9.0), (60.0, 9.0)), 5.0).counts_from_s == 0.0
    assert traced("one", constant(9.0), 5.0).lasts_s == 0.0
