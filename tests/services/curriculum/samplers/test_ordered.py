"""Uniform, easy-first, and competence."""

from collections import Counter
from typing import Any

import pytest

from rolloutmq.services.curriculum.samplers.ordered import competence, easy_first, uniform
from rolloutmq.services.curriculum.samplers.sampler import OptionError, Outcome, Sampler, TaskSpace

SPACE = TaskSpace(1000, 4, expected=400, seed="s")


def heard(sampler: Sampler, outcomes: int) -> None:
    for _ in range(outcomes):
        sampler.update(Outcome(0, 4, 0.5, 0.5, flat=False))


def test_uniform_draws_every_task_alike_whatever_comes() -> None:
    sampler = uniform(TaskSpace(5, seed="s"), {})
    heard(sampler, 10)
    counts = Counter(sampler.draw(number) for number in range(5000))
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert all(abs(count - 1000) < 120 for count in counts.values())
    with pytest.raises(OptionError, match="unknown option"):
        uniform(SPACE, {"x": 1})


def test_easy_first_walks_through_all_tasks_once_and_then_draws_alike() -> None:
    sampler = easy_first(SPACE, {"draws": 100})
    walk = [sampler.draw(number) for number in range(100)]
    assert [index // 10 for index in walk] == list(range(100)), "draw k is from the k-th part"
    after = [sampler.draw(number) for number in range(100, 300)]
    assert min(after) < 100
    assert max(after) > 900


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    # Platanios et al. 2019, equation 7, with c0 = 0.01, p = 2 and T = 200, half of the groups of the run.
    [(0, 0.01), (100, 0.70714), (200, 1.0), (300, 1.0)],
)
def test_competence_grows_as_published(outcomes: int, wanted: float) -> None:
    sampler = competence(SPACE, {})
    heard(sampler, outcomes)
    assert sampler.competence == pytest.approx(wanted, abs=1e-5)
    drawn = [sampler.draw(number) for number in range(2000)]
    known = round(wanted * 1000)
    assert max(drawn) < known
    assert max(drawn) >= 0.9 * known - 1, "all of that part is drawn from"


def test_linear_competence() -> None:
    sampler = competence(SPACE, {"power": 1, "start": 0.2, "outcomes": 10})
    heard(sampler, 5)
    assert sampler.competence == pytest.approx(0.6)


def test_a_fraction_of_a_task_is_a_task() -> None:
    sampler = competence(TaskSpace(3, expected=100), {})
    assert {sampler.draw(number) for number in range(50)} == {0}


@pytest.mark.parametrize(("make", "option"), [(easy_first, "draws"), (competence, "outcomes")])
def test_without_the_length_of_the_run_the_length_of_the_curriculum_is_required(
    make: Any, option: str
) -> None:
    unknown = TaskSpace(10)
    with pytest.raises(OptionError, match=f"{option}: is required without the shipped trainer"):
        make(unknown, {})
    make(unknown, {option: 5})


@pytest.mark.parametrize("make", [uniform, easy_first, competence])
def test_a_restored_sampler_draws_the_same(make: Any) -> None:
    one, other = make(SPACE, {}), make(SPACE, {})
    heard(one, 77)
    other.restore(one.state())
    assert [one.draw(number) for number in range(50)] == [other.draw(number) for number in range(50)]
    assert other.state() == one.state()


@pytest.mark.parametrize("make", [easy_first, competence])
def test_a_run_of_other_length_continues_the_walk_that_it_began(make: Any) -> None:
    one, longer = make(SPACE, {}), make(TaskSpace(1000, 4, expected=4000, seed="s"), {})
    heard(one, 77)
    assert [one.draw(number) for number in range(77, 127)] != [
        longer.draw(number) for number in range(77, 127)
    ]
    longer.restore(one.state())
    for _ in range(3):
        assert [one.draw(number) for number in range(300)] == [longer.draw(number) for number in range(300)]
        heard(one, 60)
        heard(longer, 60)
