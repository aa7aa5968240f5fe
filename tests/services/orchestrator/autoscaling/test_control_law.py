import math
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.services.orchestrator.autoscaling.control_loop import LAW, Loop

from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.services.orchestrator.autoscaling.control_law import PressureController
from rolloutmq.services.orchestrator.autoscaling.pressure import (
    Decision,
    PressureSample,
    ServerLimit,
    WorkerCounts,
    WorkerRoom,
)


def test_as_many_as_are_needed_stay() -> None:
    loop = Loop()
    assert {loop.tick().target for _ in range(300)} == {10}


def test_more_appetite_brings_more_workers_at_once_and_by_bounded_steps() -> None:
    loop = Loop()
    loop.tick(60)
    targets = []
    for _ in range(150):
        targets.append(loop.tick(eats=80.0).target)
        loop.follow()
    assert 18 <= targets[4] <= 20
    assert 36 <= targets[-1] <= 42
    assert targets == sorted(targets)
    assert all(
        after <= max(2 * before, before + 4) for before, after in zip(targets, targets[5:], strict=False)
    )


def test_workers_go_late_and_not_for_a_moment_of_less_appetite() -> None:
    loop = Loop(workers=40)
    loop.tick(60, eats=80.0)
    assert loop.tick(20, eats=40.0).target == 40
    assert loop.tick(60, eats=80.0).target == 40
    targets = []
    for _ in range(120):
        targets.append(loop.tick(eats=20.0).target)
        loop.follow()
    assert targets[20] == 40
    assert 10 <= targets[-1] <= 11
    assert all(after >= math.ceil(before / 2) for before, after in pairwise(targets))


@pytest.mark.parametrize(("burst_s", "is_withdrawn"), [(30, True), (90, False)])
def test_workers_that_would_be_ready_after_a_burst_are_withdrawn_while_a_start_is_young(
    burst_s: int, is_withdrawn: bool
) -> None:
    loop = Loop()
    loop.tick(60, crew=WorkerCounts(ready=10, start_s=120.0))
    for _ in range(burst_s):
        crew = WorkerCounts(ready=10, starting=loop.last.target - 10, start_s=120.0)
        loop.tick(eats=80.0, crew=crew)
    assert (grown := loop.last.target) >= 18
    for _ in range(15):
        crew = WorkerCounts(ready=10, starting=loop.last.target - 10, start_s=120.0)
        loop.tick(eats=20.0, crew=crew)
    assert loop.last.target == (10 if is_withdrawn else grown)


def test_crashed_workers_that_start_again_are_not_withdrawn() -> None:
    loop = Loop()
    loop.tick(60, crew=WorkerCounts(ready=10, start_s=120.0))
    loop.tick(10, eats=80.0, crew=WorkerCounts(ready=10, start_s=120.0))
    grown = loop.last.target
    crew = WorkerCounts(ready=10, starting=grown - 10, restarting=grown - 10, start_s=120.0)
    assert loop.tick(15, eats=20.0, crew=crew).target == grown


def test_a_trainer_that_consumes_an_epoch_at_once_gets_workers_for_its_mean() -> None:
    """The queue holds an epoch: workers for the peak would start when it is over."""
    loop = Loop(workers=10)
    for _ in range(3):
        loop.tick(20, eats=80.0, pressure=90.0)
        loop.tick(100, eats=0.5, pressure=70.0)
    loop.tick(5, eats=80.0, pressure=85.0)
    assert {loop.tick(eats=80.0, pressure=80.0).target for _ in range(15)} == {loop.last.target}
    assert loop.last.target <= 10
    loop.follow()
    assert 7 <= loop.tick(60, eats=0.5, pressure=70.0).target <= 9, "they fill the queue until the next"
    assert "the mean of its cycles" in loop.last.reason
    assert loop.tick(20, eats=80.0, pressure=4.0).target > 15, "the queue does not hold this one"


def test_silence_holds_and_is_not_zero_pressure() -> None:
    loop = Loop(workers=40)
    loop.tick(60, eats=20.0)
    target = loop.last.target
    for _ in range(120):
        loop.now += 1.0
        loop.state, decision = loop.law.decide(loop.state, loop.sample, loop.now)
        assert decision.target == target
    assert "no pressure for" in decision.reason
    assert "no pressure received" in loop.law.decide(loop.state, PressureSample(), loop.now)[1].reason


def test_a_step_that_waits_for_the_queue_is_made_without_news_once_it_is_due() -> None:
    """Nobody sees the queue run out: what was known before has to do."""
    loop = Loop(workers=20)
    for second in range(68):
        loop.tick(eats=80.0 if second >= 60 else 40.0, pressure=60.0, settled_busy_s=100.0 + second)
    held, targets = loop.last, []
    for _ in range(200):
        loop.now += 1.0
        loop.state, decision = loop.law.decide(loop.state, loop.sample, loop.now)
        targets.append(decision.target)
    assert "the queue lasts" in held.reason
    assert targets[40] == held.target == 20
    assert 36 <= targets[-1] <= 42
    assert targets == sorted(targets)
    assert loop.tick(30, eats=80.0, pressure=60.0).target == targets[-1]


def test_a_batch_that_was_just_taken_is_no_lack() -> None:
    """The queue of a trainer with long steps rises and falls by a batch."""
    wants = []
    loop = Loop(workers=20)
    for second in range(900):
        at = second % 30
        wants.append(
            loop.tick(
                eats=1200.0 * (at == 0),
                batch_sequences=1200.0,
                pressure=1.0 + at / 30.0,
                settled_busy_s=100.0 + second - at,
            ).want
        )
    late = [want for want in wants[300:] if want is not None]
    assert max(late) - min(late) < 0.6


@pytest.mark.parametrize(("group", "least", "goes"), [(1, 0.85, True), (8, 1.2, False)])
def test_a_worker_goes_only_if_the_difference_is_more_than_chance(
    group: int, least: float, goes: bool
) -> None:
    """Six workers make about a sequence a second, and five would do; groups of eight arrive seldom, and by chance."""
    for seed in range(6):
        chance, loop = random.Random(seed), Loop(workers=6)
        for second in range(1500):
            arrives = group * (group == 1 or chance.random() < 1.0 / group)
            eats = (64.0 if second < 900 else 51.0) * (second % 64 == 0)
            before = loop.last.target
            loop.tick(eats=eats, per_worker=arrives / 6.0, group_sequences=group, pressure=2.5)
            if loop.last.target < before:
                assert before - (loop.last.want or 0.0) >= least
        assert not goes or loop.last.target == 5


def test_the_same_news_twice_confirm_nothing() -> None:
    loop = Loop()
    loop.tick(60)
    loop.tick(eats=200.0)
    state, decision = loop.law.decide(loop.state, loop.sample, loop.now + 0.5)
    assert "no news" in decision.reason
    assert state.up_since == loop.state.up_since


def test_an_operator_is_obeyed_within_the_bounds() -> None:
    loop = Loop()
    assert loop.tick(wanted=30).target == 30
    decision = loop.tick(wanted=99)
    assert (decision.target, "1 to 50 allowed" in decision.reason) == (50, True)
    assert loop.tick(wanted=0).target == 1


def test_a_released_pin_keeps_the_workers_for_a_window() -> None:
    """The law did not see the demand of before the pin: a pause would look like all there is."""
    loop = Loop(PressureController(1, 50, ScalingConfig(down_window_s=120.0)), workers=40)
    loop.tick(60, eats=80.0)
    loop.tick(200, eats=80.0, wanted=40)
    loop.tick(20, eats=0.0, pressure=3.0, wanted=40)
    assert {loop.tick(eats=0.0, pressure=3.0, wanted=None).target for _ in range(110)} == {40}
    assert loop.tick(60, eats=0.0, pressure=3.0).target < 40


def test_an_outage_that_ends_while_there_are_no_workers_is_forgotten() -> None:
    loop = Loop(PressureController(0, 50, ScalingConfig()))
    loop.tick(60, group_sequences=4, rollout_s=1.0)
    for _ in range(60):
        starve(loop, 1, eats=0.0, per_worker=0.0)
    outage = loop.state.rates.silent
    for _ in range(30):
        starve(loop, 1, eats=0.0, wanted=0)
        loop.follow()
    assert (outage, loop.state.rates.silent) == (True, False)
    assert starve(loop, 5, eats=0.0, wanted=None).target >= 1


def test_an_environment_without_a_share_gets_the_fewest_workers() -> None:
    loop = Loop()
    loop.tick(60)
    for _ in range(300):
        starve(loop, 1, share=0.0)
        loop.follow()
    assert loop.last.target == 1


def test_a_given_up_worker_does_not_hold_the_others_back_before_the_first_batch() -> None:
    loop = Loop(workers=4)
    for _ in range(90):
        starve(loop, 1, eats=0.0, batch_sequences=1200, crew=WorkerCounts(ready=3, failed=1))
    assert loop.last.target == 5, "half as many again as four, of the first ones that are measured"


@pytest.mark.parametrize(
    ("workers", "pressure", "least"), [(4, 2.5, 4.13), (4, 60.0, 4.0), (40, 2.5, 40.0), (40, 60.0, 37.3)]
)
def test_a_full_queue_lowers_the_want_of_many_and_is_the_spare_of_few(
    workers: int, pressure: float, least: float
) -> None:
    loop = Loop(workers=workers)
    loop.tick(60, eats=2.0 * workers)
    want = loop.tick(300, eats=2.0 * workers, pressure=pressure).want
    assert want == pytest.approx(least, abs=0.05 + 0.02 * workers * (workers > 4))


def test_the_fewest_stay_and_that_is_the_reason() -> None:
    loop = Loop(PressureController(5, 50, ScalingConfig()), workers=5)
    decision = loop.tick(200, eats=2.0)
    assert (decision.target, "5 is min_workers" in decision.reason) == (5, True)


def test_what_workers_cannot_do_anything_about_is_not_added_up() -> None:
    at_the_limit = Loop(PressureController(1, 10, ScalingConfig()))
    at_the_limit.tick(120, eats=80.0, pressure=0.5)
    assert at_the_limit.state.trim == 0.0
    for server in (ServerLimit(reach=10), ServerLimit(slow=True)):
        unmeasured = Loop()
        unmeasured.tick(1200, eats=80.0, pressure=0.5, server=server)
        assert (unmeasured.last.bound, unmeasured.state.trim) == ("unmeasured", 0.0)
    on_the_way = Loop()
    on_the_way.tick(60, crew=WorkerCounts(ready=10, starting=1), pressure=0.5)
    on_the_way.tick(60, crew=WorkerCounts(ready=10, draining=1), pressure=0.5)
    assert on_the_way.state.trim == 0.0
    on_the_way.tick(60, crew=WorkerCounts(ready=10), pressure=0.5)
    assert on_the_way.state.trim > 0.0


def test_who_starves_gets_more_before_anything_is_known() -> None:
    loop = Loop(workers=1)
    waited = 0.0
    for _ in range(30):
        waited += 1.0
        loop.tick(eats=0.0, pressure=0.0, starved_s=waited)
    assert loop.last.target == 2, "one more, and it is waited for"
    loop.sample = replace(loop.sample, crew=WorkerCounts(ready=1, starting=1))
    for _ in range(30):
        waited += 1.0
        loop.tick(eats=0.0, pressure=0.0, starved_s=waited)
    assert loop.last.target == 2


def test_from_nobody_there_is_a_way_up() -> None:
    nobody = PressureController(0, 50, ScalingConfig())
    loop = Loop(nobody, workers=0)
    assert loop.tick(30, eats=0.0, pressure=0.0).target == 0, "nobody asks"
    assert starve(loop, 10, eats=0.0, per_worker=0.0).target == 1
    went = Loop(nobody)
    went.tick(60)
    for _ in range(1000):
        blocked_s = went.sample.blocked_s + 2.0 * went.sample.crew.ready
        went.tick(eats=0.0, per_worker=0.0, pressure=3.0, blocked_s=blocked_s)
        went.follow()
    assert went.last.target == 0
    assert starve(went, 10, eats=0.0).target >= 1


def test_an_outage_of_less_than_a_rollout_brings_nobody() -> None:
    """Nothing arrives for the time of a rollout, which may be chance, and the trainer starves."""
    loop = Loop()
    loop.tick(300, group_sequences=4, rollout_s=60.0)
    for _ in range(80):
        starve(loop, 1, eats=0.0, per_worker=0.0)
        loop.follow()
    assert loop.last.target <= 11
    assert loop.state.rates.per_worker == pytest.approx(2.0, rel=0.05)


def test_workers_that_drain_do_not_hide_an_outage() -> None:
    loop = Loop(workers=20)
    loop.tick(60, group_sequences=4, rollout_s=0.5)
    for second in range(120):
        crew = WorkerCounts(ready=20 - 3 * (second % 20 < 5), draining=3 * (second % 20 < 5))
        starve(loop, 1, eats=0.0, per_worker=0.0, crew=crew)
        assert second < 20 or loop.state.rates.silent


@pytest.mark.parametrize(
    ("start_s", "batch", "margin"), [(120.0, 1, 1.0), (120.0, 120, 0.5), (20.0, 60, 0.0)]
)
def test_crashing_workers_are_more_by_their_availability_and_what_the_queue_does_not_replace(
    start_s: float, batch: int, margin: float
) -> None:
    loop = Loop()
    loop.tick(60, eats=16.0, batch_sequences=batch)
    crew = WorkerCounts(ready=8, starting=2, restarting=2, start_s=start_s)
    want = loop.tick(1200, eats=16.0, crew=crew).want
    assert want == pytest.approx((8.1 + margin * math.sqrt(8.1 * 0.2)) / 0.8, rel=0.03)


@pytest.mark.parametrize(("pressure", "comes"), [(2.0, True), (8.0, False)])
def test_a_long_queue_bridges_what_chance_makes_of_crashing_workers(pressure: float, comes: bool) -> None:
    """Ten workers of which eight are ready make 16 sequences per second: 16.6 need 10.4."""
    loop, crew = Loop(), WorkerCounts(ready=8, starting=2, restarting=2, start_s=2.0)
    loop.tick(600, eats=16.0, crew=crew, pressure=8.0)
    assert loop.last.target == 10
    assert loop.state.rates.error > 0.01
    targets = {
        loop.tick(eats=16 + (second % 5 < 3), crew=crew, pressure=pressure).target for second in range(60)
    }
    assert (max(targets) > 10) == comes


def test_a_known_number_of_workers_comes_back_in_one_step() -> None:
    loop = Loop(workers=40)
    loop.tick(120, eats=80.0)
    for _ in range(400):
        loop.tick(eats=10.0)
        loop.follow()
    assert loop.last.target <= 6
    for _ in range(12):
        starve(loop, 1, eats=80.0)
    assert loop.last.target >= 38


def test_cycles_of_an_earlier_broker_are_forgotten() -> None:
    loop = Loop()
    for _ in range(3):
        loop.tick(20, eats=80.0, pressure=90.0)
        loop.tick(100, eats=0.5, pressure=70.0)
    loop.tick(5, eats=80.0, pressure=85.0)
    known = loop.state.cycles.is_known
    loop.tick(epoch=1)
    assert (known, loop.state.cycles.is_known) == (True, False)


@pytest.mark.parametrize(("start_s", "window_s"), [(10.0, 60), (200.0, 200), (900.0, 300)])
def test_no_worker_goes_within_the_time_of_a_start(start_s: float, window_s: int) -> None:
    loop = Loop(workers=40)
    loop.tick(60, eats=80.0, crew=WorkerCounts(ready=40, start_s=start_s))
    loop.tick(window_s, eats=80.0)
    assert loop.tick(window_s - 5, eats=40.0).target == 40
    assert loop.tick(60, eats=40.0).target < 40


def test_no_worker_goes_within_a_window_after_the_teacher_was_away() -> None:
    loop = Loop(workers=40)
    loop.tick(60, eats=80.0, group_sequences=4, rollout_s=1.0)
    loop.tick(100, eats=0.0, per_worker=0.0, untaught=40)
    assert loop.tick(55, eats=20.0, untaught=0).target == 40
    assert loop.tick(60, eats=20.0).target < 40


def test_what_is_away_for_all_of_them_brings_nobody_and_is_no_saturation() -> None:
    loop = Loop()
    loop.tick(60, group_sequences=4, rollout_s=1.0)
    for _ in range(60):
        starved_s = loop.sample.starved_s + 1.0
        decision = loop.tick(eats=0.0, per_worker=0.0, pressure=0.0, starved_s=starved_s)
        loop.follow()
        assert decision.target <= 13, "some may be started before it is clear"
    assert loop.state.rates.silent
    for _ in range(600):
        decision = loop.tick()
        loop.follow()
        assert 10 <= decision.target <= 13
        assert not decision.bound


def test_workers_that_wait_for_the_teacher_are_neither_joined_nor_sent_away() -> None:
    loop = Loop()
    loop.tick(60, group_sequences=4, rollout_s=30.0)
    rates = loop.state.rates.per_worker
    for _ in range(300):  # the trainer starves, and every worker has groups that wait
        starved_s = loop.sample.starved_s + 1.0
        decision = loop.tick(eats=0.0, per_worker=0.0, pressure=0.0, starved_s=starved_s, untaught=10)
        assert decision.target == 10
    assert decision.reason == "hold: teacher_away: 10 workers wait for the teacher"
    assert loop.state.rates.per_worker == pytest.approx(rates, rel=0.3), "they make what they made"
    for _ in range(120):
        assert loop.tick(untaught=0, pressure=1.5).target == 10
        loop.follow()


def test_who_waits_for_the_teacher_of_an_evaluation_is_not_too_many() -> None:
    loop = Loop()
    loop.tick(60)
    for _ in range(300):  # nobody starves for it, and nothing of it is eaten
        assert loop.tick(eats=0.0, per_worker=0.0, pressure=0.0, untaught=8).target == 10
    for _ in range(300):
        assert loop.tick(untaught=0, pressure=1.5).target == 10


def test_a_slow_teacher_keeps_nobody_from_coming() -> None:
    loop = Loop()
    loop.tick(60)
    for _ in range(60):
        starve(loop, 1, eats=80.0, untaught=10)
        loop.follow()
    assert loop.last.target > 10, "its answers come"


def test_an_operator_is_obeyed_while_the_teacher_is_away() -> None:
    loop = Loop()
    loop.tick(60)
    assert loop.tick(10, per_worker=0.0, untaught=10, wanted=3).target == 3


def test_workers_that_all_become_slower_are_more() -> None:
    loop = Loop()
    loop.tick(120)
    for _ in range(300):
        starve(loop, 1, eats=10.0, per_worker=1.0)
        loop.follow()
    assert not loop.saturation.capacity
    assert loop.last.target >= 20


def test_of_those_that_lived_at_the_beginning_some_may_be_on_their_way_out() -> None:
    law = PressureController(1, 50, ScalingConfig())
    state = law.initial(8)
    silent = PressureSample(crew=WorkerCounts(starting=8))
    state, decision = law.decide(state, silent, 0.0)
    assert decision.target == 8
    sample = PressureSample(crew=WorkerCounts(ready=4, draining=4), heard_at=1.0, number=1)
    state, decision = law.decide(state, sample, 1.0)
    assert decision.target == 4
    sample = replace(sample, heard_at=2.0, number=2)
    assert law.decide(state, sample, 2.0)[1].target == 4


def test_what_is_measured_goes_on_under_an_operators_number() -> None:
    loop = Loop()
    loop.tick(60, wanted=10)
    assert loop.state.rates.demand == pytest.approx(20.0, rel=0.1)


def test_workers_that_start_count_as_started() -> None:
    loop = Loop()
    loop.tick(60)
    loop.tick(90, eats=40.0)
    wanted = loop.last.target
    loop.sample = replace(loop.sample, crew=WorkerCounts(ready=10, starting=wanted - 10))
    assert loop.tick(60, eats=40.0).target == wanted


def test_a_full_queue_takes_nobody_away_by_itself() -> None:
    loop = Loop(workers=20)
    loop.tick(60, eats=40.0)
    assert loop.tick(600, eats=40.0, pressure=50.0).target == 20


@pytest.mark.parametrize(("workers", "left"), [(4, 1), (40, 4)])
def test_idle_workers_that_were_never_measured_go(workers: int, left: int) -> None:
    """A restarted orchestrator finds them so: a tenth of them suffices, and none was ever seen at full work."""
    loop, eats, fastest, blocked_s = Loop(workers=workers), workers / 2, 5.0, 0.0
    for _ in range(240):
        ready = loop.sample.crew.ready
        blocked_s += loop.sample.slots * max(0.0, ready - eats / fastest)
        loop.tick(eats=eats, per_worker=eats / ready, pressure=3.9, blocked_s=blocked_s)
        loop.follow()
    assert left <= loop.last.target <= left + 1, loop.last.reason


def test_unmeasured_workers_stay_while_they_work() -> None:
    loop = Loop(workers=4)
    for second in range(60):
        loop.tick(eats=0.0, per_worker=2.0, pressure=3.9, blocked_s=second * 0.1)
        assert loop.last.target == 4


def test_what_is_shared_and_full_is_said_and_gone_back_from() -> None:
    loop = Loop()
    loop.tick(60)
    waited, reasons = 0.0, []
    for _ in range(400):
        waited += 0.5
        ready = loop.last.target
        loop.follow()
        shared = min(2.0, 40.0 / ready)
        loop.tick(eats=40.0, per_worker=shared, pressure=0.0, starved_s=waited)
        reasons.append(loop.last.reason)
    assert 18 <= loop.last.target <= 28
    assert any("inference_bound" in reason for reason in reasons)


def starve(loop: Loop, seconds: int, **changes: Any) -> Decision:
    """Let the trainer wait for most of the time."""
    for _ in range(seconds):
        loop.tick(pressure=0.0, starved_s=loop.sample.starved_s + 0.6, **changes)
    return loop.last


@pytest.mark.parametrize(
    ("server", "target"),
    [(ServerLimit(reach=12), 12), (ServerLimit(reach=3), 10), (ServerLimit(slow=True), 10)],
)
def test_what_is_not_measured_yet_is_a_bound(server: ServerLimit, target: int) -> None:
    loop = Loop()
    loop.tick(60)
    starve(loop, 20, eats=40.0, server=server)
    assert (loop.last.target, loop.last.bound) == (target, "unmeasured")
    assert loop.last.short > 0.0


@pytest.mark.parametrize(("tried", "target"), [(0, 20), (35, 35)])
def test_as_many_as_ran_before_start_in_one_step(tried: int, target: int) -> None:
    loop = Loop()
    loop.tick(60)
    starve(loop, 4, eats=40.0, server=ServerLimit(tried=tried))
    assert loop.last.target == target


def test_without_a_trainer_everybody_stays() -> None:
    loop = Loop(workers=40)
    loop.tick(60, eats=80.0)
    decision = loop.tick(300, eats=0.0, trainers=0)
    assert (decision.target, decision.reason) == (40, "hold: no trainer")
    assert loop.tick(20, eats=80.0, trainers=1).target == 40


def test_workers_that_wait_are_not_joined_by_more() -> None:
    loop = Loop()
    loop.tick(60)
    four_fifths = 0.8 * 10 * 2  # of a second of ten workers with two slots
    for second in range(60):
        blocked_s = loop.sample.blocked_s + four_fifths
        waiting: dict[str, Any] = {"blocked_s": blocked_s, "wait": "stale_guard", "per_worker": 0.4}
        decision = loop.tick(**waiting) if second < 20 else starve(loop, 1, eats=80.0, **waiting)
    assert decision.target == 10
    assert "the workers wait themselves (stale_guard)" in decision.reason


def test_it_goes_no_further_than_there_is_room() -> None:
    loop = Loop()
    loop.tick(60)
    decision = loop.tick(60, eats=80.0, room=WorkerRoom(14, "no_gpu"))
    assert (decision.target, decision.bound) == (14, "no_gpu")
    assert "no_gpu: room for 14" in decision.reason
    assert decision.want is not None
    assert decision.short == pytest.approx(decision.want - 14)
    assert loop.tick(eats=80.0, room=WorkerRoom(12, "budget")).target == 12, "a room that shrinks is left"
    assert loop.tick(wanted=50, room=WorkerRoom(13, "budget")).target == 13
    assert loop.tick(60, eats=80.0, wanted=None, room=None).target > 14


def test_another_engine_is_another_capacity() -> None:
    loop = Loop()
    loop.tick(60, engines=1)
    for _ in range(300):
        ready = loop.last.target
        loop.follow()
        starve(loop, 1, eats=20.0, per_worker=min(2.0, 30.0 / ready), engines=1)
    assert loop.last.bound == "inference_bound"
    assert loop.last.short > 0.0
    for _ in range(120):
        ready = loop.last.target
        loop.follow()
        starve(loop, 1, eats=20.0, per_worker=min(2.0, 120.0 / ready), engines=2)
    assert not loop.last.bound
    assert loop.last.target >= 20


def test_a_queue_that_falls_is_taken_for_emptier_if_that_is_asked_for() -> None:
    def want(derivative_s: float) -> float:
        loop = Loop(PressureController(1, 50, ScalingConfig(derivative_s=derivative_s)))
        loop.tick(60, pressure=6.0)
        for step in range(50):
            decision = loop.tick(pressure=6.0 - 0.1 * step)
        assert decision.want is not None
        return decision.want

    assert want(30.0) > want(0.0) + 0.3


counts = st.integers(0, 60)
seconds = st.floats(0.0, 1e5)
samples = st.builds(
    PressureSample,
    crew=st.builds(WorkerCounts, counts, counts, counts, counts),
    heard_at=st.floats(0.0, 1e6),
    number=st.integers(0, 100),
    pressure=st.floats(0.0, 1e6),
    wanted=st.none() | st.integers(-5, 1000),
    batch_sequences=st.floats(1.0, 1e6),
    eaten=st.integers(0, 10**12),
    made=st.integers(0, 10**12),
    epoch=st.integers(0, 2),
    trainers=st.integers(0, 2),
    starved_s=seconds,
    blocked_s=seconds,
    slots=st.integers(1, 64),
    rollout_s=st.floats(0.0, 1e4),
    untaught=st.integers(0, 60),
    engines=st.integers(0, 3),
    room=st.none() | st.builds(WorkerRoom, st.integers(0, 100), st.just("budget")),
)


@given(
    st.integers(0, 5), st.integers(0, 60), st.lists(st.tuples(st.floats(-10.0, 100.0), samples), max_size=40)
)
def test_whatever_is_seen_the_target_stays_within_its_bounds(
    least: int, more: int, ticks: list[tuple[float, PressureSample]]
) -> None:
    law = PressureController(least, least + more, ScalingConfig())
    state, now = law.initial(1000), 1000.0
    for elapsed, sample in ticks:
        now += elapsed
        again = law.decide(state, sample, now)
        state, decision = law.decide(state, sample, now)
        assert (state, decision) == again, "the same again gives the same"
        assert least <= decision.target <= least + more
        assert state.target == decision.target
        assert math.isfinite(state.trim)


@pytest.mark.parametrize("workers", [0, 7, 1000])
def test_it_begins_with_those_that_live(workers: int) -> None:
    assert LAW.initial(workers).target == min(max(workers, 1), 50)


@pytest.mark.parametrize(("batch", "most"), [(60, 2), (1200, 8), (16000, 45)])
def test_for_the_first_batch_no_more_are_started_than_it_takes(batch: int, most: int) -> None:
    """Eight may come in any case; more only for a batch that takes them three minutes."""
    loop = Loop(workers=1)
    targets = []
    for _ in range(90):
        decision = loop.tick(eats=0.0, pressure=0.0, batch_sequences=batch, starved_s=loop.now)
        targets.append(decision.target)
        loop.follow()
    assert max(targets) == most
    assert "one is complete within" in loop.last.reason


def test_workers_that_made_groups_are_not_called_unmeasured() -> None:
    def blocked(seconds: int) -> str:
        for _ in range(seconds):
            loop.tick(blocked_s=loop.sample.blocked_s + 0.9 * 2 * loop.sample.crew.ready)
        return loop.last.reason

    loop = Loop(PressureController(4, 4, ScalingConfig()), 4)
    assert blocked(1) == "hold: no measurement yet"
    assert re.fullmatch(r"hold: throughput of a worker unknown: workers wait 9\d% of their time", blocked(40))
