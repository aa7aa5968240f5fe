"""The knee of a throughput curve, from a few uncertain points."""

import random

import pytest

from rolloutmq.services.orchestrator.autoscaling.servers.curve import (
    MOST_GROUPS,
    POINTS,
    ThroughputCurve,
)

SIZES = (8.0, 16.0, 32.0, 56.0)


def curve(knee: float, sizes: tuple[float, ...] = SIZES, groups: float = 100.0) -> ThroughputCurve:
    """Return the exact points of a server that is full at the knee."""
    found = ThroughputCurve()
    for size in sizes:
        found = found.added(size, min(size, knee), groups)
    return found


@pytest.mark.parametrize("knee", [12.0, 20.0, 40.0])
def test_points_on_both_sides_tell_the_knee(knee: float) -> None:
    found = curve(knee).knee(1.0)
    assert found.size == pytest.approx(knee, rel=0.05)
    assert found.low < knee < found.high
    assert found.pace == pytest.approx(1.0, rel=0.02)


def test_more_groups_tell_it_more_precisely() -> None:
    few, many = (curve(40.0, groups=groups).knee(1.0) for groups in (24.0, 600.0))
    assert many.high / many.low < few.high / few.low


def test_evenly_arriving_groups_tell_it_more_precisely() -> None:
    even, uneven = curve(40.0).knee(0.05), curve(40.0).knee(2.0)
    assert even.high / even.low < uneven.high / uneven.low


def test_fleets_that_nothing_slows_tell_only_that_the_knee_is_further() -> None:
    found = curve(1e6).knee(1.0)
    assert found.low > 16.0
    assert found.high == pytest.approx(2.0 * SIZES[-1])


def test_full_servers_alone_do_not_tell_how_few_workers_suffice() -> None:
    found = curve(4.0).knee(1.0)
    assert found.low == found.size == pytest.approx(SIZES[0])


def test_the_interval_holds_the_knee_in_most_cases() -> None:
    chance, held = random.Random(5), 0
    for _ in range(200):
        found = ThroughputCurve()
        for size in SIZES:
            groups = max(8.0, chance.gauss(60.0, 60.0**0.5))
            found = found.added(size, min(size, 24.0) * groups / 60.0, groups)
        knee = found.knee(1.0)
        held += knee.low <= 24.0 <= knee.high
    assert held >= 180


def test_points_of_one_size_are_one_point() -> None:
    found = ThroughputCurve().added(20.0, 18.0, 90.0).added(20.5, 22.0, 110.0)
    (point,) = found.points
    assert point.made == pytest.approx(20.0)
    assert point.groups == pytest.approx(200.0)


def test_a_point_does_not_become_sure_for_ever() -> None:
    found = ThroughputCurve()
    for _ in range(50):
        found = found.added(20.0, 20.0, 200.0)
    assert found.points[0].groups <= MOST_GROUPS


def test_it_keeps_the_last_points() -> None:
    found = curve(1e6, tuple(10.0 * 1.2**step for step in range(POINTS + 4)))
    assert len(found.points) == POINTS


@pytest.mark.parametrize(("size", "made", "groups"), [(0.0, 1.0, 9.0), (1.0, 0.0, 9.0), (1.0, 1.0, 0.0)])
def test_a_point_without_throughput_tells_nothing(size: float, made: float, groups: float) -> None:
    assert not ThroughputCurve().added(size, made, groups).points


def test_a_changed_server_does_not_fit() -> None:
    found = curve(40.0)
    assert found.misfit(48.0, 40.0, 200.0, 1.0) < 1.0
    assert found.misfit(48.0, 20.0, 200.0, 1.0) > 3.0


def test_other_units_of_size_move_the_knee() -> None:
    found = curve(20.0).scaled(2.0).knee(1.0)
    assert found.size == pytest.approx(40.0, rel=0.05)
    assert found.pace == pytest.approx(0.5, rel=0.02)


def test_older_points_tell_less() -> None:
    new = curve(20.0, groups=400.0)
    old = new.aged(600.0, 1.0)
    assert all(late.groups < early.groups for late, early in zip(old.points, new.points, strict=True))
    assert old.knee(1.0).high / old.knee(1.0).low > new.knee(1.0).high / new.knee(1.0).low
    assert new.aged(0.0, 1.0) == new
