"""Wait reasons of trainers and producers: each is reached, reported, and counted in seconds that only grow."""

from collections.abc import Callable

import pytest
from tests.services.broker.bench import Bench, Peer, config
from tests.services.broker.state.test_tasks import Taker, goodbye, submit, task

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import Drain, JournalStatus, SetValues, ValuesSet
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import NoBatch, Ok, Wait
from rolloutmq.services.monitor.status import waits

TIGHT = {"high_bytes": 10_000, "max_group_bytes": 1000}


def fill(peer: Peer, nbytes: int = 200) -> None:
    """Send while there is credit, and until there has been none for a while."""
    for _ in range(12):
        while peer.position + nbytes <= peer.sync().byte_limit and peer.sync().start_limit > peer.seq:
            peer.send(nbytes=nbytes)
        peer.bench.tick(0.3)


def slow(bench: Bench) -> None:
    bench.core.journaled(JournalStatus(health="slow"), bench.now)


def _lane_full() -> Bench:
    bench = Bench(config(broker=TIGHT, e={"high_bytes": 2000}))
    fill(bench.producer())
    return bench


def _global_full() -> Bench:
    bench = Bench(config(broker=TIGHT, e={}))
    fill(bench.producer())
    return bench


def _no_credit() -> Bench:
    """Other producers hold all room as grants, and nothing is queued."""
    bench = Bench(config(broker={**TIGHT, "max_group_bytes": 5000}, e={}))
    busy = bench.producer("busy")
    busy.send(nbytes=1000)
    for name in "abcdefgh":
        bench.producer(name)
    bench.tick(0.1)
    return bench


def _stale_guard() -> Bench:
    bench = Bench(config(e={"pacing": True, "max_staleness": 0}))
    bench.producer(slots=99).send(2)
    bench.tick()
    return bench


def _no_tasks() -> Bench:
    """All permits of the lane are unused, because nobody submits a task."""
    bench = Bench(config(e={"pacing": True, "max_staleness": 0}))
    Taker(bench.producer(slots=99)).wait()
    bench.tick(1.0)
    return bench


def _journal_slow() -> Bench:
    bench = Bench(config(e={}))
    bench.producer()
    slow(bench)
    return bench


@pytest.mark.parametrize(
    ("reason", "made"),
    [
        (Wait.LANE_FULL, _lane_full),
        (Wait.GLOBAL_FULL, _global_full),
        (Wait.NO_CREDIT, _no_credit),
        (Wait.STALE_GUARD, _stale_guard),
        (Wait.NO_TASKS, _no_tasks),
        (Wait.JOURNAL_SLOW, _journal_slow),
    ],
)
def test_each_reason_of_producers_is_reached_and_counted(reason: Wait, made: Callable[[], Bench]) -> None:
    bench = made()
    before = bench.pressure()
    assert before.lanes[0].wait == reason
    assert f"workers wait: {reason}, " in waits.explain(before)
    bench.now += 2.0
    after = bench.pressure()
    grown = after.producer_waits_s[reason] - before.producer_waits_s.get(reason, 0.0)
    assert grown == pytest.approx(2.0 * before.lanes[0].waiting)
    assert not after.trainer_waits_s


def _no_batch() -> Bench:
    bench = Bench()
    bench.producer().send(1)
    return bench


def _no_exact_fit() -> Bench:
    bench = Bench(config(broker={"exact_wait_s": 60.0}, e={}))
    bench.producer().send(4, sequences=3)
    return bench


def _min_share() -> Bench:
    bench = Bench(config(e={}, f={"min_share": 0.5}))
    bench.producer("p", "e").send(4)
    bench.producer("q", "f")
    return bench


def _batch_exceeds_cap() -> Bench:
    """Groups are far larger than anybody could know: one fills the lane, two make a batch."""
    bench = Bench(config(broker={**TIGHT, "max_group_bytes": 2000}, e={"high_bytes": 1500}))
    fill(bench.producer(), 1000)
    return bench


def _leased_elsewhere() -> Bench:
    bench = Bench()
    bench.producer().send(4)
    bench.consumer("other", rank=0, world_size=2)
    bench.consumer("c", rank=1, world_size=2)
    bench.batch(0, consumer="other", world_size=2)
    bench.settle(bench.batch(0, rank=1, world_size=2), rank=1)
    return bench


def _starved_by_the_journal() -> Bench:
    bench = Bench()
    bench.producer()
    slow(bench)
    return bench


@pytest.mark.parametrize(
    ("reason", "made"),
    [
        (Wait.NO_BATCH, _no_batch),
        (Wait.NO_EXACT_FIT, _no_exact_fit),
        (Wait.MIN_SHARE, _min_share),
        (Wait.BATCH_EXCEEDS_CAP, _batch_exceeds_cap),
        (Wait.LEASED_ELSEWHERE, _leased_elsewhere),
        (Wait.JOURNAL_SLOW, _starved_by_the_journal),
    ],
)
def test_each_reason_of_trainers_is_reached_and_counted(reason: Wait, made: Callable[[], Bench]) -> None:
    bench = made()
    sequences = 10 if reason is Wait.NO_EXACT_FIT else 8
    if reason is Wait.LEASED_ELSEWHERE:
        assert bench.wait(1, rank=1, world_size=2) == []
    else:
        bench.consumer()
        assert bench.wait(0, sequences) == []
    bench.tick()
    before = bench.pressure()
    assert before.trainer_wait == reason
    assert f"trainer waits: {reason}, " in waits.explain(before)
    bench.now += 2.0
    after = bench.pressure()
    grown = after.trainer_waits_s[reason] - before.trainer_waits_s.get(reason, 0.0)
    assert grown == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("run", "nbytes"),
    [
        (config(broker={"high_bytes": 1000}, batch=20, e={}), 300),
        (config(broker=TIGHT, e={"high_bytes": 1500}), 1000),
    ],
)
def test_a_batch_that_exceeds_the_cap_is_said_to_the_trainer(run: RunConfig, nbytes: int) -> None:
    """The whole reserve goes into the batch and is not enough: the groups are larger than any before."""
    bench = Bench(run)
    peer, sequences = bench.producer(), run.trainer.batch_sequences
    bench.consumer()
    assert bench.wait(0, sequences) == []
    fill(peer, nbytes)
    assert bench.late == []
    answer = bench.pull(0, sequences)
    assert isinstance(answer, NoBatch)
    assert answer.wait is Wait.BATCH_EXCEEDS_CAP


def test_a_larger_mark_ends_the_wait_for_a_batch_that_exceeded_it() -> None:
    bench = Bench(config(broker={**TIGHT, "max_group_bytes": 2000}, e={"high_bytes": 1500}))
    peer = bench.producer()
    bench.consumer()
    fill(peer, 1000)
    assert bench.wait(0) == []
    bench.ask(SetValues(values={"env.e.high_bytes": 3000}), ValuesSet)
    fill(peer, 1000)
    assert bench.late, "the pull that waited was answered"


@pytest.mark.parametrize(
    ("broker", "env", "key"),
    [
        ({"high_bytes": 100, "max_group_bytes": 50}, {}, "broker.high_bytes"),
        ({"high_groups": 1}, {}, "broker.high_groups"),
        ({}, {"high_bytes": 100}, "environment.e.high_bytes"),
    ],
)
def test_marks_that_cannot_hold_a_batch_are_refused(
    broker: dict[str, int], env: dict[str, int], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        config(broker=broker, batch=8, e=env)
    assert isinstance(config(broker={}, batch=8, e={}), RunConfig)


def test_the_part_of_a_lane_is_by_weight_or_minimum_share() -> None:
    run = config(batch=64, e={"weight": 3.0}, f={"weight": 1.0, "min_share": 0.5}, g={"split": "eval"})
    assert (run.part("e"), run.part("f"), run.part("g")) == (48, 32, 64)


def test_a_task_ends_the_wait_for_one() -> None:
    bench = Bench(config(e={"pacing": True, "max_staleness": 0}))
    one, two = Taker(bench.producer("p", slots=99)), Taker(bench.producer("q", slots=1))
    one.wait(b"p")
    two.wait(b"q")
    bench.tick(1.0)
    assert bench.pressure().lanes[0].waiting == 2
    submit(bench, task("a"), task("b"))
    bench.tick(1.0)
    assert [peer.peer.sync().wait for peer in (one, two)] == [Wait.STALE_GUARD] * 2


def test_a_producer_without_permits_waits_for_the_tasks_of_the_others() -> None:
    bench = Bench(config(batch=4, e={"pacing": True, "max_staleness": 0}))
    Taker(bench.producer("p")).wait()
    bench.producer("q")
    bench.tick(1.0)
    assert (bench.pressure().lanes[0].wait, bench.pressure().lanes[0].waiting) == (Wait.NO_TASKS, 2)


def test_between_two_points_of_an_evaluation_nobody_is_said_to_wait() -> None:
    bench = Bench(config(e={}))
    Taker(bench.producer(split=Split.EVAL)).wait()
    bench.tick(1.0)
    assert [lane.wait for lane in bench.pressure().lanes] == [""]


@pytest.mark.parametrize("ending", ["repeats", "leaves", "late", "fenced"])
def test_no_ended_request_for_a_task_is_waited_for(ending: str) -> None:
    bench = Bench(config(e={}))
    worker = Taker(bench.producer())
    worker.wait()
    if ending == "repeats":
        worker.wait()
        submit(bench, task("a"))
    elif ending == "leaves":
        goodbye(bench, worker.peer)
    elif ending == "late":
        bench.tick(8.0)
    else:
        bench.producer()
    bench.tick(1.0)
    bench.tick(1.0)
    assert [lane.wait for lane in bench.pressure().lanes] == [""]


def test_one_who_drains_waits_for_no_rollout() -> None:
    bench = _stale_guard()
    assert bench.pressure().lanes[0].wait == Wait.STALE_GUARD
    bench.ask(Drain(worker="p"), Ok)
    bench.tick()
    assert bench.pressure().lanes[0].wait == ""


def test_who_has_used_a_part_of_its_window_is_not_said_to_wait() -> None:
    bench = Bench(config(e={}))
    peer = bench.producer(slots=400)
    for _ in range(5):
        peer.send(10)
        bench.tick(0.3)
        assert peer.sync().wait is Wait.NONE
    assert bench.pressure().producer_waits_s == {}
