import pytest

from benchmarks.broker import latency, memory, producers, proxy, throughput
from benchmarks.harness.workload import Shape
from benchmarks.queues import transferqueue
from rolloutmq.schemas.wire.replies import Durability

SHAPE = Shape(8, 128)


def test_a_mode_survives_a_command_line() -> None:
    modes = list(proxy.modes())
    assert [proxy.Mode.parse(mode.word) for mode in modes] == modes
    assert proxy.fastest(throughput.MIDDLE) in modes
    assert proxy.fastest(throughput.LARGE) in modes


def test_a_batch_is_bounded_in_groups_and_in_bytes() -> None:
    assert throughput.batch_groups(throughput.MIDDLE) == 64
    assert throughput.batch_groups(throughput.LARGE) == 14
    assert throughput.batch_groups(Shape(16, 1_000_000)) == 1


def test_groups_come_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "PRODUCERS", 1)
    assert proxy.rate(SHAPE, lasts_s=0.01) > 0


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DISK])
def test_groups_come_through_the_broker(durability: Durability) -> None:
    assert throughput.rate(SHAPE, durability, lasts_s=0.01) > 0


def test_the_bare_disk_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "RAW_BYTES", 4 << 20)
    assert throughput.raw_rate(throughput.LARGE) > 0


@pytest.mark.extended
def test_many_producers_share_two_processes() -> None:
    assert producers.rate(20, 4 << 20, lasts_s=0.01) > 0


@pytest.mark.parametrize("part", ["single", "batch"])
def test_samples_go_in_and_out(part: str) -> None:
    assert transferqueue.our_rate(part, lasts_s=0.01) > 0


@pytest.mark.extended
def test_a_pull_from_a_queue_has_a_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "FEW", 50)
    row = latency.row("memory", SHAPE, 100, None)
    assert 0 < row.ours < 1e4
    assert row.bound == "ratio, at most"


def test_the_memory_of_a_broker_is_more_than_its_payload() -> None:
    groups = 200
    assert memory.broker_mb(SHAPE, groups) > groups * SHAPE.nbytes / memory.MB
