"""Latencies by worker, host, engine and GPU: the slowest first, each rollout once, and a bounded number of rows."""

from typing import Any

from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.services.dashboard.record.latency_parts import KEYS_LIMIT, PARTS, LatencyParts
from rolloutmq.services.monitor.profile.latencies import OTHERS, By


def row(hop: Hop, *seconds: float, **given: Any) -> LatencyRow:
    return LatencyRow(hop=hop, durations=HistogramBuilder().add(seconds).histogram(), **given)


def sample(name: str, *rows: LatencyRow, **given: Any) -> LatencySample:
    return LatencySample(name=name, number=1, at=10.0, since_s=1.0, rows=rows, **given)


def worker(number: int, seconds: float) -> LatencySample:
    call = row(Hop.CALL, seconds / 10, engine=f"inference-{number % 2}", status="2xx")
    rollout = row(Hop.ROLLOUT, seconds, slowest_s=seconds, slowest_id=f"g{number}")
    return sample(f"e-{number}", rollout, call, host=f"h{number % 2}", gpus=("GPU-0",))


def parts(*samples: LatencySample) -> LatencyParts:
    found = LatencyParts()
    for one in samples:
        found.add(one)
    return found


def names(page: dict[str, Any], hop: str) -> list[str]:
    return [one["name"] for one in page["rows"] if one["hop"] == hop]


CREW = [worker(number, 1.0 + number) for number in range(6)]


def test_each_part_names_its_slowest_first() -> None:
    broker = sample("broker", row(Hop.ROLLOUT, *(1.0 + number for number in range(6)), env="e"), host="h9")
    found = parts(broker, *CREW)
    pages = {by: found.page(by, "", 100) for by in PARTS}
    assert names(pages[By.WORKER], "rollout") == [f"e-{number}" for number in reversed(range(6))]
    assert names(pages[By.HOST], "rollout") == ["h1", "h0"]
    assert names(pages[By.ENGINE], "call") == ["inference-1", "inference-0"]
    assert names(pages[By.GPU], "rollout") == ["GPU-0"]
    slowest = pages[By.WORKER]["rows"][0]
    assert (slowest["slowest_id"], slowest["count"], slowest["per_s"]) == ("g5", 1, 1.0)
    assert slowest["p50_s"] == slowest["p999_s"]
    assert 5.9 < slowest["p99_s"] < 6.1
    assert sum(one["count"] for one in pages[By.HOST]["rows"] if one["hop"] == "rollout") == 6


def test_a_page_has_the_slowest_of_each_hop_and_says_how_many_there_are() -> None:
    page = parts(*CREW).page(By.WORKER, "", 2)
    assert (names(page, "rollout"), names(page, "call")) == (["e-5", "e-4"], ["e-5", "e-4"])
    assert (page["total"], page["matching"]) == (12, 12)
    page = parts(*CREW).page(By.WORKER, "E-3", 2)
    assert (names(page, "rollout"), names(page, "call")) == (["e-3"], ["e-3"])
    assert (page["total"], page["matching"]) == (12, 2)


def test_names_beyond_the_limit_share_a_row() -> None:
    found = parts(*(sample(f"e-{number}", row(Hop.ROLLOUT, 1.0)) for number in range(KEYS_LIMIT + 50)))
    page = found.page(By.WORKER, OTHERS, 10)
    assert (page["total"], page["rows"][0]["count"]) == (KEYS_LIMIT + 1, 50)
