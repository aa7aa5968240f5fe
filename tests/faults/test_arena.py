"""Groups in shared memory: whichever process dies or cannot read it, no group is lost and each is whole."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.faults.support.processes import (
    LIMIT_S,
    SEQUENCES,
    BrokerProcess,
    Trainer,
    Worker,
    acked,
    config,
    is_whole,
    made,
    status,
    wait_until,
)

from benchmarks.harness.listening import free_listen
from rolloutmq.bus.consumer.client import BlockingBatch, BlockingConsumer, Consumer
from rolloutmq.bus.producer import connection
from rolloutmq.bus.producer.client import BlockingProducer, Producer
from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.shm import arena
from rolloutmq.schemas.errors import SegmentGoneError
from rolloutmq.schemas.wire.envelope import ArenaRef, PolicyVersion

NBYTES = 134_000
BATCH = 4
"""Groups of one step."""

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def producing(where: Path | str, **options: Any) -> BlockingProducer:
    return Producer.blocking(where, env="e", producer="p", group_size=SEQUENCES, **options)


@contextmanager
def training(where: Path | str) -> Iterator[BlockingConsumer]:
    with Consumer.blocking(where, sequences=BATCH * SEQUENCES) as consumer:
        yield consumer


def session_of(producer: BlockingProducer) -> SessionState:
    return producer._object._session


def send(producer: BlockingProducer, names: list[str], nbytes: int = NBYTES) -> None:
    for name in names:
        producer.send(made(name, nbytes))
    assert producer.flush(LIMIT_S)


def train(consumer: BlockingConsumer, step: int, nbytes: int = NBYTES) -> BlockingBatch:
    """Train one step, all of whose groups must be whole."""
    batch = consumer.pull(step, PolicyVersion(0, step - 1), LIMIT_S)
    assert batch is not None
    assert not batch.rejected
    assert all(is_whole(group, nbytes) for group in batch.groups)
    consumer.settle(batch)
    return batch


def train_all(
    consumer: BlockingConsumer, groups: int, first: int = 1, nbytes: int = NBYTES
) -> list[BlockingBatch]:
    return [train(consumer, step, nbytes) for step in range(first, first + groups // BATCH)]


def names_of(batches: list[BlockingBatch]) -> list[str]:
    return [group.group_id for batch in batches for group in batch.groups]


def in_place(batches: list[BlockingBatch]) -> int:
    """Return the groups delivered by address."""
    return sum(delivery.place is not None for batch in batches for delivery in batch.deliveries)


def test_only_envelopes_travel_and_memory_follows_what_is_in_use(run_dir: Path) -> None:
    names = [f"p-{i}" for i in range(120)]
    with BrokerProcess(run_dir, config()), producing(run_dir) as producer, training(run_dir) as consumer:
        batches = []
        for start in range(0, len(names), BATCH):
            send(producer, names[start : start + BATCH])
            batches += train_all(consumer, BATCH, first=start // BATCH + 1)
        assert names_of(batches) == names
        assert in_place(batches) == len(names)
        session = session_of(producer)
        assert not producer.as_frames
        assert not status(run_dir).as_frames
        assert session.arena is not None
        resident = os.fstat(session.arena.ref.fd).st_blocks * 512
        assert resident <= 3 << 20 < len(names) * NBYTES // 4


@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_what_a_killed_producer_had_sent_is_delivered(run_dir: Path, tmp_path: Path, durability: str) -> None:
    log = tmp_path / "acks"
    with BrokerProcess(run_dir, config(durability=durability)):
        with Worker(run_dir, "w", log, nbytes=NBYTES, pause_s=0.005) as worker:
            wait_until(lambda: len(acked(log)) >= 20, "acks")
            worker.kill()
        told = [line.group_id for line in acked(log)]
        with training(run_dir) as consumer:
            batches = train_all(consumer, len(told) // BATCH * BATCH)
        assert names_of(batches) == [f"w-{i}" for i in range(len(told) // BATCH * BATCH)]
        assert in_place(batches) == len(names_of(batches))


def test_after_a_broker_was_killed_all_come_and_are_whole(run_dir: Path) -> None:
    names = [f"p-{i}" for i in range(48)]
    with BrokerProcess(run_dir, config()) as broker, producing(run_dir) as producer:
        send(producer, names[:16])
        first = session_of(producer).arena
        with training(run_dir) as consumer:
            batches = [train(consumer, 1)]
            leased = consumer.pull(2, PolicyVersion(0, 1), LIMIT_S)
            assert leased is not None
            broker.kill()
            for name in names[16:24]:
                producer.send(made(name, NBYTES))  # into the arena, and nobody is there
            broker.start()
            assert producer.flush(LIMIT_S)
            send(producer, names[24:])
            consumer.settle(leased)
            batches += [leased, *train_all(consumer, len(names) - 2 * BATCH, first=3)]
        assert names_of(batches) == names
        assert session_of(producer).arena is not first
        assert in_place(batches[-6:]) == 6 * BATCH  # the last 24 were laid for the broker that came


def test_a_trainer_that_dies_under_its_lease_leaves_every_slot_as_it_was(run_dir: Path) -> None:
    names = [f"p-{i}" for i in range(40)]
    with BrokerProcess(run_dir, config(durability="memory")), producing(run_dir) as producer:
        send(producer, names[:8])
        with Trainer(run_dir, nbytes=NBYTES) as trainer:
            assert trainer.pull(1).ids == tuple(names[:4])
            send(producer, names[8:])  # there is much room elsewhere, and none where the leased ones lie
            used = session_of(producer).arena
            assert used is not None
            assert used.slots.used_bytes >= 40 * NBYTES
            trainer.signal(signal.SIGKILL)
            trainer.wait()
        with training(run_dir) as consumer:
            batches = train_all(consumer, len(names))
        assert names_of(batches) == names
        assert [delivery.deliveries for delivery in batches[0].deliveries] == [2] * 4
        assert in_place(batches) == len(names)


def test_over_tcp_groups_travel_as_frames(run_dir: Path) -> None:
    names = [f"p-{i}" for i in range(8)]
    address = free_listen()
    settings = config(listen=address, insecure=True)
    with BrokerProcess(run_dir, settings), producing(address) as producer:
        send(producer, names)
        assert producer.as_frames == status(run_dir).as_frames == {"not_offered": 8}
        with training(address) as consumer:
            batches = train_all(consumer, 8)
    assert names_of(batches) == names
    assert in_place(batches) == 0


def test_without_shared_memory_groups_travel_as_frames(run_dir: Path) -> None:
    with BrokerProcess(run_dir, config(shared_memory=False)), producing(run_dir) as producer:
        send(producer, [f"p-{i}" for i in range(4)])
        assert producer.as_frames == status(run_dir).as_frames == {"not_offered": 4}
        with training(run_dir) as consumer:
            assert in_place(train_all(consumer, 4)) == 0


class Misnamed(arena.Arena):
    """An arena as a process in another container names it: by a descriptor that does not exist."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.ref: ArenaRef = replace(self.ref, fd=self.ref.fd + 10_000)


class Failing(arena.Arena):
    """A system without such memory."""

    def __init__(self, nbytes: int) -> None:
        raise OSError(f"no room for {nbytes} bytes")


@pytest.mark.parametrize(
    ("kind", "reason", "rejected"), [(Misnamed, "arena_unreachable", 1), (Failing, "arena_failed", 0)]
)
def test_a_producer_whose_arena_cannot_be_read_sends_frames(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: type[arena.Arena], reason: str, rejected: int
) -> None:
    monkeypatch.setattr(connection, "Arena", kind)
    names = [f"p-{i}" for i in range(8)]
    with BrokerProcess(run_dir, config()), producing(run_dir) as producer:
        send(producer, names)
        assert producer.as_frames == {reason: 8}
        assert status(run_dir).as_frames == {"arena_unreachable" if rejected else "not_offered": 8}
        assert status(run_dir).rejected_by_reason.get("arena_unreachable", 0) == rejected
        with training(run_dir) as consumer:
            batches = train_all(consumer, 8)
    assert names_of(batches) == names
    assert in_place(batches) == 0


def test_a_trainer_that_cannot_read_an_arena_gets_frames(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(ref: ArenaRef) -> arena.MappedArena:
        raise SegmentGoneError(f"/proc/{ref.pid}", "it is in another container")

    monkeypatch.setattr(arena, "MappedArena", unreadable)
    names = [f"p-{i}" for i in range(24)]
    with BrokerProcess(run_dir, config()), producing(run_dir) as producer:
        send(producer, names)
        with training(run_dir) as consumer:
            batches = train_all(consumer, len(names))
    assert names_of(batches) == names
    assert in_place(batches) == 0
    assert [delivery.deliveries for batch in batches for delivery in batch.deliveries] == [1] * len(names)
    said = [record for record in caplog.records if "unreadable, requesting frames" in record.getMessage()]
    assert len(said) == 2  # the first time, and when it is given up


def test_memory_that_was_used_again_is_noticed_and_asked_for_as_frames(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the lease of a trainer is lost between the reply and the read."""
    names = [f"p-{i}" for i in range(8)]
    with BrokerProcess(run_dir, config()), producing(run_dir) as producer, training(run_dir) as consumer:
        send(producer, names)
        opened = arena.MappedArenas.open
        spoilt = iter([True])

        def open_once_spoilt(arenas: arena.MappedArenas, refs: Any) -> list[memoryview]:
            views = opened(arenas, refs)
            return [memoryview(bytes(len(view))) for view in views] if next(spoilt, False) else views

        monkeypatch.setattr(arena.MappedArenas, "open", open_once_spoilt)
        batches = train_all(consumer, 8)
    assert names_of(batches) == names
    assert [in_place([batch]) for batch in batches] == [0, BATCH]


def test_what_the_arena_has_no_room_for_travels_as_frames(run_dir: Path) -> None:
    nbytes = 1_000_000
    names = [f"p-{i}" for i in range(24)]
    settings = config(high_bytes=8 << 20, max_group_bytes=2 << 20)

    async def all_at_once() -> tuple[int, int]:
        async with Producer.open(run_dir, env="e", producer="p", group_size=SEQUENCES) as producer:
            sends = [asyncio.create_task(producer.send(made(name, nbytes))) for name in names]
            with Trainer(run_dir, nbytes=nbytes) as trainer:
                for step in range(1, len(names) // BATCH + 1):
                    said = await asyncio.to_thread(trainer.train, step)
                    assert said.what == "batch"
                    found.extend(said.ids)
            await asyncio.gather(*sends)
            framed = dict(producer.as_frames)
            assert (await asyncio.to_thread(status, run_dir)).as_frames == framed
            return framed.pop("arena_full"), len(framed)

    found: list[str] = []
    with BrokerProcess(run_dir, settings):
        full, others = asyncio.run(all_at_once())
    assert sorted(found) == sorted(names)
    assert 10 <= full < len(names)
    assert not others
