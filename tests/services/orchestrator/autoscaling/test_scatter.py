import random

import pytest

from rolloutmq.services.orchestrator.autoscaling.scatter import BLOCKS, PaceScatter


def seen(groups: list[float], *, least_s: float = 5.0) -> PaceScatter:
    """Look once a second at four busy workers."""
    scatter = PaceScatter()
    for number in groups:
        scatter = scatter.looked(number, 4.0, 1.0, least_s)
    return scatter


def test_groups_count_as_independent_until_their_scatter_is_known() -> None:
    assert PaceScatter().error(24) == pytest.approx(0.2, abs=0.01)
    assert PaceScatter().groups_for(0.03) == 0.0
    assert seen([2.0] * 18).error(24) == pytest.approx(0.2, abs=0.01)


def test_groups_that_arrive_evenly_tell_a_pace_at_once() -> None:
    scatter = seen([2.0] * 300)
    assert scatter.error(24) == pytest.approx(0.0, abs=1e-6)
    assert scatter.groups_for(0.03) == pytest.approx(0.0, abs=1e-6)
    assert len(scatter.blocks) == BLOCKS


def test_groups_that_arrive_by_chance_need_many_for_a_precise_pace() -> None:
    chance = random.Random(1)
    found = [
        seen([float(sum(chance.random() < 0.1 for _ in range(20))) for _ in range(300)]) for _ in range(20)
    ]
    mean = sum(one.dispersion for one in found) / len(found)
    assert mean == pytest.approx(0.9, rel=0.3)
    needed = sum(one.groups_for(0.03) for one in found) / len(found)
    assert needed == pytest.approx(mean / 0.03**2 / 2.0)


def test_a_change_of_the_pace_is_no_scatter() -> None:
    assert seen([2.0] * 60 + [4.0] * 60).dispersion == pytest.approx(0.0, abs=1e-6)


def test_workers_that_deliver_together_scatter_no_more_than_their_rounds() -> None:
    """Sixteen groups arrive within a second, once a minute."""
    rounds = [16.0 if second % 60 == 59 else 0.0 for second in range(1200)]
    assert seen(rounds, least_s=60.0).dispersion == pytest.approx(0.0, abs=1e-6)
