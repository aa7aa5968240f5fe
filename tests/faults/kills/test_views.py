"""A consumer with views: groups are whole where the producer wrote them, until they are settled, whoever dies."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from tests.faults.support.processes import (
    LIMIT_S,
    SEQUENCES,
    BrokerProcess,
    Worker,
    acked,
    config,
    content,
    is_whole,
    made,
    wait_until,
)

from benchmarks.harness.listening import free_listen
from rolloutmq.bus.consumer.client import BlockingBatch, BlockingConsumer, Consumer
from rolloutmq.bus.producer.client import BlockingProducer, Producer
from rolloutmq.schemas.errors import ConsumerFencedError
from rolloutmq.schemas.wire.envelope import PolicyVersion

NBYTES = 40_000
BATCH = 4
"""Groups of one step."""

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@contextmanager
def producing(where: Path | str) -> Iterator[BlockingProducer]:
    with Producer.blocking(where, env="e", producer="p", group_size=SEQUENCES, drain_s=0.0) as producer:
        yield producer


def viewing(where: Path | str) -> BlockingConsumer:
    return Consumer.blocking(where, sequences=BATCH * SEQUENCES, views=True)


def send(producer: BlockingProducer, names: list[str]) -> None:
    for name in names:
        producer.send(made(name, NBYTES))
    assert producer.flush(LIMIT_S)


def pull(consumer: BlockingConsumer, step: int) -> BlockingBatch:
    batch = consumer.pull(step, PolicyVersion(0, step - 1), LIMIT_S)
    assert batch is not None
    assert not batch.rejected
    return batch


def are_whole(batch: BlockingBatch) -> bool:
    return all(is_whole(group, NBYTES) for group in batch.groups)


def are_views(batch: BlockingBatch) -> bool:
    return all(delivery.place is not None for delivery in batch.deliveries)


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_groups_are_whole_until_settled_and_later_memory_shows_others(run_dir: Path, durability: str) -> None:
    numbers = count()
    settings = config(durability=durability)
    with BrokerProcess(run_dir, settings), producing(run_dir) as producer, viewing(run_dir) as consumer:
        first: BlockingBatch | None = None
        for step in range(1, 100):
            send(producer, [f"p-{next(numbers)}" for _ in range(BATCH)])
            batch = pull(consumer, step)
            assert are_views(batch)
            assert are_whole(batch)
            send(
                producer, [f"p-{next(numbers)}" for _ in range(BATCH)]
            )  # others are written beside the leased ones
            assert are_whole(batch)
            batch.ack()
            consumer.commit(PolicyVersion(0, step))
            first = first or batch
            if not are_whole(first):
                break
        assert first is not None
        assert not are_whole(first), "the memory was not used again: the groups were copied"
    assert [len(group["tokens"]) for group in first.groups]  # all others are gone, and it can be read


def test_held_groups_outlive_a_killed_broker(run_dir: Path) -> None:
    with BrokerProcess(run_dir, config()) as broker, producing(run_dir) as producer:
        send(producer, [f"p-{i}" for i in range(2 * BATCH)])
        with viewing(run_dir) as consumer:
            batch = pull(consumer, 1)
            assert are_views(batch)
            broker.kill()
            assert are_whole(batch)
            broker.start()
            send(producer, [f"q-{i}" for i in range(2 * BATCH)])
            assert are_whole(batch)
            batch.ack()
            assert are_whole(pull(consumer, 2))


def test_held_groups_outlive_a_killed_producer(run_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "acks"
    with BrokerProcess(run_dir, config(durability="memory")), viewing(run_dir) as consumer:
        with Worker(run_dir, "w", log, nbytes=NBYTES, pause_s=0.005) as worker:
            wait_until(lambda: len(acked(log)) >= 2 * BATCH, "acks")
            batch = pull(consumer, 1)
            worker.kill()
        assert are_views(batch)
        assert are_whole(batch)
        batch.ack()
        assert are_whole(pull(consumer, 2))
    assert [content(group) for group in batch.groups]


def test_groups_that_come_as_frames_are_whole_for_good(run_dir: Path) -> None:
    address = free_listen()
    settings = config(listen=address, insecure=True)
    with BrokerProcess(run_dir, settings), producing(run_dir) as producer, viewing(address) as consumer:
        send(producer, [f"p-{i}" for i in range(BATCH)])
        batch = pull(consumer, 1)
        assert not any(delivery.place for delivery in batch.deliveries)
        batch.ack()
        consumer.commit(PolicyVersion(0, 1))
        send(producer, [f"q-{i}" for i in range(BATCH)])
        assert are_whole(batch)
    assert are_whole(batch)


def test_a_displaced_consumer_reads_what_is_there_and_is_told(run_dir: Path) -> None:
    numbers = count()
    with BrokerProcess(run_dir, config(durability="memory")), producing(run_dir) as producer:
        send(producer, [f"p-{next(numbers)}" for _ in range(BATCH)])
        with viewing(run_dir) as displaced:
            batch = pull(displaced, 1)
            assert are_whole(batch)
            with viewing(run_dir) as consumer:
                for step in range(1, 100):
                    send(producer, [f"p-{next(numbers)}" for _ in range(BATCH)])
                    other = pull(consumer, step)
                    assert are_whole(other)
                    other.ack()
                    consumer.commit(PolicyVersion(0, step))
                    if not are_whole(batch):
                        break
            assert not are_whole(batch)
            with pytest.raises(ConsumerFencedError):
                batch.ack()
