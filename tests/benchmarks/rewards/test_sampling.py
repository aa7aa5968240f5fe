"""The measurement of samplers, with few tasks."""

import random

import pytest

from benchmarks.rewards import sampling


@pytest.mark.parametrize("name", sampling.SAMPLERS)
def test_a_sampler_is_timed(name: str) -> None:
    sampler = sampling.made(sampling.SAMPLERS[name], 500)
    before = sampler.state()
    assert sampling.cost(sampler, 500, choices=50) > 0
    assert sampler.state() != before, "it hears the outcomes"


def test_the_naive_choice_is_timed() -> None:
    assert sampling.naive(500, choices=20)() > 0


def test_outcomes_are_those_of_scores_of_0_and_1() -> None:
    one = sampling.outcome(3, random.Random(1))
    assert one.deviation == pytest.approx((one.success * (1 - one.success)) ** 0.5)
