"""Trainers killed, stopped, hung or poisoned: their groups are redelivered, and none is trained twice.

Each trainer is a process of its own that takes commands from the test.
"""

import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.faults.support.processes import (
    DIED_OF_POISON,
    LIMIT_S,
    SEQUENCES,
    BrokerProcess,
    Trainer,
    TrainerAnswer,
    config,
    feed,
    is_whole,
    status,
    wait_until,
)

from rolloutmq.bus.encoding.codec import decode_group
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.files import DroppedGroup, RunLayout
from rolloutmq.schemas.wire.control import LedgerCounts
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, ConsumerRegistered, Settled
from rolloutmq.schemas.wire.requests import Pull, RegisterConsumer, Settle
from rolloutmq.services.broker.journal.dead_letters import DeadEntry, DeadLetterStore
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify

pytestmark = pytest.mark.usefixtures("impatient")

BATCH = 4
"""Groups of a batch."""
LEASE_S = 0.6


@pytest.fixture
def broker(run_dir: Path) -> Iterator[BrokerProcess]:
    """A broker whose ledger adds up on disk when all is over."""
    with audited(run_dir) as running:
        yield running


@contextmanager
def audited(run_dir: Path, **settings: Any) -> Iterator[BrokerProcess]:
    """Run a broker; at the end it ends in order, and its ledger adds up on disk."""
    with BrokerProcess(run_dir, config(durability="disk", **settings)) as running:
        yield running
        counts = ledger(run_dir)
        assert running.end() == 0
    layout = RunLayout(run_dir)
    verdict = verify(layout.journal, layout.dead, Witness)
    assert verdict.problems == []
    assert (verdict.accepted, verdict.rewound) == (counts.accepted, counts.rewound)
    assert verdict.counts.get("dead", 0) == counts.dead
    assert sum(verdict.counts.get(state, 0) for state in ("trained", "committed")) == (
        counts.trained + counts.committed
    )


def names(count: int, prefix: str = "g") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def ledger(run_dir: Path) -> LedgerCounts:
    return status(run_dir).pressure.ledger


def wait_returned(run_dir: Path, count: int = BATCH) -> None:
    """Wait until nothing is leased, and that many groups are queued."""
    wait_until(
        lambda: (found := ledger(run_dir)).leased == 0 and found.queued == count, "the lease to go back"
    )


@pytest.mark.usefixtures("broker")
def test_a_trainer_killed_after_the_reply_gets_the_same_groups_again(run_dir: Path) -> None:
    feed(run_dir, names(2 * BATCH))
    with Trainer(run_dir) as first:
        held = first.pull(1)
        assert held.ids == tuple(names(BATCH))
        assert set(held.deliveries) == {1}
        first.kill()
    with Trainer(run_dir) as second:
        again = second.train(1)
        assert again.ids == held.ids
        assert set(again.deliveries) == {2}
        other = second.train(2)
        assert set(other.ids).isdisjoint(held.ids)
        assert set(other.deliveries) == {1}
    counts = ledger(run_dir)
    assert (counts.accepted, counts.trained, counts.queued, counts.leased) == (2 * BATCH, 2 * BATCH, 0, 0)


@pytest.mark.extended
@pytest.mark.usefixtures("broker")
def test_a_trainer_killed_for_good_leaves_its_groups_to_another(run_dir: Path) -> None:
    feed(run_dir, names(BATCH))
    with Trainer(run_dir) as first, Trainer(run_dir, consumer="other") as second:
        held = first.pull(1)
        first.kill()
        again = second.train(1)  # the pull waits until the silence of the dead one is noticed
        assert (again.ids, set(again.deliveries)) == (held.ids, {2})
    assert ledger(run_dir).trained == BATCH


@pytest.mark.extended
@pytest.mark.usefixtures("broker")
def test_a_trainer_stopped_past_its_lease_is_fenced_when_it_goes_on(run_dir: Path) -> None:
    feed(run_dir, names(2 * BATCH))
    with Trainer(run_dir) as stopped, Trainer(run_dir, consumer="other") as second:
        held = stopped.pull(1)
        stopped.signal(signal.SIGSTOP)
        wait_returned(run_dir, 2 * BATCH)
        again = second.train(1)
        assert (again.ids, set(again.deliveries)) == (held.ids, {2})
        stopped.signal(signal.SIGCONT)
        assert stopped.settle((0, 1)).what == "lost"
        assert ledger(run_dir).trained == BATCH
        late = stopped.train(2)
        assert set(late.ids).isdisjoint(held.ids)
    counts = ledger(run_dir)
    assert (counts.trained, counts.rewound, counts.dead) == (2 * BATCH, 0, 0)


@pytest.mark.usefixtures("broker")
def test_a_stopped_trainer_is_fenced_though_nobody_took_its_place(run_dir: Path) -> None:
    feed(run_dir, names(BATCH))
    with Trainer(run_dir) as stopped:
        held = stopped.pull(1)
        stopped.signal(signal.SIGSTOP)
        wait_returned(run_dir)
        stopped.signal(signal.SIGCONT)
        assert stopped.settle((0, 1)).what == "lost"
        again = stopped.train(1)
        assert (again.ids, set(again.deliveries)) == (held.ids, {2})
    assert ledger(run_dir).trained == BATCH


def test_a_hung_trainer_loses_its_lease_and_a_slow_one_does_not(run_dir: Path) -> None:
    # Its heartbeats go on, without progress: only the lease limit ends it.
    with audited(run_dir, lease_s=LEASE_S, silence_s=60.0):
        feed(run_dir, names(BATCH))
        with Trainer(run_dir) as hung:
            held = hung.pull(1)
            wait_returned(run_dir)
            assert hung.settle((0, 1)).what == "lost"
            again = hung.pull(1)
            assert (again.ids, set(again.deliveries)) == (held.ids, {2})
            uptime_s = status(run_dir).uptime_s

            def slow_for_long() -> bool:
                hung.progress()
                return status(run_dir).uptime_s > uptime_s + 2.5 * LEASE_S

            wait_until(slow_for_long, "more than two leases to pass")
            assert ledger(run_dir).leased == BATCH
            assert hung.settle((0, 1)).what == "settled"
        counts = ledger(run_dir)
        assert (counts.trained, counts.queued) == (BATCH, 0)


def test_a_broker_that_forgot_a_half_settled_step_brings_the_ranks_together(run_dir: Path) -> None:
    broker = BrokerProcess(run_dir, config(durability="memory"))
    try:
        with (
            Trainer(run_dir, consumer="r0", world_size=2) as r0,
            Trainer(run_dir, consumer="r1", rank=1, world_size=2) as r1,
        ):
            feed(run_dir, names(BATCH))
            assert (r0.pull(1).what, r1.pull(1).what) == ("batch", "batch")
            assert r0.settle((0, 1)).what == "settled"
            broker.kill_and_start()
            assert r1.settle((0, 1)).what == "lost"
            feed(run_dir, names(2 * BATCH)[BATCH:], producer="q")
            assert r0.pull(2).what == "batch"
            assert r1.pull(1).what == "batch"
            assert r0.settle((0, 2)).what == "lost"
            assert r0.pull(1).what == "batch"
            assert (r0.settle((0, 1)).what, r1.settle((0, 1)).what) == ("settled", "settled")
            counts = ledger(run_dir)
            assert (counts.trained, counts.dead) == (BATCH, 0)
    finally:
        broker.kill()


@pytest.mark.usefixtures("broker")
@pytest.mark.parametrize("settled_before", [pytest.param(False, marks=pytest.mark.extended), True])
def test_one_rank_killed_takes_the_whole_step_back(run_dir: Path, settled_before: bool) -> None:
    feed(run_dir, names(2 * BATCH))
    with Trainer(run_dir, consumer="r0", world_size=2) as r0:
        with Trainer(run_dir, consumer="r1", rank=1, world_size=2) as r1:
            parts = r0.pull(1), r1.pull(1)
            step = sorted((*parts[0].ids, *parts[1].ids))
            assert step == names(BATCH)
            if settled_before:
                assert r0.settle((0, 1)).what == "settled"
        with Trainer(run_dir, consumer="r1", rank=1, world_size=2) as r1:
            assert ledger(run_dir).trained == 0
            assert (r0.pull(2) if settled_before else r0.settle((0, 1))).what == "lost"
            again = r0.pull(1), r1.pull(1)
            assert sorted((*again[0].ids, *again[1].ids)) == step
            assert {*again[0].deliveries, *again[1].deliveries} == {2}
            assert r1.settle((0, 1)).what == "settled"
            assert ledger(run_dir).trained == 0
            assert r0.settle((0, 1)).what == "settled"
            assert ledger(run_dir).trained == BATCH
            assert set(r0.train(2).ids).isdisjoint(step)
            assert set(r1.train(2).ids).isdisjoint(step)
    assert ledger(run_dir).trained == 2 * BATCH


@pytest.fixture
def patient(run_dir: Path) -> Iterator[BrokerProcess]:
    """A broker without a silence limit: handmade requests send no heartbeats."""
    with audited(run_dir, silence_s=60.0) as running:
        yield running


def test_a_pull_repeated_over_a_restart_gets_the_same_batch(run_dir: Path, patient: BrokerProcess) -> None:
    feed(run_dir, names(2 * BATCH))

    def asked(request: RegisterConsumer | Pull | Settle) -> tuple[object, list[bytes]]:
        with BlockingClient(resolve_blocking(run_dir).serve) as client:
            reply, frames = client.request_frames(request, LIMIT_S)
            return reply, [bytes(frame) for frame in frames]

    registered, _ = asked(RegisterConsumer(consumer="t"))
    assert isinstance(registered, ConsumerRegistered)
    pull = Pull(consumer="t", step=1, version=PolicyVersion(), sequences=BATCH * SEQUENCES, request_id="one")
    batch, frames = asked(pull)
    assert isinstance(batch, Batch)
    patient.kill_and_start()
    kept, _ = asked(RegisterConsumer(consumer="t", generation=registered.generation))
    assert isinstance(kept, ConsumerRegistered)
    assert (kept.generation, kept.epoch > registered.epoch) == (registered.generation, True)
    assert asked(pull) == (batch, frames)
    settle = Settle(
        consumer="t",
        lease=batch.lease,
        generation=batch.generation,
        version=PolicyVersion(0, 1),
        trained=tuple(delivery.header.group_id for delivery in batch.groups),
    )
    settled, _ = asked(settle)
    assert isinstance(settled, Settled)
    patient.kill_and_start()
    assert asked(settle) == (settled, [])
    counts = ledger(run_dir)
    assert (counts.trained, counts.queued, counts.leased) == (BATCH, BATCH, 0)


def train_to_the_end(
    run_dir: Path, trainer: Trainer, step: int, life: int
) -> Iterator[tuple[int, TrainerAnswer]]:
    """Train until nothing is queued; ends early, with the exit code of poison, if it dies."""
    while ledger(run_dir).queued:
        batch = trainer.pull(step + 1, (life, step), wait_s=0.5)
        if batch.what == "none":  # a suspect was delivered alone, and the rest is less than a batch
            feed(run_dir, [f"extra-{life}-{step}"], "extra")
            continue
        if batch.what != "batch":
            assert trainer.wait() == DIED_OF_POISON
            return
        assert trainer.settle((life, step + 1)).what == "settled"
        step += 1
        yield step, batch


def poisoned(run_dir: Path, poison: tuple[str, ...], *, checkpoints: bool) -> Counter[str]:
    """Train with a process that dies of some groups and is restarted each time; return the trained ids."""
    trained: dict[int, tuple[str, ...]] = {}
    saved = 0
    for life in range(20):
        resume = (life - 1, saved) if checkpoints and life else None
        if resume:
            trained = {step: ids for step, ids in trained.items() if step <= saved}
        with Trainer(run_dir, dies_of=poison, sequences=2 * SEQUENCES, resume=resume) as trainer:
            for step, batch in train_to_the_end(run_dir, trainer, max(trained, default=0), life):
                trained[step] = batch.ids
                if checkpoints and step % 3 == 0:
                    trainer.commit((life, saved := step))
            if trainer.process.returncode is None:
                return Counter(itertools.chain.from_iterable(trained.values()))
    raise AssertionError("it never gets over the poison")


def letter_id(entry: DeadEntry) -> str:
    assert entry.letter is not None, entry.problem
    return entry.letter.group.header.group_id


@pytest.mark.usefixtures("broker")
@pytest.mark.parametrize(
    ("poison", "checkpoints"),
    [
        pytest.param(("g-9",), False, id="one"),
        pytest.param(("g-8", "g-9"), False, id="two in a batch", marks=pytest.mark.extended),
        pytest.param(("g-8", "g-9"), True, id="with checkpoints", marks=pytest.mark.extended),
    ],
)
def test_only_the_poison_dies(run_dir: Path, poison: tuple[str, ...], checkpoints: bool) -> None:
    feed(run_dir, names(18))
    trained = poisoned(run_dir, poison, checkpoints=checkpoints)
    extra = {name for name in trained if name.startswith("extra")}
    assert trained == Counter({*names(18), *extra} - set(poison))
    counts = ledger(run_dir)
    assert (counts.dead, counts.accepted) == (len(poison), 18 + len(extra))
    assert counts.trained + counts.committed == len(trained)
    layout = RunLayout(run_dir)
    dropped = [
        msgspec.json.decode(line, type=DroppedGroup) for line in layout.dropped.read_bytes().splitlines()
    ]
    assert {(line.group_id, line.state) for line in dropped} == {(name, "dead") for name in poison}
    store = DeadLetterStore(layout.dead, 1 << 30, sync=False)
    assert {letter_id(entry) for entry in store.entries()} == set(poison)
    for name in poison:
        found = store.find(name)
        assert found is not None
        assert found.frames is not None
        meta = found.meta
        assert is_whole(decode_group(meta.header, meta.table, found.frames, meta.env))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("killed", "ram_bytes"),
    [
        pytest.param(False, 256 << 20, id="in memory"),
        pytest.param(False, 1, id="read back"),
        pytest.param(True, 1, id="read back by another broker"),
    ],
)
def test_a_trainer_that_resumes_gets_the_batches_after_its_checkpoint_again(
    run_dir: Path, killed: bool, ram_bytes: int
) -> None:
    with audited(run_dir, ram_bytes=ram_bytes, segment_bytes=1 << 20) as broker:
        feed(run_dir, names(8 * BATCH))
        with Trainer(run_dir) as first:
            steps = {step: first.train(step) for step in range(1, 7)}
            first.commit((0, 3))
            first.kill()
        assert ledger(run_dir).committed == 3 * BATCH
        if killed:
            broker.kill_and_start()
        with Trainer(run_dir, resume=(0, 3)) as second:
            for step in (4, 5, 6):
                again = second.train(step, 1)
                assert again.rewound
                assert again.ids == steps[step].ids
                if killed and step == 4:
                    broker.kill_and_start()
            new = second.train(7, 1)
            assert not new.rewound
            assert set(new.ids).isdisjoint(
                itertools.chain.from_iterable(batch.ids for batch in steps.values())
            )
            second.commit((1, 7))
        counts = ledger(run_dir)
    assert counts.rewound == 3 * BATCH
    assert (counts.accepted, counts.committed) == (8 * BATCH, 7 * BATCH)
    assert (counts.queued, counts.trained, counts.leased) == (BATCH, 0, 0)
