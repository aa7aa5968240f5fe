"""The search for the capacity of shared servers, with environments that keep a pace."""

from typing import Final

import pytest
from tests.services.orchestrator.autoscaling.servers.shared_site import SHOWN_S, Site

from rolloutmq.services.orchestrator.autoscaling.pressure import ServerLimit
from rolloutmq.services.orchestrator.autoscaling.servers.capacity import FIRST_HOLD_S
from rolloutmq.services.orchestrator.autoscaling.servers.saturation import SaturationDetector
from rolloutmq.services.orchestrator.autoscaling.servers.server_use import (
    GROUPS,
    SURE_GROUPS,
    SURE_S,
    ServerUse,
)

SURE: Final = int(SURE_S) + 60


def test_a_full_server_is_found_and_gone_back_to() -> None:
    site = Site(shared=40.0)
    assert not site.run(SHOWN_S, a=15)["a"].most
    assert 20 <= site.run(SHOWN_S, a=28)["a"].most <= 21
    assert 20 <= site.run(SURE, a=21)["a"].most <= 21


def test_growth_waits_for_groups_of_those_that_run() -> None:
    site = Site(shared=1000.0)
    assert site.run(1, a=1)["a"].reach == 4, "a few may always be tried"
    assert site.run(SHOWN_S, a=10)["a"].reach == 19
    few_s = (GROUPS - 5) // (2 * 18)
    assert site.run(max(1, few_s), a=18)["a"].reach == 19, "not measured yet"
    assert site.run(SHOWN_S, a=18)["a"].reach == 34


@pytest.mark.parametrize(("dispersion", "seconds"), [(0.03, 6), (0.16, 10), (1.0, 15)])
def test_fewer_groups_tell_a_throughput_if_they_arrive_evenly(dispersion: float, seconds: int) -> None:
    """Eighteen workers make 1.8 groups a second: 8, 16 and 24 groups are needed."""
    site = Site(shared=1000.0, paces={"a": 0.1})
    site.dispersion = dispersion
    first = site.run(300, a=10)["a"].reach
    assert 18 <= first <= 19
    assert site.run(seconds - 2, a=18)["a"].reach == first
    assert 33 <= site.run(3, a=18)["a"].reach <= 34


def test_hours_of_rollouts_need_one_group_of_each_worker() -> None:
    """24 groups of four workers would be six rounds: most of a day for rollouts of four hours."""
    site = Site(shared=1000.0, paces={"a": 1 / 3600})
    site.rollout_s = 3600.0
    assert site.run(7000, a=4)["a"].reach == 4
    assert site.run(8000, a=4)["a"].reach == 8


def long_rollouts(shared: float) -> Site:
    """Return a site whose rollouts take 300 s and have ten turns; four workers have delivered some."""
    site = Site(shared, paces={"a": 1 / 30})
    site.rollout_s, site.turns = 300.0, 10
    site.run(200, a=4)
    site.delivering = {"a": 4}
    return site


def test_tokens_confirm_growth_before_a_rollout_has_ended() -> None:
    site = long_rollouts(shared=1000.0)
    assert site.run(SHOWN_S, a=7)["a"].reach == 10
    assert site.run(SHOWN_S, a=10)["a"].reach == 15
    site.turns = 0
    assert site.run(2 * SHOWN_S, a=15)["a"].reach == 15, "nothing is confirmed without completions"


def test_tokens_tell_a_full_server_before_a_rollout_has_ended() -> None:
    site = long_rollouts(shared=10 / 30)
    assert site.run(SHOWN_S, a=7)["a"].reach == 10
    assert site.run(300, a=15)["a"].reach < 15


def test_after_a_restart_a_fleet_beyond_the_proven_size_is_no_base() -> None:
    site = long_rollouts(shared=10 / 30)
    site.delivering = {}
    limit = ServerLimit(best=1 / 30, proven=10 / 30)
    site.detector = SaturationDetector().resumed("a", limit, 1)
    assert site.run(100, a=20)["a"].reach <= 19


def test_the_first_groups_of_a_fleet_that_tokens_found_slow_tell_the_capacity() -> None:
    site = long_rollouts(shared=10 / 30)
    site.run(SHOWN_S, a=7)
    site.run(SHOWN_S, a=16)
    site.delivering = {}
    assert 10 <= site.run(700, a=16)["a"].most <= 13


def test_groups_do_not_judge_workers_that_load_a_server_and_deliver_nothing_yet() -> None:
    """The former workers alone seem to have become slower."""
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    site.delivering = {"a": 15}
    assert site.run(SHOWN_S, a=28)["a"].best == pytest.approx(2.0)
    site.delivering = {}
    assert 20 <= site.run(SHOWN_S, a=28)["a"].most <= 21


def test_less_demand_after_the_search_discards_no_capacity() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    found = site.run(SHOWN_S, a=33)["a"].most
    assert 20 <= found <= 21
    assert site.run(SHOWN_S, a=6)["a"].most == found


def test_workers_that_share_nothing_are_never_held_back() -> None:
    site = Site(shared=1e9)
    for number in (1, 4, 8, 15, 28, 50, 20, 1):
        limit = site.run(SHOWN_S, a=number)["a"]
        assert not limit.most
        assert not limit.slow


def test_a_pace_that_changes_while_the_workers_stay_is_no_saturation() -> None:
    site = Site(shared=1e9)
    site.run(SHOWN_S, a=20)
    site.paces["a"] = 1.0
    assert site.run(1, a=20)["a"].slow, "no more are started before it is clear"
    limit = site.run(SHOWN_S, a=20)["a"]
    assert (limit.most, limit.slow) == (0, False)
    assert limit.best == pytest.approx(1.0)
    assert not site.run(SHOWN_S, a=38)["a"].most


def test_rollouts_that_become_longer_while_workers_are_added_are_no_saturation() -> None:
    site = Site(shared=1e9)
    tests = 0
    for number in range(20, 50):
        site.paces["a"] = 40.0 / number
        if most := site.run(100, a=number)["a"].most:
            tests += 1
            assert number < most <= 1.25 * number, "more are tried, and nobody starves meanwhile"
            assert not site.run(SURE, a=most)["a"].most
    assert tests <= 1, "they became 2.4 times longer"
    assert site.detector.bests["a"] == pytest.approx(40.0 / 49, rel=0.1)


@pytest.mark.parametrize("demand", [40.0, 42.0, None])
def test_a_fleet_that_grows_slowly_on_a_full_server_is_tested(demand: float | None) -> None:
    """Each growth is so small that the slower workers seem to have longer rollouts: more show that it is full."""
    site = Site(shared=40.0)
    site.demand = demand
    for workers in range(20, 60):
        if most := site.run(SHOWN_S, a=workers)["a"].most:
            break
    else:
        pytest.fail("it was never tested")
    assert most <= 45, "before there are more than twice the useful ones"
    for _ in range(12):
        most = site.run(SURE, a=most)["a"].most
        assert 0 < most <= 45
    assert most <= 26


def test_if_fewer_make_less_it_was_no_saturation() -> None:
    site = Site(shared=1e9)
    site.run(SHOWN_S, a=15)
    site.paces["a"] = 1.0  # at the moment at which more are started
    found = site.run(SHOWN_S, a=28)["a"].most
    assert found
    assert not site.run(SURE, a=found)["a"].most
    assert not site.run(SHOWN_S, a=28)["a"].most


def test_one_more_is_tried_after_a_while_and_then_more_seldom() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    found = site.run(SHOWN_S, a=28)["a"].most
    tried = site.run(int(FIRST_HOLD_S) + SURE, a=found)["a"].most
    assert tried == found + 1
    assert site.run(SURE, a=tried)["a"].most == found
    assert site.run(int(FIRST_HOLD_S) + SURE, a=found)["a"].most == found, "it is believed for longer"


def test_a_server_that_became_faster_is_noticed() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    number = found = site.run(SHOWN_S, a=28)["a"].most
    site.shared = 400.0
    for _ in range(12):
        number = site.run(int(FIRST_HOLD_S) if number == found else SURE, a=number)["a"].most or 200
    assert number > 2 * found


def test_workers_that_a_full_server_slowed_show_at_once_that_it_became_faster() -> None:
    """A tenth too many share the server: their pace rises by a tenth only, and the next probe is far away."""
    site = Site(shared=40.0)
    site.dispersion = 0.1
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    assert site.run(SURE, a=22)["a"].most <= 22
    assert site.run(300, a=22)["a"].most <= 22
    site.shared = 80.0
    assert site.run(SURE, a=22)["a"].most >= 25


def test_what_chance_may_make_of_a_full_server_is_no_faster_server() -> None:
    site = Site(shared=40.0)
    site.dispersion = 0.02
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    site.run(SURE, a=22)
    assert site.detector.explored, "28 workers made no more, surely"
    site.dispersion = 8.0
    site.shared = 44.0
    assert site.run(SURE, a=22)["a"].most <= 22


def test_a_probe_that_helps_is_followed_by_the_next_one_at_once() -> None:
    """It has just measured what the larger number makes."""
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    most = site.run(SURE + int(FIRST_HOLD_S), a=20)["a"].most
    site.shared = 1000.0
    for more in (2, 4, 8):
        limit = site.run(int(SURE_S) + 5, a=most)["a"]
        assert limit.most == most + more
        most = limit.most


def test_another_engine_is_expected_to_feed_as_many_as_the_first() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    found = site.run(SHOWN_S, a=28)["a"].most
    site.engines, site.shared = 2, 80.0
    limit = site.run(1, a=21)["a"]
    assert 20 <= found <= 21
    assert limit.best == pytest.approx(2.0)
    assert limit.most == limit.reach == 2 * found
    assert site.run(SURE, a=limit.most)["a"].most == limit.most


def test_a_probe_after_another_engine_is_followed_by_a_longer_wait() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    site.engines, site.shared = 2, 80.0
    found = site.run(SURE, a=41)["a"].most
    tried = site.run(int(FIRST_HOLD_S), a=found)["a"].most
    assert tried == found + 1
    assert site.run(SURE, a=tried)["a"].most == found
    assert site.run(int(FIRST_HOLD_S) + SURE, a=found)["a"].most == found, (
        "the first wait came before the probe"
    )
    assert site.run(int(FIRST_HOLD_S) + SURE, a=found)["a"].most == found + 1


def test_an_engine_that_feeds_more_than_expected_is_noticed() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    site.engines, site.shared = 2, 120.0
    number = expected = site.run(1, a=21)["a"].most
    for _ in range(8):
        number = site.run(int(FIRST_HOLD_S) if number == expected else SURE, a=number)["a"].most
    assert number >= expected + 10


def test_workers_that_make_what_is_demanded_are_not_saturated() -> None:
    """Rollouts become longer, and the fleet grows with them: its throughput stays, as that of a full server would."""
    site = Site(shared=1000.0)
    site.demand = 40.0
    for workers in (20, 25, 30):
        site.paces["a"] = 40.0 / workers
        assert not site.run(SHOWN_S, a=workers)["a"].most


def at_capacity(site: Site) -> int:
    """Let the detector find and verify the capacity, and return the workers."""
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    return site.run(SURE, a=21)["a"].most


def test_longer_rollouts_at_the_capacity_ask_for_fewer_workers_and_then_for_some_more() -> None:
    """They took longer elsewhere, not on the server: fewer make less, and more make more."""
    site = Site(shared=40.0)
    number = found = at_capacity(site)
    site.paces["a"], site.shared = 1.0, 1000.0
    numbers = []
    for _ in range(12):
        limit = site.run(SURE, a=number)["a"]
        number = limit.most or limit.reach
        numbers.append(number)
    assert min(numbers) >= 0.75 * found
    assert max(numbers) > 3 * found


def test_longer_sequences_on_a_full_server_bring_no_more_workers() -> None:
    """Its throughput and the pace of a worker fall together, so as many workers fill it as before."""
    site = Site(shared=40.0)
    number = at_capacity(site)
    numbers = []
    for _ in range(60):
        site.shared, site.paces["a"] = 0.97 * site.shared, 0.97 * site.paces["a"]
        number = site.run(SURE, a=number)["a"].most
        numbers.append(number)
    assert max(numbers) <= 30
    assert 18 <= sum(numbers) / len(numbers) <= 22


@pytest.mark.parametrize(("shared", "enough"), [(20.0, 10), (12.0, 6)])
def test_a_slower_server_is_left_with_the_workers_that_fill_it(shared: float, enough: int) -> None:
    site = Site(shared=40.0)
    number = at_capacity(site)
    site.shared = shared
    for _ in range(14):
        number = site.run(SURE, a=number)["a"].most
    assert enough <= number <= 1.25 * enough + 1


def test_faster_workers_somewhat_below_the_capacity_are_not_taken_for_slower() -> None:
    site = Site(shared=40.0)
    found = at_capacity(site)
    site.paces["a"], site.shared = 2.42, 100.0
    assert min(site.run(SURE, a=17)["a"].most for _ in range(4)) >= found


def test_a_server_that_lets_the_present_workers_go_faster_gets_more_at_once() -> None:
    site = Site(shared=40.0)
    number = found = at_capacity(site)
    site.shared, site.paces["a"] = 80.0, 4.0
    site.run(SURE, a=number)
    site.shared = 400.0
    for _ in range(8):
        number = site.run(SURE, a=number)["a"].most
    assert number > 2 * found


def test_a_test_with_fewer_workers_goes_on_under_the_next_orchestrator() -> None:
    """Otherwise the smaller number would stay until the next probe."""
    found: list[list[int]] = []
    for is_killed in (False, True):
        site = Site(shared=40.0)
        number = at_capacity(site)
        site.shared = 20.0
        while not (site.detector.tests_fewer and site.detector.made):
            number = site.run(5, a=number)["a"].most
        limit = site.run(5, a=number)["a"]
        if is_killed:
            site.detector = SaturationDetector().resumed("a", limit, site.engines)
        numbers: list[int] = []
        while site.detector.tests_fewer:
            number = site.run(5, a=number)["a"].most
            numbers += [number] if [number] != numbers[-1:] else []
        found.append(numbers)
    assert found[0] == found[1]


def test_a_capacity_under_test_is_tested_on_by_the_next_orchestrator() -> None:
    """Its throughput drops: there was no saturation."""
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    limit = site.run(SHOWN_S, a=28)["a"]
    assert (limit.most, limit.made) == (21, 40.0)
    site.detector = SaturationDetector().resumed("a", limit, site.engines)
    site.shared = 30.0
    assert not site.run(SHOWN_S, a=21)["a"].most


def test_fewer_engines_are_measured_anew() -> None:
    site = Site(shared=80.0)
    site.engines = 2
    site.run(SHOWN_S, a=28)
    assert site.run(SHOWN_S, a=50)["a"].most
    site.engines, site.shared = 1, 40.0
    limit = site.run(1, a=42)["a"]
    assert not limit.most
    assert limit.best == pytest.approx(2.0)


def test_environments_of_one_server_get_its_capacity_by_their_weights() -> None:
    site = Site(shared=40.0, paces={"a": 2.0, "b": 1.0})
    site.weights = {"a": 2.0, "b": 1.0}
    site.run(SHOWN_S, a=4, b=4)
    site.run(SHOWN_S, a=8, b=8)
    limits = site.run(SHOWN_S, a=16, b=16)
    assert {limit.most for limit in limits.values()} == {13}, (
        "fewer, so that the throughputs can be told apart"
    )
    limits = site.run(SURE, a=13, b=13)
    assert 14 <= limits["a"].most <= 15
    assert 14 <= limits["b"].most <= 15
    again = site.run(SURE, a=14, b=14)
    assert {env: limit.most for env, limit in again.items()} == {
        env: limit.most for env, limit in limits.items()
    }


def test_paces_that_few_groups_told_are_corrected_at_the_capacity() -> None:
    """By chance, one environment seemed 4 % slower than it is: it would get a worker more than its share."""
    site = Site(shared=40.0, paces={"a": 2.0, "b": 1.0})
    site.weights = {"a": 2.0, "b": 1.0}
    site.detector = SaturationDetector(
        capacity=42.0, bests={"a": 1.92, "b": 1.0}, proven=40.0, top=40.0, made=40.0, above=46.0, engines=1
    )
    before = site.run(1, a=14, b=14)
    assert before["a"].best / before["b"].best == pytest.approx(1.92)
    limits = site.run(SURE, a=14, b=14)
    assert limits["a"].best / limits["b"].best == pytest.approx(2.0, rel=0.01)
    assert limits["a"].most == limits["b"].most


@pytest.mark.parametrize(
    ("capacity", "pace", "numbers"), [(42.0, 1.99, (14, 14)), (44.9, 2.0, (15, 15)), (42.0, 1.0, (28, 14))]
)
def test_no_environment_gets_a_worker_at_the_cost_of_another(
    capacity: float, pace: float, numbers: tuple[int, int]
) -> None:
    site = Site(shared=40.0, paces={"a": 2.0, "b": 1.0})
    site.weights = {"a": 2.0, "b": 1.0}
    site.detector = SaturationDetector(
        capacity=capacity, bests={"a": pace, "b": 1.0}, proven=40.0, top=40.0, engines=1
    )
    limits = site.run(1, a=14, b=14)
    assert (limits["a"].most, limits["b"].most) == numbers


def test_an_environment_that_slows_another_is_not_longer_rollouts() -> None:
    """One grows, and the other one gets slower at the same number: it must not grow, too."""
    site = Site(shared=40.0, paces={"a": 2.0, "b": 2.0})
    site.run(SHOWN_S, a=6, b=6)
    limits = site.run(SHOWN_S, a=24, b=6)
    assert sum(limit.most for limit in limits.values()) in (21, 22)


def test_an_environment_at_its_maximum_holds_back_no_other() -> None:
    site = Site(shared=1e9, paces={"a": 1.0, "b": 1.0})
    site.weights, site.wants = {"a": 3.0, "b": 1.0}, {"a": 4.0}
    assert site.grow({"a": 4, "b": 60}) == {"a": 4, "b": 60}


def test_an_environment_that_wants_nothing_leaves_the_whole_capacity() -> None:
    site = Site(shared=40.0, paces={"a": 2.0, "b": 2.0})
    site.dispersion = 0.02
    site.run(SHOWN_S, a=7, b=7)
    site.run(SHOWN_S, a=14, b=14)
    limits = site.run(SURE, a=11, b=11)
    assert limits["a"].most == limits["b"].most == 11
    site.wants = {"a": 0.0}
    assert site.run(1, a=11, b=11)["b"].most == 21


EIGHT: Final = {name: 0.1 - 0.01 * number for number, name in enumerate("abcdefgh")}
"""Paces of eight environments: each makes a small part of all, and none delivers its groups when another does."""


def test_many_environments_grow_as_far_as_few() -> None:
    site = Site(shared=1e9, paces=EIGHT)
    most = dict.fromkeys(EIGHT, 20)
    assert site.grow(most) == most
    assert site.detector.bests == pytest.approx(EIGHT, rel=0.02)
    assert site.detector.proven == pytest.approx(20 * sum(EIGHT.values()), rel=0.02)


def test_many_environments_find_the_capacity_of_their_server() -> None:
    site = Site(shared=4.0, paces=EIGHT)
    workers = site.grow(dict.fromkeys(EIGHT, 100))
    size = sum(workers[env] * pace for env, pace in EIGHT.items())
    assert 4.0 <= size <= 4.0 * 1.05 + sum(EIGHT.values())
    assert all(0.45 < workers[env] * pace < 0.65 for env, pace in EIGHT.items()), "each has an eighth"


def test_an_environment_of_small_weight_grows_beside_a_large_one() -> None:
    site = Site(shared=40.0, paces={"a": 1.0, "b": 1.0, "c": 1.0})
    site.weights = {"a": 8.0}
    workers = site.grow({"a": 200, "b": 200, "c": 200})
    assert 32 <= workers["a"] <= 34
    assert 4 <= workers["b"] == workers["c"] <= 5


def test_an_environment_with_few_groups_is_measured_between_those_with_many() -> None:
    """They deliver 24 groups in a second, and its first twelve take a minute."""
    site = Site(shared=1e9, paces={"a": 2.0, "b": 2.0, "c": 0.05})
    assert site.run(SHOWN_S // 2, a=10, b=10, c=4)["c"] == ServerLimit(reach=4)
    assert site.run(SHOWN_S, a=10, b=10, c=4)["c"].best == pytest.approx(0.05)


def test_growth_of_others_does_not_begin_a_first_measurement_anew() -> None:
    site = Site(shared=1e9, paces={"a": 2.0, "b": 2.0, "c": 0.05})
    for number in (10, 12, 15, 18, 22, 27):
        limits = site.run(SHOWN_S // 4, a=number, b=number, c=4)
    assert limits["c"].best == pytest.approx(0.05)


def test_a_known_pace_is_measured_at_one_size_of_the_fleet() -> None:
    """The measurement of `c` would end with the first one after a growth, and most of it would be from before."""
    site = Site(shared=1e9, paces={"a": 2.0, "b": 2.0, "c": 0.05})
    while "c" not in site.detector.bests:
        site.run(1, a=10, b=10, c=4)
    site.run(SHOWN_S - 1, a=10, b=10, c=4)
    site.paces = {"a": 0.3, "b": 0.3, "c": 0.025}
    limits = site.run(4, a=19, b=19, c=4)
    assert limits["a"].best == pytest.approx(0.3), "a new pace"
    assert limits["c"].best == pytest.approx(0.05), "not known yet"


@pytest.mark.parametrize(("workers", "is_full"), [(8, True), (5, False)])
def test_small_environments_are_judged_together_once_they_delivered_enough(
    workers: int, is_full: bool
) -> None:
    """Four of them slow down to the half: sixteen groups tell that, and ten do not."""
    small = dict.fromkeys("bcde", 1.0)
    site = Site(shared=1e9, paces={"a": 2.0, **small})
    site.run(SHOWN_S, a=10, **dict.fromkeys(small, 4))
    site.paces |= dict.fromkeys(small, 0.5)
    limits = site.run(2, a=20 if is_full else 15, **dict.fromkeys(small, workers))
    assert bool(limits["a"].most) is is_full


def test_crashing_workers_leave_to_others_what_they_do_not_make() -> None:
    detector = SaturationDetector(capacity=40.0, proven=40.0, top=40.0, bests={"a": 1.0, "b": 1.0})
    uses = [
        ServerUse(env, 10, 0.0, 0.0, 0.0, 0.0, 1.0, want=want, available=0.5)
        for env, want in (("a", 10.0), ("b", 500.0))
    ]
    assert [detector.limit(use, uses).most for use in uses] == [10, 70]


def test_the_workers_tried_are_those_of_the_environment() -> None:
    site = Site(shared=1e9, paces={"a": 2.0, "b": 1.0})
    limits = site.run(SHOWN_S, a=6, b=12)
    assert (limits["a"].tried, limits["b"].tried) == (6, 12)
    assert limits["a"].proven == limits["b"].proven == pytest.approx(24.0)


def test_more_workers_that_make_less_than_fewer_did_have_longer_rollouts() -> None:
    """A full server would feed them as much as before."""
    site = Site(shared=1e9)
    site.run(SHOWN_S, a=15)
    site.paces["a"] = 0.8
    limit = site.run(3, a=28)["a"]
    assert not limit.most
    assert limit.best == pytest.approx(0.8)


def test_fewer_workers_that_make_a_little_less_were_taken_for_faster_than_they_are() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    found = site.run(SHOWN_S, a=28)["a"].most
    site.shared = 37.0
    limit = site.run(SURE, a=found)["a"]
    assert limit.best == pytest.approx(1.9)
    assert limit.most == found + 2


def test_a_small_difference_moves_no_number_at_a_known_capacity() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    site.run(SURE, a=21)
    site.paces["a"] = 1.94
    assert site.run(10 * SHOWN_S, a=10)["a"].best == 2.0
    site.paces["a"] = 1.84
    assert site.run(10 * SHOWN_S, a=10)["a"].best < 1.95


def test_one_slow_measurement_discards_no_capacity() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    found = site.run(SURE, a=21)["a"].most
    for shared in (30.0, 40.0, 30.0, 40.0):
        site.shared = shared
        assert site.run(1, a=21)["a"].most == found
    site.shared = 30.0
    assert site.run(8, a=21)["a"].most > found, "more of them tell a slower server from longer rollouts"


def test_crashed_workers_that_start_again_count() -> None:
    """Forty places of which half are ready at a time have the throughput of twenty."""
    site = Site(shared=1000.0)
    limit = site.run(SHOWN_S, a=40, available=0.5)["a"]
    assert limit.best == pytest.approx(1.0)
    assert limit.reach == 76


def test_a_crash_moves_no_limit_and_many_do() -> None:
    site = Site(shared=40.0)
    found = at_capacity(site)
    for available in (0.95, 1.0, 0.93, 1.0):
        assert site.run(1, a=21, available=available)["a"].most == found
    assert site.run(1, a=21, available=0.8)["a"].most > found


def test_a_restarted_orchestrator_knows_the_capacity() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    before = site.run(SHOWN_S, a=28)["a"]
    site.detector = SaturationDetector().resumed("a", before, 1)
    assert site.run(SURE, a=21)["a"].most == before.most


@pytest.mark.extended
def test_the_capacity_does_not_creep_up_by_one_worker_after_another() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    number = site.run(SHOWN_S, a=28)["a"].most
    for _ in range(120):
        number = site.run(300, a=number)["a"].most
        assert number <= 22


def test_it_is_not_judged_by_few_groups() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    before = site.detector.capacity
    limit = site.run(1, a=28)["a"]
    assert (before, limit.most, limit.slow) == (0.0, 0, True)
    assert SURE_GROUPS > GROUPS


@pytest.mark.parametrize("knee", [1, 2, 3])
def test_servers_that_the_first_workers_fill_are_left_with_those_that_fill_them(knee: int) -> None:
    """Four workers are measured first, and share a server that fewer fill: their pace is no base."""
    site = Site(shared=2.0 * knee)
    site.dispersion = 0.1
    site.run(SHOWN_S, a=4)
    workers = 7
    for _ in range(8):
        workers = site.run(SURE, a=workers)["a"].most or workers
    assert workers == knee


def test_a_pace_that_fell_as_the_first_workers_joined_is_checked_before_more_of_them_start() -> None:
    site = Site(shared=4.0)
    site.run(12, a=1)
    assert site.run(10, a=4)["a"].most == 4
    assert site.run(SURE, a=4)["a"].most == 3


def test_the_second_of_two_workers_that_share_a_full_server_brings_no_others() -> None:
    site = Site(shared=1.0, paces={"a": 1.0})
    assert site.run(15, a=1)["a"].reach == 4
    assert site.run(12, a=2)["a"].reach == 2


def test_workers_that_join_at_an_unchanged_pace_bring_others() -> None:
    site = Site(shared=1e9, paces={"a": 1.0})
    site.run(15, a=1)
    assert site.run(12, a=2)["a"].reach == 4


def test_servers_that_were_not_full_before_the_first_measurement_need_no_search() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    assert site.run(SHOWN_S, a=28)["a"].most == 21
    assert not site.detector.tests_fewer


def test_a_probe_that_nobody_fills_ends() -> None:
    site = Site(shared=40.0)
    site.run(SHOWN_S, a=15)
    site.run(SHOWN_S, a=28)
    site.run(SURE, a=21)
    assert site.run(int(FIRST_HOLD_S), a=21)["a"].most == 22
    site.wants["a"] = 20.0
    assert site.run(SURE, a=20)["a"].most == 21
    site.wants["a"], site.shared, number = 500.0, 20.0, 21
    for _ in range(4):
        number = site.run(SURE, a=number)["a"].most
    assert 0 < number < 18


def test_few_workers_are_probed_more_seldom() -> None:
    """One more of two workers is half of them."""
    site = Site(shared=4.0)
    site.dispersion = 0.1
    site.run(SHOWN_S, a=4)
    workers = 7
    for _ in range(8):
        workers = site.run(SURE, a=workers)["a"].most or workers
    assert site.run(int(2.0 * FIRST_HOLD_S), a=2)["a"].most == 2
    assert site.run(int(2.0 * FIRST_HOLD_S), a=2)["a"].most == 3


def test_a_wrong_suspicion_holds_back_no_growth() -> None:
    site = Site(shared=1e9)
    site.run(12, a=1)
    site.paces["a"] = 1.0
    assert site.run(26, a=4)["a"].most == 4
    assert site.run(SURE + 40, a=4)["a"].most == 3
    assert not site.run(2 * SURE, a=3)["a"].most
