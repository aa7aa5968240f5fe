"""Restart: corner cases the usual tests of the core do not reach."""

from typing import TypeVar

from msgspec.structs import replace
from tests.services.broker.bench import TABLE, WALL, Bench, config, ids

from rolloutmq.bus.encoding.codec import encode
from rolloutmq.schemas.wire.control import Drain, Reset, WorkerBeat, WorkerBeatReply, WorkerState
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import NoBatch, Ok, Registered, Rejected
from rolloutmq.schemas.wire.requests import Goodbye, RegisterProducer, Settle
from rolloutmq.services.broker.actions import Bury, Publish
from rolloutmq.services.broker.journal.format.events import (
    ConsumerSnapshot,
    Event,
    GroupSnapshot,
    LedgerSnapshot,
    RetainedBatchSnapshot,
    RunSnapshot,
)
from rolloutmq.services.broker.journal.format.events_codec import decode_events
from rolloutmq.services.broker.journal.format.events_codec import encode as encode_events
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup

_F = TypeVar("_F", bound=Event)


def items(bench: Bench, kind: type[_F]) -> list[_F]:
    return [item for item in bench.core.snapshot() if isinstance(item, kind)]


def test_a_reset_is_the_same_over_a_restart() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.consumer()
    peer.send(2)
    bench.ask(Goodbye(producer="p", session=peer.session, produced=5), Ok)
    bench.ask(Reset(reason="x"), Ok)
    (ledger,) = items(bench, LedgerSnapshot)
    assert ledger.lost == 3
    assert items(bench.reborn(), LedgerSnapshot) == [ledger]
    assert items(bench, ConsumerSnapshot) == items(bench.reborn(), ConsumerSnapshot) == []


def test_a_fork_outlives_a_snapshot_before_it_shows() -> None:
    bench = Bench(config(e={"max_staleness": 100}))
    bench.producer().send(8)
    bench.consumer()
    for step in range(3):
        bench.train(step)
    bench.consumer(resume=PolicyVersion(0, 1))
    bench.restart()
    bench.batch(1, version=PolicyVersion(1, 1))
    (run,) = items(bench, RunSnapshot)
    assert run.forks == ((1, PolicyVersion(0, 1)),)
    assert items(bench.reborn(), RunSnapshot)[0].forks == run.forks


def test_the_first_batch_after_a_resume_counts_the_fork() -> None:
    bench = Bench(config(e={"max_staleness": 10}))
    bench.producer().send(2, step=60)
    bench.consumer(resume=PolicyVersion(0, 50))
    assert isinstance(bench.pull(55, version=PolicyVersion(1, 55)), NoBatch)
    assert bench.pressure().ledger.expired == 2


def test_another_limit_of_deliveries_does_not_bring_back_what_was_trained() -> None:
    bench = Bench(config(broker={"max_deliveries": 2}, e={}))
    bench.producer().send(2)
    bench.consumer()
    bench.batch(0)
    bench.consumer(resume=PolicyVersion())
    for step in range(2):
        alone = bench.batch(step)
        assert len(alone.groups) == 1
        bench.settle(alone)
    later = bench.reborn(config(broker={"max_deliveries": 5}, e={}))
    assert later.pressure().ledger.trained == 2


def buried(bench: Bench) -> list[StoredGroup]:
    """Send two groups, have them refused, and return them as they come back from the dead letters."""
    bench.producer().send(2)
    bench.consumer()
    batch = bench.batch(0)
    settle = Settle(
        consumer="c",
        lease=batch.lease,
        generation=batch.generation,
        version=PolicyVersion(0, 1),
        rejected=tuple(Rejected(group_id=name, reason="bad") for name in ids(batch)),
    )
    actions = bench.core.request((b"c",), settle, bench.now, WALL)
    bench.journal.write(bench.core.events())
    return [
        StoredGroup(
            header=action.group.header,
            env="e",
            split=Split.TRAIN,
            run="default",
            producer="p",
            session=action.group.session,
            table=TABLE,
            body=GroupBody(action.frames, 100),
            accepted_at=0.0,
            accepted_wall=WALL,
            order=action.group.order,
        )
        for action in actions
        if isinstance(action, Bury)
    ]


def test_the_dead_come_back_and_do_not_expire() -> None:
    bench = Bench(config(e={"max_staleness": 1}))
    dead = buried(bench)
    refused: dict[str, str] = {}
    previous = [group.order for group in dead]
    _, orders = bench.core.requeue((b"r",), dead, refused, bench.now, WALL)
    bench.journal.write(bench.core.events())
    assert (orders, refused) == (previous, {})
    again = bench.reborn()
    assert all(again.core.lives(order) for order in previous)
    assert len(again.batch(50).groups) == 2
    ledger = again.pressure().ledger
    assert (ledger.accepted, ledger.dead, ledger.leased) == (4, 0, 2)
    assert ledger.reasons == {"dead(rejected)": 2, "discarded(requeued)": 2, "passed(stale)": 2}


def test_the_dead_of_a_life_that_nobody_remembers_are_in_no_count() -> None:
    dead = buried(Bench())
    bench = Bench()
    bench.producer()
    bench.core.requeue((b"r",), dead, {}, bench.now, WALL)
    assert bench.pressure().ledger.dead == 0
    assert bench.pressure().ledger.queued == 2


def test_a_drain_that_ended_stays_ended() -> None:
    bench = Bench()
    bench.producer("w", pid=100)
    bench.ask(Drain(worker="w"), Ok)
    beat = WorkerBeat(worker="w", env="e", state=WorkerState.READY, pid=100)
    assert bench.ask(beat, WorkerBeatReply).draining
    assert not bench.ask(replace(beat, pid=200), WorkerBeatReply).draining
    bench.restart()
    assert not bench.ask(replace(beat, pid=200), WorkerBeatReply).draining


def test_a_drain_that_was_forgotten_with_its_worker_stays_forgotten() -> None:
    bench = Bench()
    bench.producer("w", pid=100)
    beat = WorkerBeat(worker="w", env="e", state=WorkerState.READY, pid=100)
    bench.ask(beat, WorkerBeatReply)
    bench.ask(Drain(worker="w"), Ok)
    bench.ask(replace(beat, state=WorkerState.GONE), WorkerBeatReply)
    for _ in range(40):
        bench.tick(1.0)
    bench.restart()
    assert not bench.ask(replace(beat, pid=200), WorkerBeatReply).draining


def test_absurd_numbers_of_a_peer_harm_nobody() -> None:
    bench = Bench()
    for number in range(5):
        name = f"p{number}"
        session = bench.producer(name).session
        bench.ask(Goodbye(producer=name, session=session, produced=1 << 62), Ok)
    bad = bench.producer("bad")
    again = RegisterProducer(
        producer="bad", env="e", group_size=4, resume_session=bad.session, begun=1 << 62, abandoned=1 << 62
    )
    bench.ask(again, Registered)
    good = bench.producer("good", slots=4)
    for action in bench.tick(2.0):
        if isinstance(action, Publish):
            encode(action.message)
    assert good.sync().start_limit > 0


def test_a_registration_that_is_repeated_rewinds_once() -> None:
    bench = Bench()
    bench.producer().send(4)
    bench.consumer()
    bench.train(0)
    zero = PolicyVersion()
    bench.consumer("a", world_size=2, resume=zero)
    bench.consumer("b", rank=1, world_size=2, resume=zero)
    part = bench.batch(0, consumer="a", world_size=2)
    bench.consumer("b", rank=1, world_size=2, resume=zero)
    other = bench.batch(0, consumer="b", rank=1, world_size=2)
    assert (part.lease, part.generation) == (other.lease, other.generation)


def test_a_retained_batch_is_restored_with_the_groups_that_are_left() -> None:
    """The record of one group is damaged, that of the batch is not: its states must not outnumber its groups."""
    bench = Bench()
    bench.producer().send(2)
    bench.consumer(resume=PolicyVersion())
    first, _ = bench.train(0)
    snapshot = [item[0] if isinstance(item, tuple) else item for item in bench.core.snapshot()]
    for lost in ({first}, set(bench.waiting())):
        left = [
            item
            for item in snapshot
            if not (isinstance(item, GroupSnapshot) and item.accepted.header.group_id in lost)
        ]
        later = Bench(bench.settings, epoch=2)
        later.core.restore(decode_events(encode_events(left)), bench.journal, 7.0, WALL)
        kept = items(later, RetainedBatchSnapshot)
        assert [[len(rank) for rank in one.shards] for one in kept] == [
            [len(rank) for rank in one.states] for one in kept
        ]
        later.core._state.transitions.commit("trainer", PolicyVersion(0, 1))
