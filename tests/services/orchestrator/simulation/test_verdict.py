"""The path with the fewest moves, and bounds at their edges."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.services.orchestrator.simulation.scenarios import ENV, single
from rolloutmq.services.orchestrator.simulation.series import constant, steps
from rolloutmq.services.orchestrator.simulation.site import EnvironmentSite, Scenario, ServerSite, Site
from rolloutmq.services.orchestrator.simulation.trial import Moment, Outcome
from rolloutmq.services.orchestrator.simulation.verdict import Bound, Figure, Verdict, fewest_moves, judged

WORKER = EnvironmentSite(start_s=20.0)
STEADY = Scenario("steady", single(constant(40.0), WORKER), lasts_s=3600.0)
CHANGING = Scenario(
    "step", single(steps((0.0, 40.0), (600.0, 80.0), (1200.0, 20.0)), WORKER), (600.0, 1200.0)
)


@pytest.mark.parametrize(
    ("needs", "turns", "moves"),
    [
        ([], 0, 0),
        ([20.0] * 5, 0, 0),
        ([20.0, 24.0], 0, 0),
        ([20.0, 25.0], 0, 1),
        ([20.0, 40.0, 10.0], 1, 14 + 25),
        ([20.0, 40.0, 80.0], 0, 50),
        ([2.0, 4.0, 2.0], 0, 0),
        ([2.0, 8.0, 2.0], 1, 8),
        ([10.0, 20.0, 10.0, 20.0], 2, 21),
        ([20.0, 22.0, 19.0, 21.0], 0, 0),
    ],
)
def test_the_path_with_the_fewest_moves(needs: Sequence[float], turns: int, moves: int) -> None:
    """Within a tenth of the need or one worker: of 20 to 40 are 22 to 36, of 2 to 8 are 3 to 7."""
    assert fewest_moves(needs) == (turns, moves)


def test_the_path_may_begin_at_a_number() -> None:
    assert fewest_moves([20.0, 20.0], 1) == (0, 17)
    assert fewest_moves([20.0, 10.0], 1) == (1, 17 + 7)
    assert fewest_moves([20.0], 25) == (0, 3)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(1.0, 30.0), min_size=1, max_size=7))
def test_no_path_within_the_band_has_fewer_moves(needs: list[float]) -> None:
    bands = [_band(need) for need in needs]
    assert fewest_moves(needs)[1] == min(_best(bands[0], bands[1:]).values())
    assert fewest_moves(needs[1:], bands[0][0])[1] == min(_best(bands[0][:1], bands[1:]).values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1.0, 12.0), min_size=1, max_size=5))
def test_no_path_within_the_band_turns_less_often(needs: list[float]) -> None:
    bands = [_band(need) for need in needs]
    assert fewest_moves(needs)[0] == min(_turns(path) for path in itertools.product(*bands))


def _band(need: float) -> range:
    spare = max(1.0, 0.1 * need)
    return range(math.ceil(need - spare - 1e-9), math.floor(need + spare + 1e-9) + 1)


def _best(starts: range, bands: Sequence[range]) -> dict[int, int]:
    """Return the fewest moves to each end, by trial of all paths."""
    best = dict.fromkeys(starts, 0)
    for band in bands:
        best = {to: min(moves + abs(to - at) for at, moves in best.items()) for to in band}
    return best


def _turns(path: Sequence[int]) -> int:
    signs = [after > before for before, after in itertools.pairwise(path) if after != before]
    return sum(after != before for before, after in itertools.pairwise(signs))


def outcome(**changed: Any) -> Outcome:
    """Return an outcome that keeps every bound."""
    found: dict[str, Any] = {
        "settle_s": [],
        "peak": 20,
        "peak_need": 20.0,
        "need_s": 1000.0,
        "engines": 1,
    } | changed
    moments = found.pop("moments", [Moment(float(at), 20, 20.0, 1.0) for at in range(3600)])
    return Outcome(moments=moments, **found)


def verdict(scenario: Scenario, *own: Outcome, reference: Outcome | None = None, **calm: Any) -> Verdict:
    outcomes = [{ENV: one} for one in own]
    (found,) = judged(scenario, "law", outcomes, [{ENV: reference or outcome(settle_s=[0.0, 0.0])}], **calm)
    return found


@pytest.mark.parametrize(
    ("kept", "exceeded", "bound"),
    [
        ({}, {"outside": 1}, "bounds"),
        ({}, {"downs_in_the_dark": 1}, "down in the dark"),
        ({"flips": 6}, {"flips": 7}, "flips"),
        ({"waste_s": 350.0}, {"waste_s": 351.0}, "waste"),
        ({"starved_s": 40.0}, {"starved_s": 40.1}, "starved"),
    ],
)
def test_bounds_beside_the_reference(kept: dict[str, Any], exceeded: dict[str, Any], bound: str) -> None:
    """An hour of steady need; the reference fleet starves for 10 s, and wastes a tenth."""
    reference = outcome(starved_s=10.0, waste_s=100.0)
    assert verdict(STEADY, outcome(**kept), reference=reference).broken == ()
    assert verdict(STEADY, outcome(**exceeded), reference=reference).broken == (bound,)


def test_a_fleet_that_wastes_much_is_to_be_beaten() -> None:
    reference = outcome(waste_s=3000.0)
    assert verdict(STEADY, outcome(waste_s=2000.0), reference=reference).broken == ()
    assert verdict(STEADY, outcome(waste_s=2001.0), reference=reference).broken == ("waste",)


def test_flips_follow_the_turns_of_a_changing_need() -> None:
    moments = [Moment(float(at), 20, 40.0 if at < 1200 else 10.0, 1.0) for at in range(600, 1800)]
    kept = outcome(settle_s=[0.0, 0.0], moments=moments, flips=6)
    assert verdict(CHANGING, kept).broken == ()
    assert verdict(CHANGING, replace(kept, flips=7)).broken == ("flips",)
    found = verdict(CHANGING, kept)
    assert (found.turns, found.least_moves) == (1, 14 + 25), "from the need of 20 before the first change"


def test_the_fewest_moves_of_a_fresh_start_begin_at_its_workers() -> None:
    assert verdict(STEADY, outcome()).least_moves == 17, "one starts by itself"


def test_settling_has_the_window_of_a_step_down() -> None:
    """Three starts with their confirmation and half a minute; a step down has a minute more."""
    assert verdict(CHANGING, outcome(settle_s=[96.0, 156.0])).broken == ()
    assert verdict(CHANGING, outcome(settle_s=[96.1, 0.0])).broken == ("settle",)
    assert verdict(CHANGING, outcome(settle_s=[0.0, 156.1])).broken == ("settle",)
    assert verdict(replace(CHANGING, unseen_s=10.0), outcome(settle_s=[106.0, 166.0])).broken == ()


def test_a_fresh_start_may_starve() -> None:
    assert verdict(replace(STEADY, is_fresh=True), outcome(starved_s=1000.0)).broken == ()


def test_crashes_are_judged_beside_workers_that_do_not_crash() -> None:
    crashing = replace(STEADY, site=single(constant(40.0), replace(WORKER, life_s=100.0)))
    assert not crashing.without_crashes.has_crashes
    calm = [{ENV: outcome(starved_s=10.0)}]
    assert verdict(crashing, outcome(starved_s=49.0), uncrashed=calm).broken == ()
    assert verdict(crashing, outcome(starved_s=49.1), uncrashed=calm).broken == ("starved",)
    with pytest.raises(ValueError, match="uncrashed is required"):
        verdict(crashing, outcome())


def test_the_capacity_of_a_shared_server() -> None:
    """An engine has capacity for twenty workers; which is to be found after 300 s."""
    shared = single(constant(100.0), replace(WORKER, server="engine"))
    site = Site(shared.trainer, shared.environments, {"engine": ServerSite(constant(40.0))})
    scenario = Scenario("shared", site, lasts_s=600.0, is_fresh=True)
    good = outcome(
        peak=40,
        made_late=970.0,
        moments=[Moment(float(at), 40 if at < 300 else 25, 20.0, 0.0) for at in range(600)],
    )
    late = replace(
        good,
        moments=[Moment(at, workers if at < 599 else 26, need, 0.0) for at, workers, need, _ in good.moments],
    )
    reference = outcome(made_late=1000.0)
    assert verdict(scenario, good, reference=reference).broken == ()
    assert verdict(scenario, late, reference=reference).broken == ("capacity",)
    assert verdict(scenario, replace(good, peak=41), reference=reference).broken == ("twice the capacity",)
    assert verdict(scenario, replace(good, made_late=969.0), reference=reference).broken == ("throughput",)
    assert verdict(replace(scenario, lasts_s=200.0), late, reference=reference).broken == (), (
        "too short to tell"
    )
    more = replace(site, servers={"engine": ServerSite(constant(40.0), max_engines=4)})
    assert verdict(replace(scenario, site=more), good, reference=reference).broken == ("engines",)
    assert verdict(replace(scenario, site=more), replace(good, engines=3), reference=reference).broken == ()


def test_slow_rollouts_and_pauses_give_the_search_more_time() -> None:
    slow = replace(WORKER, start_s=40.0, start_part=constant(0.5), rollout_s=30.0, server="engine")
    demand = steps((0.0, 100.0), (650.0, 0.0), (680.0, 100.0))
    site = Site(single(demand, slow).trainer, {ENV: slow}, {"engine": ServerSite(constant(40.0))})
    scenario = Scenario("shared", site, lasts_s=900.0, is_fresh=True)
    assert scenario.found_by_s == 600.0
    paused = outcome(
        peak=40,
        made_late=1000.0,
        moments=[
            Moment(float(at), 40 if at < 600 else 20, 1.0 if 650 <= at < 680 else 20.0, 0.0)
            for at in range(900)
        ],
    )
    reference = outcome(made_late=1000.0)
    assert verdict(scenario, paused, reference=reference).broken == ()
    later = replace(
        paused, moments=[Moment(at, 40, need, 0.0) for at, _, need, _ in paused.moments if at < 602]
    )
    assert verdict(scenario, later, reference=reference).broken == ("capacity",)


def test_settling_has_the_starts_of_its_time() -> None:
    slower = replace(WORKER, start_s=100.0, start_part=steps((0.0, 0.2), (1000.0, 1.0)))
    scenario = replace(CHANGING, site=single(CHANGING.site.trainer.demand, slower))
    kept = [3 * 22.0 + 30.0, 3 * 102.0 + 30.0 + 100.0]
    assert verdict(scenario, outcome(settle_s=kept)).broken == ()
    assert verdict(scenario, outcome(settle_s=[kept[0] + 0.1, 0.0])).broken == ("settle",)
    assert verdict(scenario, outcome(settle_s=[0.0, kept[1] + 0.1])).broken == ("settle",)


def test_the_worst_seed_has_half_as_much_again() -> None:
    assert Bound("flips", 10.0, 15.0, 10.0, 15.0).is_kept
    assert not Bound("flips", 10.0, 15.1, 10.0, 15.0).is_kept
    assert not Bound("flips", 10.1, 10.1, 10.0, 15.0).is_kept
    assert Bound("engines", 3.0, 2.0, 3.0, 2.0, is_least=True).is_kept
    assert not Bound("engines", 3.0, 1.0, 3.0, 2.0, is_least=True).is_kept


def test_a_verdict_has_its_bounds_with_their_figures() -> None:
    """An hour of steady need, whose reference fleet starves for 10 s and wastes a tenth."""
    reference = outcome(starved_s=10.0, waste_s=100.0, made=3600.0)
    own = [outcome(flips=one, starved_s=45.0, waste_s=300.0, made=7200.0) for one in (2, 3, 8)]
    found = verdict(STEADY, *own, reference=reference)
    assert found.broken == ("starved",)
    bounds = {bound.name: bound for bound in found.bounds}
    waste = bounds.pop("waste")
    assert (waste.median, waste.limit, waste.worst_limit) == pytest.approx((0.3, 0.35, 0.525))
    assert bounds == {
        "bounds": Bound("bounds", 0.0, 0.0, 0.0, 0.0),
        "down in the dark": Bound("down in the dark", 0.0, 0.0, 0.0, 0.0),
        "flips": Bound("flips", 3.0, 8.0, 6.0, 9.0),
        "starved": Bound("starved", 45.0, 45.0, 40.0, 60.0, "s"),
    }
    assert found.throughput_per_s == Figure(2.0, 2.0, 2.0)
    assert found.engines is None


def test_the_settling_time_shown_is_the_one_nearest_to_its_bound() -> None:
    found = verdict(CHANGING, outcome(settle_s=[50.0, 160.0]))
    assert found.bounds[-1] == Bound("settle", 160.0, 160.0, 156.0, 234.0, "s")


def test_a_figure_has_median_worst_and_ratio() -> None:
    own = [outcome(starved_s=one, moves=3) for one in (1.0, 5.0, 30.0)]
    found = verdict(STEADY, *own, reference=outcome(starved_s=2.0))
    assert (found.starved_s, found.moves) == (Figure(5.0, 30.0, 2.5), Figure(3.0, 3.0, None))
    assert (found.seeds, found.peak_need, found.env) == (3, 20.0, ENV)
