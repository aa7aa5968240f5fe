"""A fleet writes a bounded number of latency lines a second, and every duration of every worker is in the record."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.schemas.statistics.histogram import HistogramBuilder
from rolloutmq.schemas.wire.latency import BROKER, ROWS_LIMIT, Hop, LatencyRow, LatencySample
from rolloutmq.services.monitor.profile.latencies import By, LatencyLine, SumKey, sum_latencies
from rolloutmq.services.telemetry.recorder import LINE_LIMIT_BYTES, Recorder
from rolloutmq.services.telemetry.sample_merger import LINES_PER_S, NAMES_LIMIT, OTHERS, SampleMerger

WORKERS, SECONDS = 1000, 20


def row(hop: Hop, *seconds: float, **given: Any) -> LatencyRow:
    durations = HistogramBuilder().add(seconds).histogram()
    return LatencyRow(hop=hop, durations=durations, slowest_s=max(seconds), tokens=10, **given)


def sample(name: str, at: float, *rows: LatencyRow, **given: Any) -> LatencySample:
    return LatencySample(
        name=name, number=1 + int(at), at=at, since_s=1.0, rows=rows, **{"host": "h1", **given}
    )


def of_worker(number: int, second: int) -> LatencySample:
    seconds = 0.5 + number / WORKERS + second / 100
    rollout = row(Hop.ROLLOUT, seconds, env="e", slowest_id=f"{number}-{second}")
    return sample(
        f"e-{number}", float(second), rollout, row(Hop.CALL, 0.1, env="e", engine="i", status="2xx")
    )


def topic(one: LatencySample) -> bytes:
    return topics.telemetry("latency", one.name)


def test_a_thousand_workers_write_few_lines_that_have_everything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    for second in range(SECONDS):
        for one in (sample(BROKER, float(second), row(Hop.QUEUE, 0.1, env="e")), *map_workers(second)):
            recorder.record(topic(one), codec.encode(one), float(second))
        recorder.flush()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    by_name = Counter(line["name"] for line in lines)
    assert by_name.pop(BROKER) == SECONDS, "the broker's are written at once"
    assert sum(by_name.values()) <= LINES_PER_S * (SECONDS + 1)
    assert len(by_name) == WORKERS
    assert max(by_name.values()) - min(by_name.values()) <= 1, "each has its turn"
    recorder.close()
    read = [msgspec.json.decode(line, type=LatencyLine) for line in path.read_bytes().splitlines()]
    sums = sum_latencies(read, By.WORKER).rows
    assert len(sums) == 2 * WORKERS
    for number in (0, 63, 64, WORKERS - 1):
        whole = sum_latencies([of_worker(number, second) for second in range(SECONDS)], By.WORKER).rows
        key = SumKey(f"e-{number}", Hop.ROLLOUT)
        found = sums[key]
        assert (found.durations.first, found.durations.counts) == (
            whole[key].durations.first,
            whole[key].durations.counts,
        )
        assert (found.tokens, found.slowest_id) == (10 * SECONDS, f"{number}-{SECONDS - 1}")


def map_workers(second: int) -> list[LatencySample]:
    return [of_worker(number, second) for number in range(WORKERS)]


def test_a_small_run_writes_each_sample_as_it_is() -> None:
    merger = SampleMerger()
    for second in range(3):
        for number in range(LINES_PER_S):
            one = of_worker(number, second)
            assert merger.take(b"t", one, 5.0) == (b"t", one, 5.0)
        assert list(merger.flushed()) == []


def test_samples_that_wait_cover_their_time_once() -> None:
    merger = SampleMerger()
    for number in range(LINES_PER_S):
        merger.take(b"t", of_worker(number, 0), 1.0)
    for second in range(3):
        assert merger.take(b"w", sample("late", float(second), row(Hop.ROLLOUT, 1.0 + second)), 7.0) is None
    (due,) = merger.flushed()
    assert (due.topic, due.at, due.sample.since_s, due.sample.at) == (b"w", 7.0, 3.0, 2.0)
    (only,) = due.sample.rows
    assert (only.durations.count, only.tokens, only.slowest_s) == (3, 30, 3.0)
    assert len(merger) == 0


def test_no_line_grows_beyond_what_a_record_keeps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "metrics.jsonl")
    for number in range(LINES_PER_S):
        recorder.record(b"t", codec.encode(of_worker(number, 0)), 1.0)
    for second in range(30):
        rows = [
            row(Hop.CALL, 0.1, engine=f"{'i' * 100}{second}-{number}", status="2xx") for number in range(40)
        ]
        recorder.record(b"t", codec.encode(sample("big", float(second), *rows)), 1.0)
    recorder.close()
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    big = [json.loads(line) for line in lines if b'"name":"big"' in line]
    assert max(map(len, lines)) < LINE_LIMIT_BYTES
    assert not any("trimmed" in line for line in big)
    assert sum(len(line["rows"]) for line in big) == 30 * 40
    assert all(len(line["rows"]) <= ROWS_LIMIT for line in big)


def test_names_beyond_the_limit_are_added_up() -> None:
    merger = SampleMerger()
    many = LINES_PER_S + NAMES_LIMIT + 500
    written = sum(
        merger.take(b"t", sample(f"w{n}", 1.0, row(Hop.ROLLOUT, 1.0)), 1.0) is not None for n in range(many)
    )
    assert (written, len(merger)) == (LINES_PER_S, NAMES_LIMIT + 1)
    last = [*merger.rest()][-1].sample
    assert (last.name, last.host, last.rows[0].durations.count) == (OTHERS, "", 500)
