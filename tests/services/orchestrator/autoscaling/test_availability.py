import random
from statistics import fmean

import pytest

from rolloutmq.services.orchestrator.autoscaling.availability import Availability


class Fleet:
    """Workers that crash by chance and take a start to return, seen once a second."""

    def __init__(self, workers: int, start_s: int, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.up = workers
        self.back: list[int] = []
        self.now = 0
        self.start_s = start_s
        self.ready_s = 0.0
        self.found = Availability()

    def run(self, seconds: int, life_s: float) -> list[float]:
        parts = []
        for _ in range(seconds):
            self.now += 1
            self.up += sum(at <= self.now for at in self.back)
            self.back = [at for at in self.back if at > self.now]
            crashed = sum(self.chance.random() < 1.0 / life_s for _ in range(self.up))
            self.up -= crashed
            self.ready_s += self.up
            self.back += [self.now + self.start_s] * crashed
            self.found = self.found.looked(self.up, len(self.back), float(self.start_s), 1.0)
            parts.append(self.found.part)
        return parts


def test_workers_that_never_crash_are_available() -> None:
    fleet = Fleet(5, 20)
    assert set(fleet.run(600, life_s=1e12)) == {1.0}
    assert fleet.found.error == 0.0
    assert Availability().part == 1.0


@pytest.mark.parametrize("start_s", [2, 20, 120])
@pytest.mark.parametrize("life", [1.0, 9.0])
def test_it_is_the_part_of_the_time_in_which_workers_are_ready(start_s: int, life: float) -> None:
    fleet = Fleet(40, start_s)
    parts = fleet.run(3000, life_s=life * start_s)
    assert parts[-1] == pytest.approx(fleet.ready_s / (40.0 * 3000.0), rel=0.08)


def test_a_few_workers_know_it_as_a_mean_over_many_crashes() -> None:
    parts = Fleet(5, 20).run(6000, life_s=21.0)[1800:]
    assert max(parts) - min(parts) < 0.25, "with a mean of a minute it is 0.5"


def test_its_error_is_the_one_it_has() -> None:
    """A mean that decays is worth more crashes than it holds."""
    found = [Fleet(20, 20, seed) for seed in range(12)]
    parts = [part for fleet in found for part in fleet.run(3000, life_s=20.5)[1200::60]]
    real = fmean((part / 0.5 - 1.0) ** 2 for part in parts) ** 0.5
    assert fmean(fleet.found.error for fleet in found) == pytest.approx(real, rel=0.2)
    assert real < 0.04


def test_workers_that_have_just_started_seem_no_more_available() -> None:
    """All were ready at once, and nobody has had the time to return."""
    parts = [Fleet(200, 120, seed).run(480, life_s=120.0) for seed in range(3)]
    for found in parts:
        assert found[239] == pytest.approx(0.5, abs=0.12)
        assert found[479] == pytest.approx(0.5, abs=0.07)


def test_a_change_counts_as_soon_as_it_is_more_than_chance() -> None:
    fleet = Fleet(20, 20)
    fleet.run(3000, life_s=1e12)
    assert min(fleet.run(90, life_s=20.0)) < 0.75
    assert max(fleet.run(900, life_s=1e12)) > 0.95
