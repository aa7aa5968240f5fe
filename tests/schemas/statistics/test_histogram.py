"""Percentiles of durations within their error, and histograms that add up."""

from math import ceil

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.schemas.statistics.histogram import (
    BUCKETS,
    LONGEST_S,
    RELATIVE_ERROR,
    SHORTEST_S,
    Histogram,
    HistogramBuilder,
)

durations = st.lists(st.floats(SHORTEST_S, LONGEST_S), min_size=1, max_size=200)
ROUNDING = 1e-9


def histogram_of(*values: float) -> Histogram:
    return HistogramBuilder().add(values).histogram()


def exact_percentile(values: list[float], percent: float) -> float:
    return sorted(values)[max(1, ceil(len(values) * percent / 100)) - 1]


@settings(deadline=None)
@given(durations, st.floats(0.1, 100.0))
def test_a_percentile_is_within_its_error(values: list[float], percent: float) -> None:
    exact = exact_percentile(values, percent)
    assert histogram_of(*values).percentile_s(percent) == pytest.approx(exact, rel=RELATIVE_ERROR + ROUNDING)


@pytest.mark.parametrize("longest_s", [0.301 * 1.003**step for step in range(8)])
def test_a_percentile_does_not_exceed_the_longest_where_that_is_known(longest_s: float) -> None:
    told = histogram_of(0.1, longest_s)
    assert told.percentile_s(99.9, longest_s) == min(longest_s, told.percentile_s(99.9))
    assert told.percentile_s(99.9, 0.0) == told.percentile_s(99.9), "not known"
    assert told.percentile_s(50, longest_s) == told.percentile_s(50)


def test_percentiles_of_a_thousand() -> None:
    values = np.random.default_rng(7).lognormal(-3.0, 2.0, 1000)
    told = HistogramBuilder().add(values).histogram()
    for percent in (50, 95, 99, 99.9):
        exact = exact_percentile(values.tolist(), percent)
        assert told.percentile_s(percent) == pytest.approx(exact, rel=RELATIVE_ERROR + ROUNDING)
    assert told.mean_s == pytest.approx(values.mean())


@settings(deadline=None)
@given(durations, durations)
def test_two_processes_tell_what_one_would_have(here: list[float], there: list[float]) -> None:
    merged = histogram_of(*here).merged(histogram_of(*there))
    both = histogram_of(*here, *there)
    assert (merged.first, merged.counts) == (both.first, both.counts)
    assert merged.total_s == pytest.approx(both.total_s)


@settings(deadline=None)
@given(durations, st.floats(0.1, 100.0))
def test_a_builder_tells_the_same_percentile(values: list[float], percent: float) -> None:
    builder = HistogramBuilder().add(values)
    assert builder.percentile_s(percent) == builder.histogram().percentile_s(percent)


def test_what_is_too_short_or_too_long_counts_at_the_ends() -> None:
    told = histogram_of(-5.0, 0.0, 1e-9, 1e9)
    assert (told.first, len(told.counts), told.counts[0], told.counts[-1]) == (0, BUCKETS, 3, 1)
    assert told.percentile_s(75) == pytest.approx(SHORTEST_S, rel=0.03)
    assert told.percentile_s(100) == pytest.approx(LONGEST_S, rel=0.03)


def test_the_sum_is_bounded() -> None:
    assert histogram_of(1.7e308, 1.7e308).mean_s == LONGEST_S


def test_infinite_ones_are_left_out() -> None:
    told = histogram_of(float("inf"), float("nan"), 2.0)
    assert (told.count, told.total_s) == (1, 2.0)


def test_nothing_is_a_histogram_too() -> None:
    nothing, one = Histogram(), histogram_of(1.0)
    assert HistogramBuilder().histogram() == nothing == histogram_of(float("nan"))
    assert (nothing.count, nothing.mean_s, nothing.percentile_s(50)) == (0, 0.0, 0.0)
    assert nothing.merged(one) == one.merged(nothing) == one


def test_a_builder_goes_on_and_forgets() -> None:
    builder = HistogramBuilder().add([0.5, 0.5]).add(np.full((2, 3), 0.5))
    assert builder.histogram().count == 8
    builder.clear()
    assert builder.histogram() == Histogram()


def test_it_survives_the_wire_in_a_few_bytes() -> None:
    told = HistogramBuilder().add(np.random.default_rng(1).uniform(0.9, 1.1, 10_000)).histogram()
    packed = msgspec.msgpack.encode(told)
    assert msgspec.msgpack.decode(packed, type=Histogram) == told
    assert len(packed) < 100


@pytest.mark.parametrize(
    "sent", [(BUCKETS, [1], 0.0), (0, [-1], 0.0), (BUCKETS - 1, [1, 1], 0.0), (0, [1], -1.0)]
)
def test_what_no_histogram_can_be_is_refused(sent: tuple[int, list[int], float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Histogram)
    with pytest.raises(msgspec.ValidationError, match="finite"):
        msgspec.msgpack.decode(msgspec.msgpack.encode((0, [1], float("inf"))), type=Histogram)


@pytest.mark.parametrize("percent", [0.0, -1.0, 100.1, float("nan")])
def test_a_percent_out_of_range_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="percent: must be above 0 and at most 100"):
        histogram_of(1.0).percentile_s(percent)
