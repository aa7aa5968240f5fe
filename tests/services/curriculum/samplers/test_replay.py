"""Prioritised replay against a naive ranking, its probabilities, and its state."""

import random
from collections import Counter

import pytest

from rolloutmq.services.curriculum.samplers.replay import Replay, replay
from rolloutmq.services.curriculum.samplers.sampler import OptionError, Outcome, TaskSpace


def outcome(index: int, deviation: float) -> Outcome:
    return Outcome(index, 8, 0.5, deviation, flat=not deviation)


def shares(sampler: Replay, draws: int = 20_000) -> dict[int, float]:
    return {task: count / draws for task, count in Counter(map(sampler.draw, range(draws))).items()}


def test_at_first_every_task_is_new() -> None:
    sampler = replay(TaskSpace(10, seed="s"), {"new": 0.0})
    assert len({sampler.draw(number) for number in range(200)}) == 10


def test_new_tasks_and_replays_are_mixed() -> None:
    sampler = replay(TaskSpace(100, seed="s"), {"new": 0.3})
    for index in range(50):
        sampler.update(outcome(index, 0.2))
    drawn = shares(sampler)
    assert sum(share for task, share in drawn.items() if task >= 50) == pytest.approx(0.3, abs=0.02)


def test_replays_have_the_published_probabilities() -> None:
    rho, beta, deviations = 0.3, 0.5, [0.1, 0.4, 0.2, 0.3]
    sampler = replay(TaskSpace(4, seed="s"), {"rho": rho, "beta": beta})
    for index, deviation in enumerate(deviations):
        sampler.update(outcome(index, deviation))
    by_rank = [(1 / rank) ** (1 / beta) for rank in (4, 1, 3, 2)]
    waits = [4 - at for at in (1, 2, 3, 4)]
    drawn = shares(sampler)
    for task in range(4):
        wanted = (1 - rho) * by_rank[task] / sum(by_rank) + rho * waits[task] / sum(waits)
        assert drawn[task] == pytest.approx(wanted, abs=0.01), task


def test_a_task_is_ranked_by_its_last_group() -> None:
    sampler = replay(TaskSpace(3, seed="s"), {"rho": 0.0, "beta": 0.1})
    for index, deviation in ((0, 0.5), (1, 0.3), (2, 0.1), (0, 0.0)):
        sampler.update(outcome(index, deviation))
    assert shares(sampler)[1] > 0.99


def test_one_task_that_has_not_waited_is_replayed_nevertheless() -> None:
    sampler = replay(TaskSpace(1, seed="s"), {"rho": 1.0})
    sampler.update(outcome(0, 0.1))
    assert sampler.draw(7) == 0


def test_the_ranking_is_that_of_a_sorted_list() -> None:
    rng = random.Random(5)
    sampler = replay(TaskSpace(60), {})
    last: dict[int, float] = {}
    for _ in range(500):
        index, deviation = rng.randrange(60), rng.randrange(51) / 100
        sampler.update(outcome(index, deviation))
        last[index] = deviation
        ranked = [last[sampler._ranking.at(rank)] for rank in range(len(last))]
        assert ranked == sorted(last.values(), reverse=True)
        assert len({sampler._ranking.at(rank) for rank in range(len(last))}) == len(last)


def test_a_restored_sampler_draws_the_same() -> None:
    rng, space = random.Random(4), TaskSpace(40, seed="s")
    one, other = replay(space, {}), replay(space, {})
    for _ in range(200):
        one.update(outcome(rng.randrange(30), rng.random() / 2))
    other.restore(one.state())
    for number in range(200):
        assert one.draw(number) == other.draw(number)
        fresh = outcome(rng.randrange(40), rng.random() / 2)
        one.update(fresh)
        other.update(fresh)
    assert other.state() == one.state()


def test_a_state_of_another_space_is_refused() -> None:
    one = replay(TaskSpace(10), {})
    one.update(outcome(9, 0.5))
    with pytest.raises(ValueError, match="unknown task 9"):
        replay(TaskSpace(9), {}).restore(one.state())


@pytest.mark.parametrize("options", [{"new": -0.1}, {"rho": 2}, {"beta": 0}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        replay(TaskSpace(10), options)
