"""What a measurement of workers tells, by its groups, its time and how evenly the groups arrive."""

import pytest
from msgspec.structs import replace

from rolloutmq.services.orchestrator.autoscaling.servers.server_use import (
    GROUPS,
    LEAST_GROUPS,
    SURE_GROUPS,
    SURE_S,
    Measurement,
    ServerUse,
    Span,
    telling_groups,
)


def use(seconds: float, made: float, *, workers: int = 2, dispersion: float = 1.0) -> ServerUse:
    """Return what workers did that never waited, with groups of eight sequences."""
    worker_s = workers * seconds
    return ServerUse(
        "a", workers, made, worker_s, worker_s, seconds, None, group_sequences=8, dispersion=dispersion
    )


def measurement(groups: float, *, took_s: float = SURE_S, dispersion: float = 1.0) -> Measurement:
    return Measurement({"a": 1.0}, 4.0, 4.0, groups, False, False, took_s, dispersion)


def test_a_span_has_the_pace_of_one_worker_once_enough_groups_have_arrived() -> None:
    span = Span.of(use(0.0, 0.0), use(40.0, 160.0))
    assert (span.made, span.groups, span.busy_s, span.workers) == (160.0, 20.0, 80.0, 2.0)
    assert span.pace(20) == 2.0
    assert span.pace(21) is None


@pytest.mark.parametrize(
    ("seconds", "made", "pace"), [(9.0, 64.0, None), (11.0, 24.0, None), (16.0, 64.0, 2.0)]
)
def test_an_early_pace_takes_ten_seconds_and_four_groups(
    seconds: float, made: float, pace: float | None
) -> None:
    assert Span.of(use(0.0, 0.0), use(seconds, made)).early_pace == pace


@pytest.mark.parametrize(
    ("dispersion", "groups"), [(4.0, GROUPS), (1.0, GROUPS), (0.15, 15), (0.01, LEAST_GROUPS)]
)
def test_fewer_groups_tell_a_throughput_if_they_arrive_evenly(dispersion: float, groups: int) -> None:
    assert telling_groups([use(1.0, 1.0, dispersion=dispersion), use(1.0, 1.0, dispersion=0.0)]) == groups


def test_a_large_part_of_the_workers_shows_in_fewer_groups() -> None:
    assert measurement(100.0).tells(0.5)
    assert not measurement(99.0).tells(0.5)
    assert not measurement(100.0).tells(0.25)
    assert measurement(40.0, dispersion=0.1).tells(0.25)
    assert not measurement(LEAST_GROUPS - 1.0, dispersion=0.001).tells(0.25)


@pytest.mark.parametrize("part", [0.0, -0.1])
def test_workers_that_did_not_go_tell_nothing_before_the_measurement_is_sure(part: float) -> None:
    assert not measurement(199.0).tells(part)
    assert replace(measurement(199.0), is_sure=True).tells(part)


def test_a_difference_is_clear_beyond_two_standard_errors_of_both_throughputs() -> None:
    assert measurement(16.0).is_clear(0.5)
    assert not measurement(16.0).is_clear(0.49)
    assert not measurement(16.0).is_clear(0.5, groups=16.0)
    assert measurement(16.0).is_clear(-0.71, groups=16.0)
    assert measurement(16.0, dispersion=0.04).is_clear(0.1)


def test_a_sure_measurement_shows_what_is_not_clear() -> None:
    assert not measurement(16.0).shows(0.2)
    assert replace(measurement(16.0), is_sure=True).shows(0.2)


@pytest.mark.parametrize(
    ("made", "groups", "is_less"), [(8.0, 100.0, True), (5.0, 100.0, False), (8.0, 8.0, False)]
)
def test_half_of_the_workers_make_less_if_they_make_about_half_and_chance_is_small(
    made: float, groups: float, is_less: bool
) -> None:
    assert measurement(100.0).is_less(made, 0.5, groups) is is_less


@pytest.mark.parametrize(
    ("made", "groups", "is_more"), [(2.0, 100.0, True), (3.6, 1e9, False), (3.0, 8.0, False)]
)
def test_fewer_workers_make_more_only_beyond_chance(made: float, groups: float, is_more: bool) -> None:
    assert measurement(100.0).is_more(made, groups) is is_more


def test_it_takes_a_while_in_any_case() -> None:
    assert not measurement(float(SURE_GROUPS), took_s=SURE_S - 1.0).tells(0.5)
