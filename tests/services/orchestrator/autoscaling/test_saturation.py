from dataclasses import replace

import pytest

from rolloutmq.services.orchestrator.autoscaling.demand import MEMORY_S, DemandEstimator
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample, WorkerCounts
from rolloutmq.services.orchestrator.autoscaling.saturation import FIRST_HOLD_S, MEMORIES, SaturationDetector

SETTLED_S = int(MEMORIES * MEMORY_S) + 60


class Site:
    """Workers that make two a second each, and at most `shared` together."""

    def __init__(self, shared: float) -> None:
        self.shared = shared
        self.pace = 2.0
        self.engines = 1
        self.knee = SaturationDetector()
        self.rates = DemandEstimator()
        self.at = self.made = 0.0

    def run(self, ready: int, seconds: int, *, starting: bool = False) -> SaturationDetector:
        for _ in range(seconds):
            self.at += 1.0
            self.made += min(self.pace * ready, self.shared)
            crew = WorkerCounts(ready=ready, starting=int(starting))
            seen = PressureSample(crew=crew, made=int(self.made), engines=self.engines)
            self.rates = self.rates.looked(seen, self.at)
            self.knee = self.knee.looked(self.rates, seen, self.at)
        return self.knee


def test_what_is_shared_is_found_and_gone_back_to() -> None:
    site = Site(shared=40.0)
    assert not site.run(10, SETTLED_S).most
    assert site.run(40, 30).slow, "no more are started before it is clear"
    assert 20 <= site.run(40, SETTLED_S).most <= 22
    knee = site.run(22, SETTLED_S)
    assert 20 <= knee.most <= 22
    assert not knee.slow


def test_it_is_not_judged_while_workers_start() -> None:
    site = Site(shared=40.0)
    site.run(10, SETTLED_S)
    knee = site.run(40, SETTLED_S, starting=True)
    assert knee.slow
    assert not knee.most


def test_workers_that_share_nothing_are_never_held_back() -> None:
    site = Site(shared=1e9)
    for ready in (1, 2, 6, 20, 60, 20, 1):
        knee = site.run(ready, SETTLED_S)
        assert not knee.most
        assert not knee.slow


def test_a_few_more_are_tried_after_a_while_and_then_more_seldom() -> None:
    site = Site(shared=40.0)
    site.run(10, SETTLED_S)
    found = site.run(40, SETTLED_S).most
    tried = site.run(found, int(FIRST_HOLD_S) + 1).most
    assert tried == found + 1
    again = site.run(tried, SETTLED_S)
    assert again.most <= found
    assert site.run(found, int(FIRST_HOLD_S) + 1).most == again.most, (
        "the second time it is believed for longer"
    )


def test_a_server_that_became_faster_is_noticed() -> None:
    site = Site(shared=40.0)
    site.run(10, SETTLED_S)
    found = site.run(40, SETTLED_S).most
    site.shared = 400.0
    ready = found
    for _ in range(12):
        ready = site.run(ready, SETTLED_S + 300).most or 200
    assert ready > 2 * found


def test_if_fewer_bring_less_it_was_no_knee() -> None:
    site = Site(shared=1e9)
    site.run(10, SETTLED_S)
    site.pace = 1.0  # longer rollouts, in the moment in which more are started
    found = site.run(20, SETTLED_S).most
    assert found
    knee = site.run(found, SETTLED_S)
    assert not knee.most
    assert not site.run(40, SETTLED_S).most


def test_no_more_than_twice_those_that_were_seen_to_help_are_tried() -> None:
    site = Site(shared=1000.0)
    assert not site.knee.reach, "nothing is known"
    assert site.run(3, SETTLED_S).reach == 7, "a few more may always be tried"
    assert site.run(12, 20).reach == 7
    assert site.run(12, SETTLED_S).reach == 24


def test_workers_at_the_limit_that_bring_less_are_the_knee() -> None:
    site = Site(shared=40.0)
    site.run(11, SETTLED_S)
    knee = site.run(22, SETTLED_S)
    assert not knee.slow, "each makes nine tenths of what it made"
    assert 20 <= knee.most <= 22


def test_when_all_have_become_slower_it_is_no_knee() -> None:
    site = Site(shared=1000.0)
    site.run(10, SETTLED_S)
    site.pace = 0.8
    knee = site.run(14, SETTLED_S)
    assert not knee.most
    assert knee.best < 1.0


@pytest.mark.extended
def test_the_knee_does_not_creep_up_by_one_after_another() -> None:
    site = Site(shared=40.0)
    site.run(20, SETTLED_S)
    site.run(21, 900)  # hardly slower, so that it becomes the pace
    ready, site.knee = 21, replace(site.knee, most=21)
    for _ in range(120):
        ready = site.run(ready, 300).most
        assert ready <= 22
