import math
import random
from statistics import median

import pytest

from rolloutmq.services.orchestrator.autoscaling.demand import GAP_S, DemandEstimator
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample, WorkerCounts
from rolloutmq.services.orchestrator.autoscaling.settlements import LATE


class Watch:
    """Looks once a second at a plant that does what it is told."""

    def __init__(self) -> None:
        self.rates = DemandEstimator()
        self.at = 100.0
        self.eaten = self.made = 0
        self.trainer_s = self.workers_s = self.pressure = 0.0

    def second(
        self,
        *,
        eats: int = 0,
        makes: int = 0,
        trainer_waits: float = 0.0,
        workers_wait: float = 0.0,
        ready: int = 4,
        after: float = 1.0,
        rollout_s: float = 0.0,
        epoch: int = 0,
        settled_busy_s: float = 0.0,
        share: float = 1.0,
        trainers: int = 1,
        untaught: int = 0,
        draining: int = 0,
        group_sequences: int = 1,
    ) -> None:
        self.at += after
        self.eaten += eats
        self.made += makes
        self.trainer_s += trainer_waits
        self.workers_s += workers_wait
        seen = PressureSample(
            crew=WorkerCounts(ready=ready, draining=draining),
            untaught=untaught,
            group_sequences=group_sequences,
            pressure=self.pressure,
            eaten=self.eaten,
            made=self.made,
            starved_s=self.trainer_s,
            blocked_s=self.workers_s,
            slots=2,
            rollout_s=rollout_s,
            epoch=epoch,
            settled_busy_s=settled_busy_s,
            share=share,
            trainers=trainers,
        )
        self.rates = self.rates.looked(seen, self.at)


def fed(watch: Watch, seconds: int, *, busy: int, batch: int = 60, waits: int = 0) -> None:
    """Let a trainer take `busy` seconds for a batch, and wait for each so many."""
    for second in range(seconds):
        turn = second % (busy + waits)
        asleep = turn < waits
        watch.second(eats=batch * (turn == busy + waits - 1), trainer_waits=float(asleep))


def test_a_time_of_settlements_that_runs_backwards_is_not_believed() -> None:
    """Two trainers that wait at once count twice."""
    watch = Watch()
    for second in range(60):
        watch.second(eats=40, trainer_waits=0.0, settled_busy_s=1000.0 - second)
    assert watch.rates.demand == pytest.approx(40.0, rel=0.05)


def test_the_exact_times_of_settlements_count_more_than_the_samples() -> None:
    """A step of 1.6 s is seen after one second or two."""
    watch, settled_s = Watch(), 0.0
    for second in range(1, 121):
        eats = int(second / 1.6) - int((second - 1) / 1.6)
        settled_s += 1.6 * eats
        watch.second(eats=64 * eats, settled_busy_s=settled_s)
        if second > 30:
            assert watch.rates.demand == pytest.approx(40.0)


def test_the_absence_of_a_trainer_is_no_step() -> None:
    watch = Watch()
    for second in range(1, 481):
        watch.second(eats=600 * (second % 60 == 0), settled_busy_s=100.0 + 60.0 * (second // 60))
    for _ in range(600):
        watch.second(trainers=0, settled_busy_s=580.0)
    watch.second(trainer_waits=1.0, settled_busy_s=580.0)
    for second in range(1, 121):
        watch.second(
            eats=600 * (second % 60 == 0),
            settled_busy_s=580.0 if second < 60 else 1180.0 + 60.0 * (second // 60),
        )
        assert watch.rates.demand == pytest.approx(10.0)


def test_workers_that_waited_for_a_trainer_that_was_away_begin_anew() -> None:
    """Once it is back, nothing arrives for one rollout: that time is none in which they worked."""
    watch = Watch()
    for second in range(400):
        watch.second(eats=80 * (second % 10 == 9), makes=8 if second >= 30 else 0, rollout_s=30.0)
    before = watch.rates.per_worker
    for _ in range(300):
        watch.second(workers_wait=8.0, rollout_s=30.0, trainers=0)
    for second in range(90):
        watch.second(eats=80 * (second % 10 == 9), makes=8 if second >= 30 else 0, rollout_s=30.0)
        assert watch.rates.per_worker == pytest.approx(before, rel=0.1)


def test_a_batch_that_is_taken_after_a_pause_ends_it() -> None:
    watch = Watch()
    fed(watch, 120, busy=5)
    usual = watch.rates.demand or 0.0
    watch.pressure = 4.0
    for _ in range(60):
        watch.second()
    assert (watch.rates.demand or 0.0) < usual / 3.0
    watch.pressure = 3.2
    watch.second()
    assert watch.rates.demand == pytest.approx(usual, rel=0.1), "before that batch is settled"


def test_the_first_batch_of_a_trainer_that_waited_counts() -> None:
    watch = Watch()
    for second in range(1, 14):
        watch.second(eats=60 * (second == 10), trainer_waits=float(second <= 6))
    assert watch.rates.demand == pytest.approx(60 / 4, rel=0.3)


def test_a_batch_that_waits_for_the_teacher_is_no_slow_step() -> None:
    watch = Watch()
    for second in range(120):
        watch.second(eats=60 * (second % 4 == 3), makes=15)
    for _ in range(100):
        watch.second(untaught=4)
    assert watch.rates.demand == pytest.approx(15.0)


def test_arrivals_of_draining_workers_are_not_those_of_the_others() -> None:
    watch = Watch()
    for _ in range(60):
        watch.second(makes=8)
    for _ in range(30):
        watch.second(makes=16, draining=4)
    assert watch.rates.per_worker == pytest.approx(2.0)


def test_a_changed_share_changes_no_pace() -> None:
    watch = Watch()
    fed(watch, 120, busy=4)
    for share in (0.5, 0.0, 1.0):
        watch.second(share=share)
        assert watch.rates.pace == pytest.approx(15.0)
        assert watch.rates.demand == pytest.approx(15.0 * share)


@pytest.mark.parametrize("waits", [0, 4, 36])
def test_what_a_trainer_would_eat_does_not_depend_on_what_it_gets(waits: int) -> None:
    watch = Watch()
    fed(watch, 400, busy=4, waits=waits)
    assert watch.rates.demand == pytest.approx(15.0, rel=0.01)


def test_nothing_is_said_before_something_was_seen() -> None:
    watch = Watch()
    assert watch.rates.demand is None
    assert watch.rates.per_worker is None
    fed(watch, 9, busy=2)
    assert watch.rates.demand is None
    fed(watch, 10, busy=2)
    assert watch.rates.demand is not None


def test_a_change_of_appetite_is_followed_within_a_few_batches() -> None:
    watch = Watch()
    fed(watch, 120, busy=4)
    fed(watch, 24, busy=2)
    assert watch.rates.demand == pytest.approx(30.0, rel=0.15)


def test_a_batch_that_takes_long_says_that_less_is_eaten() -> None:
    watch = Watch()
    fed(watch, 120, busy=4)
    fed(watch, 41, busy=100)
    assert watch.rates.demand is not None
    assert watch.rates.demand < 15.0 / LATE


def test_a_worker_is_not_blamed_for_waiting() -> None:
    watch = Watch()
    for _ in range(60):
        watch.second(makes=4, workers_wait=4.0)  # half of the time of four workers with two slots
    assert watch.rates.per_worker == pytest.approx(2.0)
    for _ in range(60):
        watch.second(makes=0, workers_wait=8.0)
    assert watch.rates.per_worker == pytest.approx(2.0), "who waits all the time says nothing"


def test_more_workers_change_nothing_of_what_one_makes() -> None:
    watch = Watch()
    before = 1
    for ready in (1,) * 10 + (20,) * 3:
        watch.second(makes=3 * before, ready=ready)
        before = ready
    assert watch.rates.per_worker == pytest.approx(3.0, rel=0.05)


def test_a_worker_counts_from_its_first_rollout_on() -> None:
    watch = Watch()
    for second in range(900):
        ready = 4 if second < 400 else 16
        came = 4 if second < 461 else 16  # what the new ones began comes a minute later
        watch.second(makes=3 * came, ready=ready, rollout_s=60.0)
        if second > 200:
            assert watch.rates.per_worker == pytest.approx(3.0, rel=0.05)
    assert len(watch.rates.readies) == 1


def test_a_broker_that_comes_back_counts_from_nothing() -> None:
    watch = Watch()
    fed(watch, 200, busy=4)
    before = watch.rates.demand
    watch.eaten = 1_000_000
    watch.second(epoch=1)
    assert watch.rates.demand == before


def test_a_gap_a_restart_and_a_clock_that_goes_back_are_no_rates() -> None:
    watch = Watch()
    for second in range(60):
        watch.second(eats=60 * (second % 4 == 3), makes=8)
    before = watch.rates
    watch.second(eats=1_000_000, makes=1_000_000, after=2 * GAP_S)
    assert (watch.rates.demand, watch.rates.per_worker) == (before.demand, before.per_worker)
    watch.eaten = watch.made = 0
    watch.trainer_s = watch.workers_s = 0.0
    watch.second()
    watch.second(after=-5.0)
    appetite, per_worker = watch.rates.demand, watch.rates.per_worker
    assert appetite is not None
    assert per_worker is not None
    assert 0.0 <= appetite < 16.0
    assert 0.0 < per_worker <= 2.0
    assert math.isfinite(watch.rates.starved)


@pytest.mark.parametrize("told_after", [0, 1])
def test_workers_that_wait_all_at_once_are_not_silent(told_after: int) -> None:
    """They stop from one second to the next where a queue is full, and tell of their waits up to a second later."""
    watch = Watch()
    for _ in range(60):
        watch.second(makes=320, ready=40, rollout_s=0.5)
    for second in range(30):
        watch.second(workers_wait=80.0 * (second >= told_after), ready=40, rollout_s=0.5)
        assert not watch.rates.silent
    assert watch.rates.per_worker == pytest.approx(8.0, rel=0.08)


def test_workers_from_which_nothing_comes_and_that_do_not_wait_are_silent() -> None:
    watch = Watch()
    for _ in range(60):
        watch.second(makes=320, ready=40, rollout_s=0.5)
    for _ in range(5):
        watch.second(ready=40, rollout_s=0.5)
    assert watch.rates.silent
    assert watch.rates.per_worker == pytest.approx(8.0, rel=0.05)


def test_a_pace_that_halves_shows_within_seconds() -> None:
    """The mean before is compared: that of all falls with the recent one."""
    watch = Watch()
    for _ in range(120):
        watch.second(makes=40, ready=20)
    for _ in range(12):
        watch.second(makes=20, ready=20)
    assert watch.rates.per_worker == pytest.approx(1.0, rel=0.2)


def test_groups_that_arrive_by_chance_are_averaged_for_longer() -> None:
    chance, watch, found = random.Random(5), Watch(), []
    for second in range(1800):
        groups = sum(chance.random() < 0.125 for _ in range(20))
        watch.second(makes=16 * groups, ready=20, group_sequences=16)
        if second > 600:
            found.append(watch.rates.per_worker or 0.0)
    assert max(found) / min(found) < 1.25
    assert 0.02 < watch.rates.error < 0.07


@pytest.mark.parametrize("together", [1, 4])
def test_the_error_of_a_throughput_is_the_one_it_has(together: int) -> None:
    """A mean that decays is worth more groups than it holds. Half of the errors are below 0.674 standard errors."""
    real, told = [], []
    for seed in range(12):
        chance, watch = random.Random(seed), Watch()
        for second in range(1500):
            groups = together * sum(chance.random() < 0.125 / together for _ in range(20))
            watch.second(makes=8 * groups, ready=20, group_sequences=8)
            if second > 800 and not second % 20:
                real.append((watch.rates.per_worker or 0.0) - 1.0)
                told.append(watch.rates.error)
    assert median(abs(one) for one in real) / 0.674 == pytest.approx(median(told), rel=0.25)


def test_one_worker_whose_groups_end_together_makes_no_change_of_pace() -> None:
    """Eight groups each five to fifteen seconds."""
    changes, paces = 0, []
    for seed in range(4):
        chance, watch, at = random.Random(seed), Watch(), 0.0
        for second in range(1800):
            before, groups = watch.rates.present_s, 0
            while at < second:
                groups, at = groups + 8, at + chance.uniform(5.0, 15.0)
            watch.second(makes=8 * groups, ready=1, rollout_s=10.0, group_sequences=8)
            changes += second > 200 and watch.rates.present_s < 0.7 * before
            paces.append(watch.rates.per_worker or 0.0)
    assert changes <= 1
    assert median(paces) == pytest.approx(6.4, rel=0.1)


def test_groups_that_arrive_together_are_no_outage_between() -> None:
    """Eight at once, a group a second on average: twenty seconds without any are no rarity."""
    chance, watch, silent = random.Random(3), Watch(), 0
    for second in range(2400):
        groups = 8 * (chance.random() < 0.125)
        watch.second(makes=8 * groups, ready=10, rollout_s=10.0, group_sequences=8)
        silent += second > 600 and watch.rates.silent
    assert silent <= 18
    assert watch.rates.per_worker == pytest.approx(0.8, rel=0.3)


def test_the_error_of_a_few_groups_is_large() -> None:
    watch = Watch()
    for second in range(48):
        watch.second(makes=8 * (second % 2), ready=6, group_sequences=8)
    assert watch.rates.error == pytest.approx(0.2, abs=0.05), "24 groups"


@pytest.mark.parametrize("batch_s", [4, 20])
def test_the_part_of_a_step_grows_until_the_next_batch(batch_s: int) -> None:
    watch, parts = Watch(), []
    for second in range(400):
        watch.second(
            eats=60 * (second % batch_s == batch_s - 1), settled_busy_s=100.0 + second // batch_s * batch_s
        )
        parts.append(watch.rates.step_part)
    assert parts[-batch_s:] == pytest.approx(
        [(second + 1) / batch_s for second in range(batch_s - 1)] + [0.0], abs=0.3
    )
    watch.second(trainer_waits=1.0)
    for _ in range(10):
        watch.second(trainer_waits=1.0)
    assert watch.rates.step_part > 0.95, "it waits for one"
