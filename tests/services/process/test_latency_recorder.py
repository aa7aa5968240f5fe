"""What a process measures reaches its samples: exact counts, bounded rows, messages that fit."""

import math

import msgspec
import pytest

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import ROWS_LIMIT, Hop, LatencySample
from rolloutmq.services.process.latency_recorder import BLOCK, SAMPLE_BYTES, LatencyKey, LatencyRecorder

ROLLOUT = LatencyKey(Hop.ROLLOUT, "e")


def one_of(samples: list[LatencySample]) -> LatencySample:
    (sample,) = samples
    return sample


def test_a_sample_has_what_was_measured_since_the_one_before() -> None:
    recorder = LatencyRecorder("w-0", 10.0, host="h", gpus=("GPU-1",))
    assert not recorder
    assert recorder.samples(11.0) == []
    recorder.add(ROLLOUT, 0.5, tokens=7, source="g1")
    recorder.add(ROLLOUT, 2.0, tokens=5, source="g2")
    sample = one_of(recorder.samples(12.0))
    assert (sample.name, sample.host, sample.gpus, sample.number) == ("w-0", "h", ("GPU-1",), 1)
    assert (sample.at, sample.since_s) == (12.0, 2.0)  # the second without anything counts too
    (row,) = sample.rows
    assert (row.hop, row.env, row.durations.count, row.tokens) == (Hop.ROLLOUT, "e", 2, 12)
    assert (row.slowest_s, row.slowest_id) == (2.0, "g2")
    assert row.durations.total_s == pytest.approx(2.5)
    recorder.add(ROLLOUT, 0.25, source="g3")
    sample = one_of(recorder.samples(13.0))
    assert (sample.number, sample.since_s, sample.rows[0].slowest_id) == (2, 1.0, "g3")


def test_blocks_count_as_one_by_one() -> None:
    recorder = LatencyRecorder("broker", 0.0)
    values = [0.001 * (1 + at % 977) for at in range(2 * BLOCK + 3)]
    for at in range(0, len(values), 100):
        part = values[at : at + 100]
        recorder.row(ROLLOUT).extend(part, len(part), [f"g{at + place}" for place in range(len(part))])
    (row,) = one_of(recorder.samples(1.0)).rows
    assert row.durations.count == row.tokens == len(values)
    assert row.durations.percentile_s(50) == pytest.approx(sorted(values)[len(values) // 2], rel=0.02)
    assert row.slowest_s == max(values)
    assert row.slowest_id == f"g{values.index(max(values))}"


def test_one_duration_of_many_counts_for_each() -> None:
    recorder = LatencyRecorder("broker", 0.0)
    recorder.row(ROLLOUT).repeat(3.0, 64, 640, "g1")
    recorder.row(ROLLOUT).repeat(1.0, 32, 320, "g2")
    recorder.add(ROLLOUT, 2.0, source="g3", tokens=10)
    (row,) = one_of(recorder.samples(1.0)).rows
    assert (row.durations.count, row.tokens, row.slowest_id) == (97, 970, "g1")
    assert row.durations.total_s == pytest.approx(3 * 64 + 32 + 2)


def test_what_is_no_duration_is_left_out_and_a_negative_one_is_0() -> None:
    recorder = LatencyRecorder("broker", 0.0)
    recorder.row(ROLLOUT).extend([math.nan, 1.0, math.inf, -5.0], 0, ["a", "b", "c", "d"])
    (row,) = one_of(recorder.samples(1.0)).rows
    assert row.durations.count == 2
    assert (row.slowest_s, row.slowest_id) == (1.0, "b")
    recorder.add(ROLLOUT, math.nan)
    assert recorder.samples(2.0) == []


def test_rows_are_bounded_and_the_sums_stay_exact() -> None:
    recorder = LatencyRecorder("broker", 0.0)
    for number in range(2000):
        recorder.add(LatencyKey(Hop.QUEUE, f"e{number}", Split.EVAL), 1.0, tokens=1)
    samples = recorder.samples(1.0)
    rows = [row for sample in samples for row in sample.rows]
    assert len(rows) <= ROWS_LIMIT
    assert sum(row.durations.count for row in rows) == sum(row.tokens for row in rows) == 2000
    (others,) = (row for row in rows if not row.env)
    assert (others.hop, others.split) == (Hop.QUEUE, Split.EVAL)
    assert samples[0].dropped_rows == 2000 - (len(rows) - 1)
    recorder.add(LatencyKey(Hop.QUEUE, "e1999"), 1.0)  # the next sample has room again
    assert one_of(recorder.samples(2.0)).rows[0].env == "e1999"


def test_a_message_fits_the_broker_and_the_record() -> None:
    recorder = LatencyRecorder("broker", 0.0)
    for number in range(100):
        key = LatencyKey(Hop.HTTP, route="é" * 300 + str(number), status="2xx")
        recorder.row(key).extend([0.0001 * 1.5**power for power in range(40)], 0, [""] * 40)
    samples = recorder.samples(4.0)
    assert len(samples) > 1
    assert [sample.number for sample in samples] == [*range(1, len(samples) + 1)]
    assert [sample.since_s for sample in samples] == [4.0, *[0.0] * (len(samples) - 1)]
    assert all(len(msgspec.json.encode(sample)) < SAMPLE_BYTES + 2000 for sample in samples)
    rows = [row for sample in samples for row in sample.rows]
    assert sum(row.durations.count for row in rows) == 4000
    assert all(len(row.route) <= 256 for row in rows)  # as the wire has it


def test_a_recorder_that_is_off_has_nothing() -> None:
    recorder = LatencyRecorder("w-0", 0.0, enabled=False)
    recorder.add(ROLLOUT, 1.0, tokens=3, source="g")
    assert recorder.samples(1.0) == []
