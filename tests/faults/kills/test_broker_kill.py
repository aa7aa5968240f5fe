"""A broker killed again and again: acked groups are trained once, and clients see only a pause.

Producers, one of them in a process that is killed too, record acked groups; the trainer records trained ones. At the
end both are checked against the broker's ledger, and against its journal.
"""

import asyncio
import os
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Final

import pytest
from tests.faults.support.processes import (
    LIMIT_S,
    POLL_S,
    SEQUENCES,
    BrokerProcess,
    Worker,
    acked,
    config,
    is_whole,
    made,
    status,
    wait_until,
)

from rolloutmq.bus.consumer.client import Consumer, LeasedBatch
from rolloutmq.bus.producer.client import Producer
from rolloutmq.schemas.errors import LeaseLostError
from rolloutmq.schemas.files import AckedGroup, RunLayout
from rolloutmq.schemas.wire.control import LedgerCounts
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify

pytestmark = pytest.mark.usefixtures("impatient")

ROUNDS: Final = int(os.environ.get("ROLLOUTMQ_SOAK_ROUNDS", "10"))
BATCH: Final = 4
"""Groups of a batch."""
PRODUCERS: Final = ("p0", "p1", "p2")
MORTAL: Final = "mortal"
"""The producer that is a process of its own, and is killed with the broker."""
THINKING_S: Final = 0.02
"""Longest time a rollout takes."""
STEP_S: Final = 0.04
"""Longest time a step takes: more comes than is trained, and most of the queue is not in memory."""
LIFE_GROUPS: Final = 60
"""Most groups a producer sends before it is closed and opened again."""


class Oracle:
    """Records of the producers and the trainer, independent of the broker."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.sent: set[str] = set()
        self.logs = {name: run_dir.parent / f"{name}.jsonl" for name in (*PRODUCERS, MORTAL, "filler")}
        self.trained: Counter[str] = Counter()
        self.filtered: Counter[str] = Counter()
        self.lives: defaultdict[str, set[int]] = defaultdict(set)
        """Epochs of the broker in which a group was settled."""
        self.epochs: list[int] = []
        """Of each life of the broker but the first; sessions it opens have higher numbers."""
        self.settled = 0
        """Groups of settled batches; for any thread."""
        self.leases_lost = 0
        self.stopping = asyncio.Event()
        """Set when producers should come to an end."""
        self.drained = asyncio.Event()
        """Set when everything was trained."""

    def acks(self) -> dict[str, AckedGroup]:
        """Return every acked group."""
        lines = [line for log in self.logs.values() for line in acked(log)]
        found = {line.group_id: line for line in lines}
        assert len(found) == len(lines), "a group was acked twice"
        return found

    def note(self, batch: LeasedBatch, filtered: set[str], epoch: int) -> None:
        """Record the outcome of a batch."""
        for group in batch.groups:
            (self.filtered if group.group_id in filtered else self.trained)[group.group_id] += 1
            assert epoch not in self.lives[group.group_id], f"{group.group_id} twice in one life"
            self.lives[group.group_id].add(epoch)
        self.settled += len(batch.groups)

    def has_settled(self, groups: int) -> bool:
        """Whether that many groups were settled."""
        return self.settled >= groups

    @property
    def outcome(self) -> Counter[str]:
        """How often each group was settled."""
        return self.trained + self.filtered


async def produce(oracle: Oracle, name: str) -> None:
    """Send groups in one life after the other until the time to stop; each life sends the rest of the one before."""
    rng, numbers = random.Random(name), count()
    while not oracle.stopping.is_set():
        async with producing(oracle, name, drain_s=0.1) as producer:
            for number in islice(numbers, rng.randrange(1, LIFE_GROUPS)):
                if oracle.stopping.is_set():
                    break
                oracle.sent.add(f"{name}-{number}")
                await producer.send(made(f"{name}-{number}"))
                await asyncio.sleep(rng.random() * THINKING_S)
    async with producing(oracle, name, drain_s=LIMIT_S) as producer:
        assert await producer.flush(LIMIT_S)


@asynccontextmanager
async def producing(oracle: Oracle, name: str, drain_s: float) -> AsyncIterator[Producer]:
    async with Producer.open(
        oracle.run_dir,
        env="e",
        producer=name,
        group_size=SEQUENCES,
        ack_log=oracle.logs[name],
        save_to=oracle.run_dir.parent / f"{name}.spool",
        drain_s=drain_s,
    ) as producer:
        yield producer


async def train(oracle: Oracle) -> None:
    """Learn from whole groups only, find no signal in some, and make a checkpoint now and then."""
    rng = random.Random(0)
    async with Consumer.open(oracle.run_dir, sequences=BATCH * SEQUENCES) as consumer:
        while not oracle.drained.is_set():
            batch = await consumer.pull(consumer.version.step + 1, consumer.version, wait_s=0.5)
            if batch is None:
                continue
            for group in batch.groups:
                assert is_whole(group), f"{group.group_id} is damaged"
            without = {group.group_id for group in batch.groups if rng.random() < 0.1}
            await asyncio.sleep(rng.random() * STEP_S)
            try:
                await consumer.settle(batch, filtered=without)
            except LeaseLostError:
                oracle.leases_lost += 1
                continue
            oracle.note(batch, without, consumer.epoch)
            if rng.random() < 0.2:
                await consumer.commit(consumer.version)


async def kill_in_rounds(oracle: Oracle, broker: BrokerProcess, rounds: int) -> None:
    """Kill the broker at some moment while groups come and go; a worker that dies with it, every other time."""
    rng = random.Random(1)
    for life in range(rounds):
        enough = oracle.settled + 20
        with dying_worker(oracle, life) if life % 2 else nullcontext():
            await until(partial(oracle.has_settled, enough), "groups to be trained")
            await asyncio.sleep(rng.random() * 0.05)  # any moment will do
            broker.kill()
        await asyncio.to_thread(broker.start)
        oracle.epochs.append(broker.epoch)


def dying_worker(oracle: Oracle, life: int) -> Worker:
    return Worker(oracle.run_dir, MORTAL, oracle.logs[MORTAL], first=life * 100_000, pause_s=THINKING_S / 2)


async def until(met: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, met, what)


async def drain(oracle: Oracle) -> None:
    """Wait until nothing is queued or leased any more; fill up a partial batch."""
    async with producing(oracle, "filler", drain_s=LIMIT_S) as filler, asyncio.timeout(LIMIT_S):
        while (counts := await ledger(oracle)).queued + counts.leased:
            await asyncio.sleep(POLL_S)
            if counts.leased or counts.queued >= BATCH:
                continue
            for _ in range(BATCH - counts.queued):
                group_id = f"filler-{len(oracle.sent)}"
                oracle.sent.add(group_id)
                await filler.send(made(group_id))
            assert await filler.flush(LIMIT_S)


async def ledger(oracle: Oracle) -> LedgerCounts:
    return (await asyncio.to_thread(status, oracle.run_dir)).pressure.ledger


async def live_through(run_dir: Path, level: str, rounds: int) -> tuple[Oracle, LedgerCounts, BrokerProcess]:
    """Let producers, trainer and killer at each other, then drain; return the broker, which still runs."""
    oracle = Oracle(run_dir)
    settings = config(
        durability=level,
        high_bytes=16 << 20,
        ram_bytes=2 << 20,
        segment_bytes=4 << 20,
        max_group_bytes=1 << 20,
    )
    broker = await asyncio.to_thread(BrokerProcess, run_dir, settings)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train(oracle))
            producers = [tasks.create_task(produce(oracle, name)) for name in PRODUCERS]
            await kill_in_rounds(oracle, broker, rounds)
            oracle.stopping.set()
            await asyncio.gather(*producers)
            await drain(oracle)
            oracle.drained.set()
        # Only now: the trainer's last word may have been a commit.
        return oracle, await ledger(oracle), broker
    except BaseException:
        broker.kill()
        raise


@pytest.mark.parametrize(
    ("level", "rounds"),
    [
        pytest.param("disk", -(-ROUNDS // 3), id="disk"),
        pytest.param("disk", ROUNDS, id="disk, many kills", marks=pytest.mark.extended),
        pytest.param("os", -(-ROUNDS // 3), id="os", marks=pytest.mark.extended),
    ],
)
async def test_nothing_acked_is_lost_and_nothing_is_trained_twice(
    run_dir: Path, level: str, rounds: int
) -> None:
    oracle, counts, broker = await live_through(run_dir, level, rounds)
    with broker:
        acks = oracle.acks()
        assert oracle.leases_lost == 0
        assert oracle.outcome.keys() >= acks.keys()
        assert set(oracle.outcome.values()) == {1}
        assert all(name in oracle.sent or name.startswith(MORTAL) for name in oracle.outcome)
        assert acks.keys() >= oracle.sent
        assert counts.accepted == len(oracle.outcome)
        assert counts.trained + counts.committed == len(oracle.trained)
        assert counts.filtered == len(oracle.filtered)
        assert (counts.expired, counts.dead, counts.discarded, counts.rewound) == (0, 0, 0, 0)
        await asyncio.to_thread(broker.kill_and_start)
        assert await ledger(oracle) == counts
        assert await asyncio.to_thread(broker.end) == 0
    layout = RunLayout(run_dir)
    witness = Witness(acked=tuple(acks.values()), trained=(oracle.trained,))
    verdict = verify(layout.journal, layout.dead, lambda: witness)
    assert verdict.problems == []
    assert (verdict.recorded, verdict.accepted) == (True, counts.accepted)


@pytest.mark.extended
async def test_at_memory_what_is_lost_had_been_acked_before(run_dir: Path) -> None:
    oracle, counts, broker = await live_through(run_dir, "memory", -(-ROUNDS // 3))
    with broker:
        acks = oracle.acks()
        assert acks.keys() >= oracle.sent
        assert all(name in oracle.sent or name.startswith(MORTAL) for name in oracle.outcome)
        for name in acks.keys() - oracle.outcome.keys():
            assert acks[name].session < oracle.epochs[-1], f"{name} is lost, though its broker never died"
        for name, times in oracle.outcome.items():
            # A group is resent only to a later broker than the one that died before the ack.
            lives = [epoch for epoch in oracle.epochs if name in acks and epoch < acks[name].session]
            assert times <= 1 + len(lives), name
        assert counts.accepted == counts.trained + counts.committed + counts.filtered
