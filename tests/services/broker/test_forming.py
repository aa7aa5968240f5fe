from tests.services.broker.bench import Bench, config, ids

from rolloutmq.schemas.delivery import Batch, NoBatch, Wait
from rolloutmq.schemas.envelope import PolicyVersion, Split


def wait_of(answer: object) -> Wait:
    assert isinstance(answer, NoBatch), answer
    return answer.wait


def batches(bench: Bench) -> list[Batch]:
    return [reply.message for reply in bench.late if isinstance(reply.message, Batch)]


# Staleness


def test_what_is_too_old_is_dropped_and_counted() -> None:
    bench = Bench(config(e={"max_staleness": 2}))
    peer = bench.producer()
    old = peer.send(2, step=1)
    peer.send(1, step=2)
    peer.send(2, step=3)
    bench.consumer()
    batch = bench.batch(4)
    assert [d.header.oldest.step for d in batch.groups] == [2, 3]
    pressure = bench.pressure()
    assert (pressure.ledger.expired, pressure.ledger.reasons) == (2, {"expired(stale)": 2})
    assert pressure.staleness_max == 2
    assert [(r.group_id, r.state, r.reason) for r in bench.dropped] == [
        (group_id, "expired", "stale") for group_id in old
    ]


def test_what_is_too_old_is_passed_on_where_that_is_wanted() -> None:
    bench = Bench(config(e={"max_staleness": 0, "stale": "pass"}))
    bench.producer().send(2, step=0)
    bench.consumer()
    bench.batch(7)
    pressure = bench.pressure()
    assert pressure.ledger.expired == 0
    assert pressure.staleness_max == 7
    assert pressure.ledger.reasons == {"passed(stale)": 2}


def test_a_queue_of_old_groups_leaves_no_pull_stuck() -> None:
    bench = Bench(config(batch=8, e={"max_staleness": 1, "pacing": True}))
    peer = bench.producer(slots=99)
    peer.send(4, step=0)
    bench.consumer()
    assert peer.sync().start_limit == 4
    assert bench.wait(9) == []
    assert bench.pressure().ledger.expired == 4
    bench.tick(0.3)
    assert peer.sync().start_limit == 8
    peer.send(2, step=9)
    assert len(batches(bench)) == 1


# Exactness


def test_no_exact_fit_becomes_a_short_batch_after_a_while() -> None:
    bench = Bench(config(broker={"exact_wait_s": 5.0}, e={}))
    bench.producer().send(4, sequences=3)
    bench.consumer()
    assert bench.wait(0, 10) == []
    assert bench.tick(4.9) is not None
    assert batches(bench) == []
    bench.tick(0.2)
    (batch,) = batches(bench)
    assert batch.short
    assert sum(d.header.sequences for d in batch.groups) == 9


def test_pulls_shorter_than_the_wait_still_see_it_end() -> None:
    bench = Bench(config(broker={"exact_wait_s": 5.0}, e={}))
    bench.producer().send(4, sequences=3)
    bench.consumer()
    for _ in range(5):
        assert wait_of(bench.pull(0, 10)) is Wait.NO_EXACT_FIT
        bench.tick(1.1)
    assert bench.batch(0, 10).short


def test_the_wait_for_an_exact_fit_begins_anew_when_the_queue_was_empty() -> None:
    bench = Bench(config(broker={"exact_wait_s": 5.0}, e={}))
    peer = bench.producer()
    peer.send(4, sequences=3)
    bench.consumer()
    bench.consumer("d", group="other")
    assert wait_of(bench.pull(0, 10)) is Wait.NO_EXACT_FIT
    bench.batch(0, 12, consumer="d", group="other")
    assert wait_of(bench.pull(0, 10)) is Wait.NO_BATCH
    bench.now += 6.0
    peer.send(4, sequences=3)
    assert wait_of(bench.pull(0, 10)) is Wait.NO_EXACT_FIT


def test_a_group_that_fits_ends_the_wait_at_once() -> None:
    bench = Bench(config(e={}))
    peer = bench.producer()
    peer.send(4, sequences=3)
    bench.consumer()
    bench.wait(0, 10)
    peer.send(1, sequences=4)
    (batch,) = batches(bench)
    assert not batch.short
    assert [d.header.sequences for d in batch.groups] == [3, 3, 4]


def test_groups_larger_than_the_batch_are_no_batch() -> None:
    bench = Bench(config(broker={"exact_wait_s": 0.0}, e={}))
    bench.producer().send(2, sequences=16)
    bench.consumer()
    assert wait_of(bench.pull(0, 8)) is Wait.NO_EXACT_FIT


def test_splits_never_mix() -> None:
    bench = Bench(config(e={}))
    bench.producer("t").send(1)
    evaluation = bench.producer("v", split=Split.EVAL)
    sent = evaluation.send(2)
    bench.consumer()
    assert wait_of(bench.pull(0, 8)) is Wait.NO_BATCH
    batch = bench.batch(0, 8, split=Split.EVAL)
    assert list(ids(batch)) == sent
    bench.settle(batch, version=PolicyVersion(0, 99))
    assert bench.pressure().step == 0


# Shares


def test_weights_hold_over_batches_too_small_to_hold_them_one_by_one() -> None:
    bench = Bench(config(a={"weight": 3.0}, b={"weight": 1.0}))
    a, b = bench.producer("pa", "a"), bench.producer("pb", "b")
    a.send(40)
    b.send(40)
    bench.consumer()
    taken = {"a": 0, "b": 0}
    for _ in range(16):
        batch = bench.batch(0, 8)
        for delivery in batch.groups:
            taken[delivery.env] += 1
        bench.settle(batch, no_signal=True)
    assert taken == {"a": 24, "b": 8}


def test_a_minimum_share_is_waited_for_and_given_up_by_a_silent_environment() -> None:
    bench = Bench(config(broker={"silent_env_s": 30.0}, a={}, b={"min_share": 0.5, "weight": 0.0}))
    bench.producer("pb", "b", slots=1)
    bench.producer("pa", "a").send(9)
    bench.consumer()
    assert wait_of(bench.pull(0, 8)) is Wait.MIN_SHARE
    bench.wait(0, 8)
    for _ in range(4):
        bench.send_beat()
        bench.tick(7.0)
    assert batches(bench) == []
    bench.tick(2.1)
    (batch,) = batches(bench)
    assert {d.env for d in batch.groups} == {"a"}


def test_a_minimum_share_is_kept() -> None:
    bench = Bench(config(a={"weight": 99.0}, b={"min_share": 0.5, "weight": 1.0}))
    bench.producer("pb", "b").send(3)
    bench.producer("pa", "a").send(9)
    bench.consumer()
    assert sorted(d.env for d in bench.batch(0, 16).groups) == ["a", "a", "b", "b"]


def test_a_batch_that_the_mark_cannot_hold_is_named() -> None:
    bench = Bench(config(broker={"high_bytes": 2000, "max_group_bytes": 1000}, batch=64, e={}))
    peer = bench.producer()
    bench.consumer()
    for _ in range(40):
        if peer.position + 600 <= peer.sync().byte_limit:
            peer.send(nbytes=600)
        bench.tick(0.6)
        bench.send_beat()
    assert wait_of(bench.pull(0, 64)) is Wait.BATCH_EXCEEDS_CAP
