"""Samples of all processes add up, the broker's before those of workers."""

from typing import Any

import pytest

from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.services.monitor.report.latencies import (
    KEYS_LIMIT,
    LatencyKey,
    LatencySums,
    LatencyWindow,
)

TRAIN = LatencyKey("math", Split.TRAIN, Hop.TRAIN)
ROLLOUT = LatencyKey("math", Split.TRAIN, Hop.ROLLOUT)


def row(hop: Hop, *durations: float, **fields: Any) -> LatencyRow:
    return LatencyRow(
        hop=hop, durations=HistogramBuilder().add(durations).histogram(), **{"env": "math", **fields}
    )


def sample(name: str, *rows: LatencyRow) -> LatencySample:
    return LatencySample(name=name, number=1, at=0.0, since_s=1.0, rows=rows)


def test_percentiles_are_of_all_processes_and_rollouts_of_the_broker() -> None:
    window = LatencyWindow()
    window.add(sample("math-0", row(Hop.ROLLOUT, 5.0), row(Hop.CALL, 1.0, status="2xx")), 0.0)
    window.add(sample("math-1", row(Hop.ROLLOUT, 7.0)), 0.0)
    assert window.percentiles(0.0)[ROLLOUT] == pytest.approx((2, 5.0, 7.0), rel=0.01)
    window.add(sample("broker", row(Hop.ROLLOUT, 2.0, 3.0, 4.0), row(Hop.TRAIN, 1.0)), 1.0)
    found = window.percentiles(2.0)
    assert found[ROLLOUT] == pytest.approx((3, 3.0, 4.0), rel=0.01)
    assert [*found] == [ROLLOUT, TRAIN], "calls are no hops of groups"


def test_the_window_forgets_after_a_minute() -> None:
    window = LatencyWindow()
    window.add(sample("broker", row(Hop.TRAIN, 1.0, slowest_s=1.0, slowest_id="g1")), 5.0)
    window.add(sample("broker", row(Hop.TRAIN, 9.0, slowest_s=9.0, slowest_id="g2")), 58.0)
    assert window.percentiles(59.0)[TRAIN].groups == 2
    assert [one.group_id for one in window.slowest(59.0)] == ["g2", "g1"]
    assert window.percentiles(65.0)[TRAIN].groups == 1
    assert [one.group_id for one in window.slowest(65.0)] == ["g2"]
    assert window.percentiles(200.0) == {}
    assert window.slowest(200.0) == []


def test_many_environments_are_bounded() -> None:
    sums = LatencySums()
    for number in range(KEYS_LIMIT + 10):
        sums.add(sample("broker", row(Hop.TRAIN, 1.0, env=f"e{number}")))
    assert len(sums.percentiles()) == KEYS_LIMIT


@pytest.mark.parametrize("seconds", [0.301 * 1.003**step for step in range(8)])
def test_no_percentile_exceeds_the_slowest_group(seconds: float) -> None:
    """The end of a bucket may lie above all durations in it."""
    told = sample("broker", row(Hop.TRAIN, 0.1, seconds, slowest_s=seconds))
    window, sums = LatencyWindow(), LatencySums()
    window.add(told, 0.0)
    sums.add(told)
    assert window.percentiles(0.0)[TRAIN] == sums.percentiles()[TRAIN]
    assert sums.percentiles()[TRAIN].p99_s <= seconds
