"""The search for the capacity where few groups have told what the present workers make."""

import pytest
from msgspec.structs import replace
from tests.services.orchestrator.autoscaling.servers.shared_site import SHOWN_S, Site


def test_a_full_server_does_not_lower_the_pace_among_fewer_workers() -> None:
    """Groups that arrive evenly are counted every few seconds, and one worker more is little more to measure."""
    site = Site(shared=40.0)
    site.dispersion = 0.02
    site.run(SHOWN_S, a=15)
    paces, found = [], 0
    for workers in range(21, 33):
        limit = site.run(8, a=workers)["a"]
        paces.append(limit.best)
        found = found or limit.most
    assert min(paces) == pytest.approx(2.0, rel=0.03)
    assert 19 <= found <= 21


def test_a_slow_first_measurement_of_more_workers_does_not_raise_the_pace_among_fewer() -> None:
    site = Site(shared=1000.0)
    site.dispersion = 0.02
    site.run(SHOWN_S, a=6)
    site.shared = 19.5
    site.run(2, a=11)
    site.shared = 1000.0
    assert site.run(SHOWN_S, a=11)["a"].best == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(("dispersion", "is_full"), [(1.0, False), (0.05, True)])
def test_a_test_with_one_worker_fewer_proves_a_full_server_only_beyond_chance(
    dispersion: float, is_full: bool
) -> None:
    """Eleven workers seem to make as much as twelve, and nine clearly less: each is needed, and more may be."""
    site = Site(shared=1000.0)
    site.dispersion = dispersion
    site.run(SHOWN_S, a=12)
    site.detector = replace(
        site.detector,
        capacity=22.0,
        made=24.0,
        made_groups=200.0,
        above=24.0,
        until=1e6,
        tests_fewer=True,
        is_search=True,
    )
    site.paces["a"] = 2.15
    site.run(SHOWN_S, a=11)
    site.paces["a"] = 2.0
    assert bool(site.run(SHOWN_S, a=9)["a"].most) is is_full


def test_fewer_workers_that_make_less_ask_for_more_at_once() -> None:
    """A fleet that seemed slower by chance is no full server, and the trainer starves meanwhile."""
    site = Site(shared=1000.0)
    site.dispersion = 0.02
    site.run(SHOWN_S, a=20)
    site.shared = 40.0
    assert site.run(SHOWN_S, a=38)["a"].most
    site.shared = 1000.0
    number = 20
    for _ in range(7):
        number = site.run(SHOWN_S, a=number)["a"].most
    assert number > 60


def test_the_first_few_workers_get_half_as_many_again() -> None:
    """They may share a server that three of them fill."""
    site = Site(shared=7.5, paces={"a": 2.4})
    assert site.run(SHOWN_S, a=4)["a"].reach == 6
    site = Site(shared=7.5, paces={"a": 2.4})
    site.rollout_s = 40.0
    assert site.run(3 * SHOWN_S, a=4)["a"].reach == 8, "each step takes minutes"
