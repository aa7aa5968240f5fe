import random

import pytest

from rolloutmq.services.orchestrator.autoscaling.trend import LONGER, POINTS, DemandTrend

SPAN_S = 30.0


def seen(*demands: float, trend: DemandTrend | None = None) -> DemandTrend:
    """See one demand a second."""
    trend = trend or DemandTrend()
    now = trend.points[-1][0] if trend.points else 0.0
    for place, demand in enumerate(demands, 1):
        trend = trend.looked(now + place, demand, SPAN_S)
    return trend


def test_a_demand_that_rises_all_the_time_is_a_trend() -> None:
    rising = seen(*(40.0 + 0.5 * second for second in range(400)))
    assert rising.rise_per_s(SPAN_S) == pytest.approx(0.5, rel=0.05)
    assert len(rising.points) <= LONGER[-1] * POINTS + 2


def test_it_must_have_risen_for_the_whole_time() -> None:
    assert not seen(*(40.0 + second for second in range(25))).rise_per_s(SPAN_S)


def test_it_ends_with_the_rise() -> None:
    rising = seen(*(40.0 + second for second in range(40)))
    assert rising.rise_per_s(SPAN_S)
    assert not seen(*[79.0] * 12, trend=rising).rise_per_s(SPAN_S)


@pytest.mark.parametrize(
    "demands", [[40.0] * 50 + [80.0] * 8, [80.0] * 60, [80.0 - 0.5 * n for n in range(60)], []]
)
def test_a_step_a_level_and_a_fall_are_no_trend(demands: list[float]) -> None:
    trend = DemandTrend()
    for place, demand in enumerate(demands):
        trend = trend.looked(float(place), demand, SPAN_S)
        assert not trend.rise_per_s(SPAN_S)


def test_a_slow_rise_needs_no_workers_ahead() -> None:
    assert not seen(*(40.0 + 0.02 * second for second in range(200))).rise_per_s(SPAN_S)


@pytest.mark.parametrize("per_s", [0.1, 0.2])
def test_a_rise_that_is_a_small_part_of_a_large_demand_shows_in_a_longer_time(per_s: float) -> None:
    rising = seen(*(40.0 + per_s * second for second in range(300)))
    assert rising.rise_per_s(SPAN_S) == pytest.approx(per_s, rel=0.05)


def test_noise_is_seldom_a_trend() -> None:
    chance, level, trend, rises = random.Random(3), 40.0, DemandTrend(), 0
    for second in range(3600):
        level += 0.2 * (40.0 * (1.0 + chance.gauss(0.0, 0.08)) - level)
        trend = trend.looked(float(second), level, SPAN_S)
        rises += trend.rise_per_s(SPAN_S) > 0.0
    assert rises < 36


def test_an_unknown_demand_begins_anew() -> None:
    rising = seen(*(40.0 + second for second in range(40)))
    assert not rising.looked(41.0, None, SPAN_S).rise_per_s(SPAN_S)
