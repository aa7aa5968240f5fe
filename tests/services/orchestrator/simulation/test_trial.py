"""Trials with a scripted controller: what it sees, and what is counted from when."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rolloutmq.services.orchestrator.simulation.plant import DT_S
from rolloutmq.services.orchestrator.simulation.scenarios import ENV, all_scenarios, single
from rolloutmq.services.orchestrator.simulation.series import constant, steps
from rolloutmq.services.orchestrator.simulation.site import (
    EnvironmentSite,
    Scenario,
    ServerSite,
    Site,
    TrainerSite,
)
from rolloutmq.services.orchestrator.simulation.trial import Controllers, Outcome, Telemetry, try_out

WORKER = EnvironmentSite(per_worker=constant(1.0), start_s=2.0, noise=0.0, ready=10, max_workers=50)
STEADY = Scenario("steady", single(constant(10.0), WORKER, queued=500.0), lasts_s=100.0)


class Script:
    """Controllers that do as they are told, by second, and keep what they saw."""

    def __init__(self, targets: Mapping[int, Mapping[str, int]] | None = None) -> None:
        self.targets = targets or {}
        self.seen: list[Telemetry] = []
        self.begun: list[Mapping[str, int]] = []

    def begin(self, _: Scenario, running: Mapping[str, int]) -> Controllers:
        self.begun.append(running)
        return self

    def decide(self, seen: Telemetry) -> Mapping[str, int]:
        self.seen.append(seen)
        current = {name: crew.current for name, crew in seen.crews.items()}
        return current | dict(self.targets.get(len(self.seen), {}))


def tried(scenario: Scenario, targets: Mapping[int, Mapping[str, int]] | None = None) -> Outcome:
    return try_out(scenario, Script(targets).begin, 0)[ENV]


def test_what_happens_is_counted() -> None:
    told = {10: {ENV: 15}, 20: {ENV: 13}, 30: {ENV: 18}, 40: {ENV: 60}, 50: {ENV: 10}}
    out = tried(STEADY, told)
    assert (out.peak, out.flips, out.moves) == (60, 3, 5 + 2 + 5 + 42 + 50)
    assert out.outside == 10, "60 are more than 50"
    assert (out.peak_need, out.need_s) == (10.0, 1000.0)
    assert out.waste_s == pytest.approx(10 * (5 + 3 + 8 + 50) + 3 * 52, rel=0.2), "draining ones count"
    assert (out.starved_s, out.downs_in_the_dark, out.settle_s) == (0.0, 0, [])
    assert [(moment.workers, moment.need) for moment in out.moments[8:11]] == [
        (10, 10.0),
        (15, 10.0),
        (15, 10.0),
    ]
    assert out.moments[0].pressure == pytest.approx((500.0 - 64.0 + 10.0) / 64.0)


@pytest.mark.parametrize("change", [{"changes": (50.0,)}, {"since_s": 50.0}])
def test_figures_count_from_the_first_change(change: Mapping[str, Any]) -> None:
    told = {10: {ENV: 1}, 30: {ENV: 10}, 60: {ENV: 12}}
    scenario = replace(STEADY, site=single(constant(10.0), WORKER), **change)
    whole = tried(replace(scenario, changes=(), since_s=0.0), told)
    out = tried(scenario, told)
    assert (whole.moves, whole.flips, out.moves, out.flips) == (20, 1, 2, 0)
    assert whole.starved_s > 5.0 > out.starved_s
    assert (len(whole.moments), len(out.moments), out.need_s) == (100, 51, 510.0)
    assert out.made == pytest.approx(50 * 10.0 + 2.0 * 38.0, abs=15.0)


def test_settling_is_measured_after_each_change() -> None:
    demand = steps((0.0, 10.0), (20.0, 20.0), (60.0, 10.0))
    scenario = replace(STEADY, site=single(demand, WORKER), changes=(20.0, 60.0))
    out = tried(scenario, {30: {ENV: 20}, 75: {ENV: 11}})
    assert out.settle_s[0] == pytest.approx(10.0 + 2.0, abs=1.5), "ten seconds late, and a start"
    assert out.settle_s[1] == pytest.approx(15.0, abs=1.0), "one more than needed is within the band"
    assert tried(scenario).settle_s == [pytest.approx(40.0, abs=1.0), 0.0], "it never settled after the first"


def test_lost_telemetry_is_old_telemetry() -> None:
    script = Script()
    try_out(replace(STEADY, loss=0.5, lasts_s=400.0), script.begin, 0)
    stale_s = [seen.now - seen.heard_at for seen in script.seen if seen.pressure is not None]
    assert sum(age > 0.0 for age in stale_s) == pytest.approx(200, abs=40)
    assert max(stale_s) < 20.0
    assert all(seen.pressure.at == seen.heard_at for seen in script.seen if seen.pressure is not None)


def test_in_the_dark_nothing_is_heard_and_removals_are_counted() -> None:
    script = Script({32: {ENV: 9}, 40: {ENV: 8}, 41: {ENV: 9}, 70: {ENV: 7}})
    out = try_out(replace(STEADY, dark=(30.0, 60.0)), script.begin, 0)[ENV]
    assert max(seen.now - seen.heard_at for seen in script.seen) == pytest.approx(30.0, abs=1.0)
    assert out.downs_in_the_dark == 1, (
        "one before the last telemetry is old, one is up, one after the darkness"
    )


def test_a_restart_begins_anew_and_a_jump_moves_the_clock() -> None:
    script = Script({10: {ENV: 12}})
    try_out(replace(STEADY, restart_at=50.0, jump=(70.0, 3600.0)), script.begin, 0)
    assert script.begun == [{ENV: 10}, {ENV: 12}]
    clock = [seen.now for seen in script.seen]
    jumps = [after - before for before, after in pairwise(clock)]
    assert sorted(jumps)[-2:] == [1.0, 3601.0]
    assert all(seen.now - seen.heard_at == 0.0 for seen in script.seen)


def test_controllers_see_what_a_broker_publishes() -> None:
    script = Script()
    worker = replace(WORKER, weight=3.0)
    site = Site(
        TrainerSite(constant(20.0), away=((50.0, 60.0),)), {"a": worker, "b": replace(worker, weight=1.0)}
    )
    try_out(replace(STEADY, site=site, lasts_s=61.0), script.begin, 0)
    pressure = script.seen[39].pressure
    assert pressure is not None
    assert [lane.rollout_s for lane in pressure.lanes] == [DT_S, DT_S]
    made, settled = (
        sum(getattr(lane, f"{kind}_sequences") for lane in pressure.lanes) for kind in ("accepted", "settled")
    )
    assert made == pytest.approx(20.0 * 40.0, abs=2)
    assert made - settled - pressure.queued_sequences == pytest.approx(64, abs=3), "the batch in training"
    assert [lane.weight for lane in pressure.lanes] == [3.0, 1.0]
    assert pressure.starved_s + pressure.settled_busy_s == pytest.approx(40.0, abs=4.0)
    trainers = [seen.pressure.trainers for seen in script.seen if seen.pressure is not None]
    assert (trainers[48], trainers[49], trainers[58], trainers[59]) == (1, 0, 0, 1)


def test_the_pressure_is_that_of_the_present_batch() -> None:
    site = single(constant(10.0), WORKER, queued=500.0)
    trainer = replace(site.trainer, batch_part=steps((0.0, 0.5), (50.0, 1.0)))
    script = Script()
    try_out(replace(STEADY, site=replace(site, trainer=trainer)), script.begin, 0)
    told = [seen.pressure for seen in script.seen if seen.pressure is not None]
    assert {one.batch_sequences for one in told[:48]} == {32}
    assert {one.batch_sequences for one in told[50:]} == {64}
    assert told[20].rollout_pressure == pytest.approx(told[20].queued_sequences / 32, abs=1 / 32)


def test_more_than_the_process_budget_is_outside() -> None:
    site = Site(TrainerSite(constant(10.0)), {"a": WORKER, "b": WORKER})
    scenario = replace(STEADY, site=site, max_processes=21)
    out = try_out(scenario, Script({50: {"a": 11}, 60: {"b": 11}, 61: {"b": 10}}).begin, 0)
    assert (out["a"].outside, out["b"].outside) == (1, 1)


def test_engines_follow_their_targets() -> None:
    site = Site(
        TrainerSite(constant(30.0)),
        {ENV: replace(WORKER, ready=30, server="engine")},
        {"engine": ServerSite(constant(10.0), max_engines=3, start_s=5.0)},
    )
    script = Script({10: {"engine": 3}})
    out = try_out(replace(STEADY, site=site), script.begin, 0)[ENV]
    assert out.engines == 3
    assert out.made == pytest.approx(15.25 * 10.0 + 84.75 * 30.0, abs=15.0)
    counts, busy = script.seen[-1].engines["engine"]
    assert counts.ready == 3
    assert busy == pytest.approx(3.0, abs=0.01)


def test_throughput_counts_once_the_capacity_is_to_be_found() -> None:
    scenario = replace(STEADY, lasts_s=200.0)
    assert scenario.found_by_s == 120.0
    out = tried(scenario)
    assert out.made_late == pytest.approx(10.0 * 80.0, abs=15.0)


def test_the_same_seed_gives_the_same() -> None:
    scenario = next(one for one in all_scenarios(20.0) if one.name == "available 0.5")
    scenario = replace(scenario, lasts_s=700.0)
    assert try_out(scenario, Script().begin, 1) == try_out(scenario, Script().begin, 1)
    assert try_out(scenario, Script().begin, 1) != try_out(scenario, Script().begin, 2)
