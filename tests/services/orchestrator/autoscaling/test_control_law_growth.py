"""Growth of the control law: what chance in the rates, and a lack of credit, may not do to the number of workers."""

import random
from itertools import pairwise

from msgspec.structs import replace
from tests.services.orchestrator.autoscaling.control_loop import Loop

from rolloutmq.services.orchestrator.autoscaling.pressure import ServerLimit, WorkerCounts

FREE = ServerLimit()
START_S = 120.0


def changes(targets: list[int]) -> list[int]:
    return [late - early for early, late in pairwise(targets) if late != early]


def test_a_want_that_varies_by_chance_withdraws_no_worker() -> None:
    """A want of 4.1 to 4.7 used to start a fifth worker, withdraw it, and start it anew."""
    loop = Loop(workers=4)
    loop.tick(60, eats=8.0, crew=WorkerCounts(ready=4, start_s=START_S), server=FREE)
    targets = []
    for second in range(50):
        crew = WorkerCounts(ready=4, starting=max(0, loop.last.target - 4), start_s=START_S)
        targets.append(loop.tick(eats=8.0 if second // 15 % 2 else 9.0, crew=crew, server=FREE).target)
    assert changes(targets) == [1]


def tied(idle: float) -> tuple[Loop, set[int]]:
    """Return a loop of workers that wait for credit, beside a trainer that waits for groups, and its last targets."""
    loop = Loop()
    loop.tick(90, pressure=0.9, rollout_s=30.0, server=FREE)
    for _ in range(10):
        waits(loop, idle)
    return loop, {waits(loop, idle) for _ in range(80)}


def waits(loop: Loop, idle: float) -> int:
    sample = loop.sample
    blocked_s = sample.blocked_s + idle * sample.slots * sample.crew.ready
    starved_s = sample.starved_s + 0.8
    return loop.tick(eats=8.0, blocked_s=blocked_s, starved_s=starved_s, pressure=0.5, server=FREE).target


def test_workers_that_wait_for_credit_while_the_trainer_waits_for_groups_bring_no_others() -> None:
    """All credit is in running rollouts: more workers would wait, too."""
    loop, targets = tied(idle=0.35)
    assert len(targets) == 1
    assert "the workers wait themselves" in loop.last.reason
    assert {waits(loop, 0.1) for _ in range(20)} == targets, "credit comes back with the rollouts"
    assert max(waits(loop, 0.0) for _ in range(60)) > max(targets), "they wait no longer"


def test_busy_workers_bring_others_for_a_trainer_that_waits() -> None:
    assert max(tied(idle=0.0)[1]) > 14


def test_the_refill_leaves_room_for_what_chance_makes_of_the_rates() -> None:
    """The fleet follows the highest want: with two standard errors of the rates it stays within the dead band."""
    loop, chance, parts = Loop(workers=40), random.Random(3), []
    loop.tick(60, eats=80.0, server=FREE)
    for _ in range(300):
        per_worker = chance.gauss(2.0, 0.2)
        last = loop.tick(eats=80.0, per_worker=per_worker, pressure=0.3, batch_sequences=1200, server=FREE)
        rates = loop.state.rates
        need = (rates.demand or 0.0) / (rates.per_worker or 1.0)
        parts.append((last.want or 0.0) / need - 1.0 + 2.0 * rates.error)
    assert 0.05 < max(parts) <= loop.law.scaling.band_part


def by_chance(loop: Loop, chance: random.Random, eats: float, pressure: float, seconds: int) -> list[int]:
    """Return the targets while groups of eight arrive at random times, and each worker makes two sequences a second."""
    targets = []
    for _ in range(seconds):
        groups = sum(chance.random() < 0.05 for _ in range(5 * loop.sample.crew.ready))
        made = loop.sample.made + 8 * groups
        loop.sample = replace(loop.sample, made=made, group_sequences=8)
        targets.append(loop.tick(eats=eats, per_worker=0.0, pressure=pressure, server=FREE).target)
        loop.follow()
    return targets


def test_a_long_queue_bridges_what_chance_makes_of_the_rates() -> None:
    """Forty workers feed the trainer: a short queue brings others now and then, and a long one none."""
    for pressure, starts in ((1.5, True), (6.0, False)):
        targets = by_chance(Loop(workers=40), random.Random(5), 80.0, pressure, 600)
        assert (max(targets) > 40) == starts


def test_a_step_down_keeps_what_surely_suffices() -> None:
    """The wants of a window follow from about the same groups: all of them may be too low."""
    for seed in range(8):
        targets = by_chance(Loop(workers=50), random.Random(seed), 60.0, 6.0, 400)
        assert 30 <= min(targets) < 40, "thirty feed the trainer"
