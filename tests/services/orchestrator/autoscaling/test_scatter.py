import random
from statistics import median

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


def by_chance(seed: int, seconds: int, per_s: float, together: int) -> list[float]:
    """Return the groups of each second if so many arrive at once, at random times."""
    chance, groups = random.Random(seed), [0.0] * seconds
    at = chance.expovariate(per_s / together)
    while at < seconds:
        groups[int(at)] += together
        at += chance.expovariate(per_s / together)
    return groups


@pytest.mark.parametrize("per_s", [0.5, 2.0])
@pytest.mark.parametrize("together", [1, 2, 4, 8])
def test_the_dispersion_is_that_of_groups_which_arrive_together(together: int, per_s: float) -> None:
    seconds = int(4000 / per_s)
    found = [seen(by_chance(seed, seconds, per_s, together)).dispersion for seed in range(80)]
    assert median(found) == pytest.approx(together, rel=0.1)


def test_groups_that_arrive_by_chance_need_many_for_a_precise_pace() -> None:
    for seed in range(5):
        found = seen(by_chance(seed, 300, 2.0, 1))
        assert found.groups_for(0.03) == pytest.approx(found.dispersion / 0.03**2 / 2.0)


def test_a_block_ends_however_few_groups_arrive() -> None:
    """Groups stop, and come back: the blocks between count none."""
    found = seen([2.0] * 60 + [0.0] * 60 + [2.0] * 60)
    assert (0.0, 20.0) in found.blocks
    assert found.dispersion < 2.0


def test_a_backlog_that_arrives_at_once_makes_no_endless_blocks() -> None:
    found = seen([2.0] * 60 + [400.0] + [2.0] * 60)
    assert found.together <= 8.0
    assert seen([2.0] * 60 + [400.0] + [2.0] * 1200).dispersion == pytest.approx(0.0, abs=1e-6)


def test_a_change_of_the_pace_is_no_scatter() -> None:
    assert seen([2.0] * 60 + [4.0] * 60).dispersion == pytest.approx(0.0, abs=1e-6)


def test_workers_that_deliver_together_scatter_no_more_than_their_rounds() -> None:
    """Sixteen groups arrive within a second, once a minute."""
    rounds = [16.0 if second % 60 == 59 else 0.0 for second in range(1200)]
    assert seen(rounds, least_s=60.0).dispersion == pytest.approx(0.0, abs=1e-6)
