"""Learnability: its posteriors, its choice, and its state."""

import random
from collections import Counter

import msgspec
import pytest

from rolloutmq.services.curriculum.samplers.learnability import (
    Learnability,
    LearnabilityOptions,
    learnability,
    weight_of,
)
from rolloutmq.services.curriculum.samplers.sampler import OptionError, Outcome, TaskSpace


def outcome(index: int, success: float, *, flat: bool | None = None, sequences: int = 16) -> Outcome:
    return Outcome(
        index,
        sequences,
        success,
        (success * (1 - success)) ** 0.5,
        success in {0, 1} if flat is None else flat,
    )


def level_shares(sampler: Learnability, space: TaskSpace, draws: int = 4000) -> list[float]:
    counts = Counter(space.level_of(sampler.draw(number)) for number in range(draws))
    return [counts[level] / draws for level in range(space.levels)]


def test_new_tasks_are_drawn_alike() -> None:
    space = TaskSpace(1000, 4, seed="s")
    assert all(abs(share - 0.25) < 0.03 for share in level_shares(learnability(space, {}), space))


def test_the_weight_is_that_of_the_posterior_means() -> None:
    sampler = learnability(TaskSpace(4, 2), {"decay": 1.0})
    sampler.update(outcome(0, 0.75))
    sampler.update(outcome(1, 1.0))
    # Level 0: Beta(1 + 28, 1 + 4), and one group of two with a spread; level 1 has its prior.
    assert sampler._levels.posterior(0) == pytest.approx((29 / 34, 2 / 4))
    assert sampler._levels.posterior(1) == (0.5, 0.5)
    assert weight_of(LearnabilityOptions(), (29 / 34, 2 / 4)) == pytest.approx(29 / 34 * 5 / 34 * 2 / 4)
    # Task 0 after its group: Beta(2 * 13 / 18 + 12, 2 * 5 / 18 + 4), for the level was at 13 / 18 and 2 / 3 then.
    p, s = (2 * 13 / 18 + 12) / 18, (2 * 2 / 3 + 1) / 3
    assert sampler._within[0][0] == pytest.approx(p * (1 - p) * s / (13 / 18 * 5 / 18 * 2 / 3))
    assert (sampler._within[1][0], sampler._within[1][1]) == (1.0, 1.0), "as their level"


def test_the_headroom_counts_a_difficult_task_with_a_signal_and_no_hopeless_one() -> None:
    headroom = LearnabilityOptions(gain="headroom", sharpness=2.0)
    assert weight_of(headroom, (0.2, 0.9)) == pytest.approx((0.8 * 0.9) ** 2)
    assert (
        weight_of(headroom, (0.2, 0.9)) > weight_of(headroom, (0.8, 0.9)) > weight_of(headroom, (0.01, 0.1))
    )
    assert weight_of(LearnabilityOptions(sharpness=10.0), (1 - 1e-15, 1e-15)) == 1e-100, "no weight is 0"


def test_evidence_decays() -> None:
    sampler = learnability(TaskSpace(1), {"decay": 1.0, "task_decay": 0.5})
    for success in (0.0, 1.0, 1.0):
        sampler.update(outcome(0, success, sequences=8))
    # 8 * (1 + 1/2) solved, 8 / 4 not, and no spread with the weights 1, 1/2, 1/4.
    assert list(sampler._tasks.of(0)) == pytest.approx([12.0, 2.0, 0.0, 1.75])


def test_a_mastered_and_a_hopeless_level_are_left_for_one_that_teaches() -> None:
    space = TaskSpace(4000, 4, seed="s")
    sampler = learnability(space, {"explore": 0.1})
    rng = random.Random(0)
    for number, success in enumerate([1.0, 0.9, 0.5, 0.0] * 30):
        level = number % 4
        sampler.update(outcome(rng.randrange(1000 * level, 1000 * (level + 1)), success))
    shares = level_shares(sampler, space)
    assert shares[2] > 0.5 > shares[1] > shares[0]
    assert 0.02 < shares[0] < 0.05, "exploration: a tenth of the draws in four levels"
    assert 0.02 < shares[3] < 0.05


def test_partial_credit_without_spread_teaches_nothing() -> None:
    space = TaskSpace(2000, 2, seed="s")
    sampler = learnability(space, {"explore": 0.0})
    for number in range(40):
        sampler.update(outcome(number, 0.5, flat=True))
        sampler.update(outcome(1000 + number, 0.5, flat=False))
    assert level_shares(sampler, space)[1] > 0.85


def test_a_mastered_task_is_passed_over_within_its_level() -> None:
    sampler = learnability(TaskSpace(20, 1, seed="s"), {"explore": 0.0})
    for index in range(9):
        sampler.update(outcome(index, 1.0))
    sampler.update(outcome(9, 0.5))
    counts = Counter(sampler.draw(number) for number in range(4000))
    mastered, new = (
        sum(counts[index] for index in range(9)) / 9,
        sum(counts[index] for index in range(10, 20)) / 10,
    )
    assert counts[9] > 5 * new > 5 * 2 * mastered
    assert len(counts) == 20, "but none is forgotten"


def test_an_old_weight_is_relative_to_the_level_of_its_time() -> None:
    sampler = learnability(TaskSpace(100, 1, seed="s"), {"explore": 0.0})
    sampler.update(outcome(0, 0.5))
    for index in range(1, 60):
        sampler.update(outcome(index, 0.95, flat=False))
    counts = Counter(sampler.draw(number) for number in range(4000))
    assert counts[0] < 120, "the level has moved on, and the task most likely with it"


def test_a_change_is_noticed_within_a_few_outcomes() -> None:
    space = TaskSpace(2000, 2, seed="s")
    sampler = learnability(space, {})
    for number in range(100):
        sampler.update(outcome(number, 1.0))
        sampler.update(outcome(1000 + number, 0.5))
    assert level_shares(sampler, space)[0] < 0.1
    for number in range(20):
        sampler.update(outcome(number, 0.5))
    assert level_shares(sampler, space)[0] > 0.35


def test_a_restored_sampler_is_the_same_to_the_last_bit() -> None:
    space, rng = TaskSpace(500, 7, seed="s"), random.Random(3)
    one, other = learnability(space, {}), learnability(space, {})
    for _ in range(300):
        one.update(outcome(rng.randrange(500), rng.random(), sequences=rng.randrange(1, 20)))
    other.restore(one.state())
    assert other.state() == one.state()
    for number in range(200):
        assert one.draw(number) == other.draw(number)
        fresh = outcome(rng.randrange(500), rng.random())
        one.update(fresh)
        other.update(fresh)
    assert other.state() == one.state()


def test_a_state_of_another_space_is_refused() -> None:
    state = learnability(TaskSpace(10, 2), {}).state()
    with pytest.raises(ValueError, match="another task space"):
        learnability(TaskSpace(10, 3), {}).restore(state)
    seen = learnability(TaskSpace(10, 2), {})
    seen.update(outcome(9, 0.5))
    with pytest.raises(ValueError, match="unknown task 9"):
        learnability(TaskSpace(9, 2), {}).restore(seen.state())
    with pytest.raises(msgspec.DecodeError):
        seen.restore(b"\xc1")


def test_options_out_of_range_are_refused() -> None:
    for options in ({"explore": 1.1}, {"decay": 0}, {"decay": "x"}):
        with pytest.raises(OptionError):
            learnability(TaskSpace(10), options)
