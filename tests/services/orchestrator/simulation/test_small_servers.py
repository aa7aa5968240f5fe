"""The law on servers that the first few workers fill: these are measured while they already slow one another."""

from typing import Any

import pytest

from rolloutmq.services.orchestrator.simulation.comparison import compared
from rolloutmq.services.orchestrator.simulation.scenarios import ENV
from rolloutmq.services.orchestrator.simulation.series import constant
from rolloutmq.services.orchestrator.simulation.site import (
    EnvironmentSite,
    Scenario,
    ServerSite,
    Site,
    TrainerSite,
)

PACE: float = 2.0
SEEDS = 3


def cases() -> list[Any]:
    long = [pytest.mark.extended]
    return [
        pytest.param(workers, times, start_s, rollout_s, marks=[] if (workers, times) == (4, 6) else long)
        for workers, times, start_s, rollout_s in (
            (2, 2, 20.0, 0.0),
            (2, 6, 60.0, 0.0),
            (3, 4, 20.0, 0.0),
            (4, 6, 20.0, 0.0),
            (4, 2, 2.0, 0.0),
            (4, 2, 20.0, 10.0),
            (6, 4, 20.0, 0.0),
            (8, 4, 120.0, 0.0),
        )
    ]


@pytest.mark.parametrize(("workers", "times", "start_s", "rollout_s"), cases())
def test_the_law_finds_the_few_workers_that_fill_a_server(
    workers: int, times: int, start_s: float, rollout_s: float
) -> None:
    """The trainer demands several `times` what the server makes with so many workers."""
    (found,) = compared([small(workers, times, start_s, rollout_s)], SEEDS, ["rolloutmq"])
    assert found.broken == (), [one for one in found.bounds if not one.is_kept]


@pytest.mark.parametrize(
    ("workers", "times", "start_s", "rollout_s"),
    [
        pytest.param(4, 2, 60.0, 0.0),
        pytest.param(8, 4, 20.0, 0.0, marks=pytest.mark.extended),
        pytest.param(4, 4, 20.0, 10.0, marks=pytest.mark.extended),
    ],
)
def test_chance_in_few_groups_makes_no_fleet_grow_on_a_full_server(
    workers: int, times: int, start_s: float, rollout_s: float
) -> None:
    """Groups come at random times: 24 of them tell a throughput to a fifth, and one of four workers is a quarter."""
    scenario = small(workers, times, start_s, rollout_s, group_sequences=8)
    (found,) = compared([scenario], SEEDS, ["rolloutmq"])
    bounds = {one.name: one for one in found.bounds}
    assert bounds["waste"].worst <= bounds["waste"].worst_limit
    assert bounds["twice the capacity"].worst <= 3.0


def small(workers: int, times: int, start_s: float, rollout_s: float, group_sequences: int = 0) -> Scenario:
    """Return a server that so many workers fill, and a trainer that demands so many `times` what it makes."""
    capacity = PACE * workers
    worker = EnvironmentSite(
        per_worker=constant(PACE),
        start_s=start_s,
        rollout_s=rollout_s,
        server="engine",
        group_sequences=group_sequences,
    )
    site = Site(
        TrainerSite(constant(times * capacity)), {ENV: worker}, {"engine": ServerSite(constant(capacity))}
    )
    return Scenario("small", site, lasts_s=10.0 * (start_s + 10.0) + 1800.0, is_fresh=True)
