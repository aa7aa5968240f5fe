"""Latency samples of a run are summed by each part, every rollout once, with rates of the time that was recorded."""

from typing import Any

import pytest

from rolloutmq.launch.declarations.options import ProfileBy
from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.services.monitor.profile.latencies import OTHERS, ROWS_LIMIT, By, SumKey, Sums, sum_latencies

GPU = "GPU-0a"


def row(hop: Hop, *durations_s: float, **given: Any) -> LatencyRow:
    slowest_s, durations = max(durations_s), HistogramBuilder().add(durations_s).histogram()
    slowest_id = f"{hop.value}-{slowest_s:g}"
    return LatencyRow(hop=hop, durations=durations, slowest_s=slowest_s, slowest_id=slowest_id, **given)


def sample(name: str, at: float, *rows: LatencyRow, since_s: float = 1.0, **given: Any) -> LatencySample:
    return LatencySample(name=name, number=1, at=at, since_s=since_s, rows=rows, **given)


RUN = [
    sample(
        "broker",
        101.0,
        row(Hop.ROLLOUT, 1.0, 2.0, env="e", tokens=30),
        row(Hop.QUEUE, 0.1, 0.1, env="e"),
        row(Hop.QUEUE, 0.5, env="e", split=Split.EVAL),
        host="h1",
    ),
    sample(
        "e-0",
        101.0,
        row(Hop.ROLLOUT, 1.0, env="e", tokens=10),
        row(Hop.CALL, 0.4, 0.6, env="e", engine="inference", status="2xx", route="/v1/completions"),
        row(Hop.CALL, 9.0, env="e", engine="inference", status="5xx", route="/v1/completions"),
        host="h2",
        gpus=(GPU,),
    ),
    sample("e-1", 101.5, row(Hop.ROLLOUT, 2.0, env="e", tokens=20), host="h1"),
    sample("inference", 102.0, row(Hop.HTTP, 0.3, route="/v1/completions", status="2xx"), host="h3"),
    sample("gateway", 102.0, row(Hop.HTTP, 0.2, route="/info", status="4xx"), host="h3"),
    sample("broker", 111.0, row(Hop.ROLLOUT, 3.0, env="e", tokens=15), since_s=10.0, host="h1"),
]


def counts(sums: Sums) -> dict[tuple[str, str, str], int]:
    return {(key.label, key.hop.value, key.status): one.durations.count for key, one in sums.rows.items()}


def test_each_part_has_its_own_rows() -> None:
    assert counts(sum_latencies(RUN, By.WORKER)) == {
        ("e-0", "rollout", ""): 1,
        ("e-0", "call", "2xx"): 2,
        ("e-0", "call", "5xx"): 1,
        ("e-1", "rollout", ""): 1,
    }
    assert counts(sum_latencies(RUN, By.ENGINE)) == {
        ("inference", "call", "2xx"): 2,
        ("inference", "call", "5xx"): 1,
        ("inference", "http", "2xx"): 1,
    }
    assert counts(sum_latencies(RUN, By.ROUTE)) == {
        ("gateway /info", "http", "4xx"): 1,
        ("inference /v1/completions", "http", "2xx"): 1,
    }
    assert counts(sum_latencies(RUN, By.GPU)) == {
        (GPU, "rollout", ""): 1,
        (GPU, "call", "2xx"): 2,
        (GPU, "call", "5xx"): 1,
    }


def test_by_host_each_rollout_counts_once() -> None:
    found = counts(sum_latencies(RUN, By.HOST))
    assert found["h1", "rollout", ""] == found["h2", "rollout", ""] == 1
    keys = sum_latencies(RUN, By.HOST).rows.keys()
    assert {key.split for key in keys if key.hop is Hop.QUEUE} == set(Split)


def test_by_environment_the_broker_tells() -> None:
    rows = sum_latencies(RUN, By.ENV).rows
    rollout = rows[SumKey("e", Hop.ROLLOUT)]
    assert (rollout.durations.count, rollout.tokens) == (3, 45)
    assert (rollout.slowest_s, rollout.slowest_id) == (3.0, "rollout-3")
    assert rollout.seconds == pytest.approx(11.0)
    assert rollout.per_s == pytest.approx(3 / 11)
    assert rollout.tokens_per_s == pytest.approx(45 / 11)
    assert rows[SumKey("e", Hop.QUEUE, Split.EVAL)].durations.count == 1


def test_the_time_between_two_lives_counts_for_nothing() -> None:
    lives = [sample("broker", 1000.0 * life + 2.0, row(Hop.QUEUE, 0.1), since_s=2.0) for life in range(1, 4)]
    (found,) = sum_latencies(lives, By.ENV).rows.values()
    assert found.seconds == pytest.approx(6.0)
    assert found.per_s == pytest.approx(0.5)


def test_the_largest_error_of_the_clocks_stays() -> None:
    samples = [
        sample("broker", float(at), row(Hop.SEND, 0.1, env="e", clock_error_s=error_s))
        for at, error_s in enumerate((0.0, 0.004, 0.001), 1)
    ]
    (found,) = sum_latencies(samples, By.ENV).rows.values()
    assert found.clock_error_s == 0.004


def test_labels_are_bounded_and_the_sums_stay_exact() -> None:
    many = [sample(f"e-{number}", 1.0, row(Hop.ROLLOUT, 1.0)) for number in range(ROWS_LIMIT + 50)]
    found = sum_latencies(many, By.WORKER).rows
    assert len(found) == ROWS_LIMIT + 1
    assert sum(one.durations.count for one in found.values()) == ROWS_LIMIT + 50
    assert [*found][-1].label == OTHERS


def test_the_command_knows_the_same_parts() -> None:
    assert [one.value for one in ProfileBy] == [one.value for one in By]
