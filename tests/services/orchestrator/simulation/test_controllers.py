from dataclasses import replace

import msgspec
import pytest

from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts
from rolloutmq.services.orchestrator.simulation.controllers import CONTROLLERS, OwnControllers, ReferenceFleet
from rolloutmq.services.orchestrator.simulation.scenarios import ENV, single
from rolloutmq.services.orchestrator.simulation.series import constant, steps
from rolloutmq.services.orchestrator.simulation.site import (
    EnvironmentSite,
    Scenario,
    ServerSite,
    Site,
    TrainerSite,
)
from rolloutmq.services.orchestrator.simulation.trial import Telemetry, try_out

WORKER = EnvironmentSite(start_s=20.0, max_workers=50)


def at(now: float, **crews: WorkerCounts) -> Telemetry:
    return Telemetry(None, now, crews, {}, now)


def test_the_reference_fleet_has_the_need_of_the_moment_and_keeps_its_peak() -> None:
    demand = steps((0.0, 39.0), (100.0, 81.0), (200.0, 20.0), (250.0, 10.0))
    fleet = ReferenceFleet(Scenario("x", single(demand, WORKER)))
    targets = [fleet.decide(at(float(now)))[ENV] for now in range(320)]
    assert [targets[now] for now in (99, 100, 259, 260, 309, 310)] == [20, 41, 41, 10, 10, 5], "for 60 s"


def test_the_reference_fleet_keeps_workers_as_long_as_they_take_to_start() -> None:
    demand = steps((0.0, 40.0), (100.0, 20.0))
    fleet = ReferenceFleet(Scenario("x", single(demand, replace(WORKER, start_s=120.0))))
    targets = [fleet.decide(at(float(now)))[ENV] for now in range(230)]
    assert [targets[now] for now in (99, 219, 220)] == [20, 20, 10]


def test_the_reference_fleet_makes_up_for_crashes_up_to_the_bounds() -> None:
    crashing = replace(WORKER, life_s=21.0)
    assert ReferenceFleet(Scenario("x", single(constant(40.0), crashing))).decide(at(0.0))[ENV] == 40
    assert ReferenceFleet(Scenario("x", single(constant(90.0), crashing))).decide(at(0.0))[ENV] == 50


def test_the_reference_fleet_shares_servers_and_the_budget() -> None:
    site = Site(
        TrainerSite(constant(80.0)),
        {"a": replace(WORKER, weight=3.0, server="engine"), "b": WORKER},
        {"engine": ServerSite(constant(10.0), max_engines=2)},
    )
    whole = ReferenceFleet(Scenario("x", site))
    assert whole.decide(at(0.0)) == {"a": 10, "b": 10, "engine": 2}
    scarce = ReferenceFleet(Scenario("x", site, max_processes=8))
    assert scarce.decide(at(0.0)) == {"a": 6, "b": 2, "engine": 2}


def test_the_need_of_a_site_stays_within_bounds_and_capacity() -> None:
    site = single(steps((0.0, 0.0), (10.0, 40.0), (20.0, 400.0)), replace(WORKER, min_workers=2))
    assert [site.need(ENV, now) for now in (0.0, 10.0, 20.0)] == [2.0, 20.0, 50.0]
    shared = Site(
        TrainerSite(steps((0.0, 5.0), (10.0, 25.0), (20.0, 90.0))),
        {ENV: replace(WORKER, server="engine")},
        {"engine": ServerSite(constant(10.0), max_engines=4)},
    )
    assert [shared.need(ENV, now) for now in (0.0, 10.0, 20.0)] == [2.5, 12.5, 20.0]
    assert [shared.engines("engine", now) for now in (0.0, 10.0, 20.0)] == [1, 3, 4]


def test_the_orchestrators_controllers_start_no_more_processes_than_there_is_room_for() -> None:
    site = Site(TrainerSite(constant(40.0)), {"a": WORKER, "b": WORKER})
    own = OwnControllers(Scenario("x", site, max_processes=6), {"a": 0, "b": 0})
    crews = {"a": WorkerCounts(draining=5), "b": WorkerCounts(ready=1)}
    assert own.decide(at(0.0, **crews)) == {"a": 0, "b": 1}, "draining workers are processes still"
    assert own.decide(at(1.0, a=WorkerCounts(), b=WorkerCounts(ready=1))) == {"a": 1, "b": 1}


def test_lost_workers_are_no_scale_down_and_each_is_started_again_once() -> None:
    lost = replace(WORKER, ready=20, lost=((600.0, 5), (900.0, 15)))
    scenario = Scenario("x", single(constant(39.0), lost, queued=96.0), (600.0,), 1200.0)
    for law in ("reference", "rolloutmq"):
        out = try_out(scenario, CONTROLLERS[law], 0)[ENV]
        assert (out.moves, out.flips) == (20, 0), law


@pytest.mark.parametrize("law", ["ratio", "pid"])
def test_the_usual_rules_waste_workers_or_move_them(law: str) -> None:
    demand = steps((0.0, 40.0), (100.0, 80.0), (300.0, 20.0))
    scenario = Scenario(
        "x", single(demand, replace(WORKER, ready=20, max_workers=200)), (100.0, 300.0), 600.0
    )
    out = {name: try_out(scenario, CONTROLLERS[name], 0)[ENV] for name in (law, "reference")}
    assert out[law].outside == 0
    assert out[law].waste_s > 2.0 * out["reference"].waste_s or out[law].moves > 3 * out["reference"].moves


class WithoutTokens(OwnControllers):
    """The orchestrator's autoscaler, where workers report no completions."""

    def decide(self, seen: Telemetry) -> dict[str, int]:
        """See `Controllers`."""
        if seen.pressure is not None:
            silent = msgspec.structs.replace(seen.pressure, completions={}, completion_tokens={})
            seen = replace(seen, pressure=silent)
        return super().decide(seen)


def test_rollouts_of_minutes_do_not_hold_up_growth_if_they_have_turns() -> None:
    """24 workers are needed where four ran, and a rollout takes two minutes."""
    one = EnvironmentSite(
        per_worker=constant(8 / 120), start_s=5.0, rollout_s=120.0, turns=12, ready=4, group_sequences=8
    )
    demand = steps((0.0, 0.9 * 4 * 8 / 120), (600.0, 24 * 8 / 120))
    scenario = Scenario("x", single(demand, one, batch=16, queue=2000), (600.0,), 1500.0)
    with_tokens, without = (try_out(scenario, make, 0)[ENV] for make in (OwnControllers, WithoutTokens))
    assert with_tokens.starved_s < 0.6 * without.starved_s
    assert with_tokens.peak <= 1.25 * 24
