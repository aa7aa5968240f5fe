import pytest
from tests.services.broker.bench import Bench, config, ids

from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.replies import (
    Batch,
    ConsumerRegistered,
    ErrorReply,
    NoBatch,
    Ok,
    Rejected,
    Settled,
    Wait,
)
from rolloutmq.schemas.wire.requests import Commit, ConsumerBeat, Pull, RegisterConsumer, Release, Settle


def ready(groups: int = 4, *, broker: dict[str, float] | None = None) -> Bench:
    """Return a bench with groups of 4 sequences queued and consumer `c` registered."""
    bench = Bench(config(broker=broker, e={"max_staleness": 99}))
    bench.producer().send(groups)
    bench.consumer()
    return bench


def world(bench: Bench, size: int = 2) -> list[dict[str, object]]:
    ranks: list[dict[str, object]] = [{"rank": r, "world_size": size} for r in range(size)]
    for rank in ranks:
        bench.consumer(f"c{rank['rank']}", **rank)
    return [{**rank, "consumer": f"c{rank['rank']}"} for rank in ranks]


def settle_of(batch: Batch, **given: object) -> Settle:
    usual = {
        "consumer": "c",
        "lease": batch.lease,
        "generation": batch.generation,
        "version": PolicyVersion(0, batch.step + 1),
        "trained": ids(batch),
    }
    return Settle(**{**usual, **given})  # type: ignore[arg-type]


# One step, once


def test_a_pull_is_idempotent_by_its_request_id() -> None:
    bench = ready()
    first = bench.batch(0, request_id="one")
    assert bench.batch(0, request_id="one") == first
    assert bench.batch(0, request_id="another try") == first
    assert [d.deliveries for d in first.groups] == [1, 1]
    bench.settle(first)
    again = bench.pull(0, request_id="another try")
    assert isinstance(again, ErrorReply)
    assert again.code is ErrorCode.LEASE_LOST
    assert bench.batch(1).groups != first.groups


def test_the_next_step_waits_for_the_lease() -> None:
    bench = ready()
    batch = bench.batch(0)
    refused = bench.pull(1)
    assert isinstance(refused, NoBatch)
    assert (refused.wait, refused.queued_sequences) == (Wait.LEASED_ELSEWHERE, 8)
    assert bench.wait(1) == []
    bench.settle(batch)
    (reply,) = bench.late
    assert isinstance(reply.message, Batch)


def test_a_step_with_other_numbers_is_a_conflict() -> None:
    bench = ready()
    bench.batch(0)
    answer = bench.pull(0, 4)
    assert isinstance(answer, ErrorReply)
    assert answer.code is ErrorCode.CONFLICT


def test_settling_is_idempotent_and_must_match() -> None:
    bench = ready()
    batch = bench.batch(0)
    some = ids(batch)
    for wrong in (some[:1], (*some, "more"), (some[0], some[0]), ()):
        assert bench.refused(settle_of(batch, trained=wrong)) is ErrorCode.INVALID
    assert bench.refused(settle_of(batch, filtered=some[:1])) is ErrorCode.INVALID
    assert bench.refused(settle_of(batch, rank=1)) is ErrorCode.INVALID
    assert bench.refused(settle_of(batch, consumer="d")) is ErrorCode.INVALID
    assert bench.refused(settle_of(batch, generation=99)) is ErrorCode.LEASE_LOST
    bench.ask(settle_of(batch), Settled)
    bench.ask(settle_of(batch), Settled)
    assert bench.refused(settle_of(batch, trained=(), filtered=some)) is ErrorCode.CONFLICT
    ledger = bench.pressure().ledger
    assert (ledger.trained, ledger.leased, ledger.queued) == (2, 0, 2)


def test_a_step_never_leads_to_an_older_policy() -> None:
    bench = ready()
    batch = bench.batch(2)
    assert bench.refused(settle_of(batch, version=PolicyVersion(0, 1))) is ErrorCode.INVALID
    assert bench.pressure().ledger.leased == len(ids(batch))
    bench.ask(settle_of(batch), Settled)


def test_each_fate_has_its_place_in_the_ledger() -> None:
    bench = ready()
    batch = bench.batch(0, 16)
    a, b, c, d = ids(batch)
    bench.settle(batch, trained=(a, b), filtered=(c,), rejected=(Rejected(group_id=d, reason="nan"),))
    ledger = bench.pressure().ledger
    assert (ledger.trained, ledger.filtered, ledger.dead) == (2, 1, 1)
    assert ledger.reasons == {"dead(rejected)": 1}
    (lane,) = bench.pressure().lanes
    assert lane.trained_groups == 2
    (record,) = bench.dropped
    assert (record.group_id, record.state, record.reason) == (d, "dead", "rejected: nan")
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 1)), Ok)
    ledger = bench.pressure().ledger
    assert (ledger.trained, ledger.committed, ledger.filtered) == (0, 2, 1)


def test_equal_ids_in_one_batch_are_told_apart_by_count() -> None:
    bench = Bench(config(e={}))
    peer = bench.producer()
    for crc in (1, 2):
        peer.send(1, group_id="x", crc=crc)
    bench.consumer()
    batch = bench.batch(0)
    bench.settle(batch, trained=("x",), filtered=("x",))
    ledger = bench.pressure().ledger
    assert (ledger.trained, ledger.filtered) == (1, 1)


def test_a_batch_without_a_signal_is_no_step() -> None:
    bench = ready()
    bench.settle(bench.batch(3, version=PolicyVersion(0, 3)), no_signal=True, version=PolicyVersion(0, 3))
    assert bench.pressure().step == 3
    bench.settle(bench.batch(3, version=PolicyVersion(0, 3)))
    assert bench.pressure().step == 4


# Ranks


def test_ranks_get_disjoint_parts_of_one_step_and_settle_it_together() -> None:
    bench = ready()
    one, two = world(bench)
    first, second = bench.batch(0, 16, **one), bench.batch(0, 16, **two)
    assert (first.lease, first.generation) == (second.lease, second.generation)
    assert sorted(ids(first) + ids(second)) == [
        f"p-{d.session}-{i}" for i in (1, 2, 3, 4) for d in first.groups[:1]
    ]
    assert not set(ids(first)) & set(ids(second))
    bench.settle(first, consumer="c0")
    assert bench.pressure().ledger.leased == 4
    bench.settle(second, consumer="c1", rank=1)
    assert bench.pressure().ledger.trained == 4


def test_a_rank_that_is_done_waits_for_the_others_before_it_pulls_again() -> None:
    bench = ready(8)
    one, two = world(bench)
    first, second = bench.batch(0, 16, **one), bench.batch(0, 16, **two)
    bench.settle(first, consumer="c0", no_signal=True)
    again = bench.pull(0, 16, **one)
    assert isinstance(again, NoBatch)
    assert again.wait is Wait.LEASED_ELSEWHERE
    bench.settle(second, consumer="c1", rank=1, no_signal=True)
    assert not set(ids(bench.batch(0, 16, **one))) & set(ids(first))


def test_a_rank_without_groups_still_takes_part() -> None:
    bench = ready(1)
    one, two = world(bench)
    batches = [bench.batch(0, 0, tokens=39, **rank) for rank in (one, two)]
    assert [len(batch.groups) for batch in batches] == [1, 0]
    bench.settle(batches[0], consumer="c0")
    bench.settle(batches[1], consumer="c1", rank=1)
    assert bench.pressure().ledger.trained == 1


def test_a_pull_must_be_that_of_the_registration() -> None:
    bench = ready()
    for wrong in ({"rank": 1}, {"world_size": 2}, {"group": "other"}):
        answer = bench.pull(0, **wrong)
        assert isinstance(answer, ErrorReply)
        assert answer.code is ErrorCode.CONFLICT
    answer = bench.pull(0, consumer="stranger")
    assert isinstance(answer, ErrorReply)
    assert answer.code is ErrorCode.UNKNOWN
    for run, code in (("other", ErrorCode.INVALID), ("run", None), ("default", None)):
        answer = bench.pull(0, run=run)
        assert (answer.code if isinstance(answer, ErrorReply) else None) is code


def test_a_lost_rank_takes_the_whole_step_back() -> None:
    bench = ready()
    one, two = world(bench)
    first, second = bench.batch(0, 16, **one), bench.batch(0, 16, **two)
    bench.settle(first, consumer="c0")
    for _ in range(4):
        bench.now += 3.0
        bench.send_beat("c0")
        bench.tick()
    assert bench.pressure().ledger.leased == 0
    assert bench.refused(settle_of(second, consumer="c1", rank=1)) is ErrorCode.LEASE_LOST
    assert bench.pressure().ledger.queued == 4


# Lost leases


@pytest.mark.parametrize("how", ["silence", "no progress", "release", "new life"])
def test_a_lost_lease_returns_in_order_and_is_fenced(how: str) -> None:
    bench = ready(6)
    bench.settle(bench.batch(0))
    batch = bench.batch(1)
    if how == "silence":
        bench.tick(10.5)
    elif how == "no progress":
        bench.ask(ConsumerBeat(consumer="c", progress=1), Ok)
        for _ in range(13):
            bench.now += 9.5
            bench.ask(ConsumerBeat(consumer="c", progress=1), Ok)
            bench.tick()
    elif how == "release":
        bench.ask(Release(consumer="c"), Ok)
    else:
        bench.consumer()
    assert bench.refused(settle_of(batch)) is ErrorCode.LEASE_LOST
    bench.consumer()
    again = bench.batch(1)
    assert ids(again) == ids(batch)
    assert again.generation > batch.generation
    assert [d.deliveries for d in again.groups] == [2, 2]
    assert not again.rewound


def test_progress_keeps_a_lease() -> None:
    bench = ready()
    batch = bench.batch(0)
    for progress in range(1, 40):
        bench.now += 9.0
        bench.ask(ConsumerBeat(consumer="c", progress=progress), Ok)
        bench.tick()
    bench.settle(batch)


def test_a_lease_is_lost_at_the_very_moment_that_was_told() -> None:
    bench = ready(broker={"silence_s": 1000.0, "lease_s": 50.0})
    bench.batch(0)
    while bench.now < 150.0:
        bench.now = bench.core.next_deadline(bench.now)
        bench.tick()
    assert bench.now == 150.0
    assert bench.pressure().ledger.leased == 0


def test_a_group_that_kills_its_trainers_is_buried_alone() -> None:
    bench = ready(6)
    poison = ids(bench.batch(0))[1]
    bench.consumer()
    trained: list[str] = []
    step, killed = 0, 1
    while isinstance(batch := bench.pull(step), Batch):
        if poison in ids(batch):
            bench.consumer()
            killed += 1
            continue
        bench.settle(batch)
        trained += ids(batch)
        step += 1
    assert killed == bench.settings.broker.max_deliveries
    ledger = bench.pressure().ledger
    assert (ledger.dead, ledger.queued, len(set(trained))) == (1, 0, 5)
    assert ledger.reasons == {"dead(deliveries)": 1}
    assert [record.group_id for record in bench.dropped] == [poison]


def test_a_group_with_one_chance_left_goes_out_alone_and_first() -> None:
    bench = ready(4)
    for _ in range(2):
        assert len(bench.batch(0).groups) == 2
        bench.consumer()
    for step in range(2):
        alone = bench.batch(step)
        assert (len(alone.groups), alone.short, alone.groups[0].deliveries) == (1, True, 3)
        bench.settle(alone)
    assert len(bench.batch(2).groups) == 2


def test_two_poisons_in_one_batch_take_nobody_with_them() -> None:
    bench = ready(8)
    poisons = set(ids(bench.batch(0, 16))[1:3])
    bench.consumer()
    for step in range(99):
        batch = bench.pull(step, 16)
        if not isinstance(batch, Batch):
            break
        if poisons & set(ids(batch)):
            bench.consumer()
        else:
            bench.settle(batch)
    assert {record.group_id for record in bench.dropped} == poisons
    assert bench.pressure().ledger.dead == 2


def test_giving_back_is_no_failure() -> None:
    bench = ready(2)
    for _ in range(9):
        bench.batch(0)
        bench.ask(Release(consumer="c"), Ok)
    assert bench.pressure().ledger.queued == 2


def test_a_rank_that_never_pulls_does_not_hold_the_others_for_ever() -> None:
    bench = ready()
    one, _ = world(bench)
    bench.batch(0, 16, **one)
    for _ in range(13):
        bench.now += 9.5
        bench.ask(ConsumerBeat(consumer="c0", progress=int(bench.now)), Ok)
        bench.tick()
    assert bench.pressure().ledger.leased == 0


def test_a_rank_that_is_done_costs_the_others_no_time() -> None:
    bench = ready()
    one, other = world(bench)
    bench.settle(bench.batch(0, 16, **one), consumer="c0", rank=0)
    slow = bench.batch(0, 16, **other)
    for progress in range(1, 20):
        bench.now += 9.0
        bench.ask(ConsumerBeat(consumer="c1", progress=progress), Ok)
        bench.tick()
    bench.settle(slow, consumer="c1", rank=1)


# Going back to a checkpoint


def test_a_resumed_trainer_gets_the_batches_after_its_checkpoint_again() -> None:
    bench = ready(12)
    before = [bench.train(step) for step in range(3)]
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 1)), Ok)
    filtered = bench.batch(3)
    bench.settle(filtered, no_signal=True, version=PolicyVersion(0, 3))
    leased = bench.batch(3)
    bench.consumer(resume=PolicyVersion(0, 1))
    ledger = bench.pressure().ledger
    assert (ledger.committed, ledger.trained, ledger.queued) == (2, 0, 10)
    assert ledger.rewound == 6
    assert bench.pressure().queued_sequences == 40
    assert bench.pressure().step == 1
    expected = [before[1], before[2], list(ids(filtered)), list(ids(leased))]
    for step, wanted in enumerate(expected, 1):
        again = bench.batch(step, version=PolicyVersion(1, step))
        assert again.rewound
        assert list(ids(again)) == wanted
        bench.settle(again, version=PolicyVersion(1, step + 1))
    fresh = bench.batch(5, version=PolicyVersion(1, 5))
    assert not fresh.rewound


def test_rewound_batches_are_not_too_old_and_keep_their_shards() -> None:
    bench = Bench(config(e={"max_staleness": 1}))
    bench.producer().send(4)
    ranks = world(bench)
    parts = [bench.batch(0, 16, **rank) for rank in ranks]
    for rank, part in zip(ranks, parts, strict=True):
        bench.settle(part, consumer=rank["consumer"], rank=rank["rank"])
    for rank in ranks:
        bench.consumer(str(rank["consumer"]), rank=rank["rank"], world_size=2, resume=PolicyVersion(0, 0))
    again = [bench.batch(50, 16, **rank) for rank in ranks]
    assert [ids(part) for part in again] == [ids(part) for part in parts]
    assert all(part.rewound for part in again)


def test_a_late_rank_joins_a_resume_and_does_not_repeat_it() -> None:
    bench = ready(4)
    bench.train(0)
    zero = PolicyVersion(0, 0)
    bench.consumer("c0", world_size=2, resume=zero)
    first = bench.batch(0, consumer="c0", world_size=2)
    bench.consumer("c1", rank=1, world_size=2, resume=zero)
    second = bench.batch(0, consumer="c1", rank=1, world_size=2)
    assert (first.lease, first.generation) == (second.lease, second.generation)
    bench.consumer("c0", world_size=2, resume=zero)
    assert bench.refused(settle_of(first, consumer="c0")) is ErrorCode.LEASE_LOST
    assert ids(bench.batch(0, consumer="c0", world_size=2)) == ids(first)


def test_after_a_settlement_the_same_resume_is_a_new_one() -> None:
    bench = ready(4)
    zero = PolicyVersion(0, 0)
    bench.consumer(resume=zero)
    trained = bench.train(0)
    bench.consumer("successor", resume=zero)
    assert list(ids(bench.batch(0, consumer="successor"))) == trained


def test_a_batch_without_a_step_comes_again_if_the_checkpoint_may_be_older() -> None:
    bench = ready(8)
    before = bench.batch(0)
    bench.settle(before, no_signal=True, version=PolicyVersion(0, 0))
    bench.train(0)
    after = bench.batch(1)
    bench.settle(after, no_signal=True, version=PolicyVersion(0, 1))
    bench.consumer(resume=PolicyVersion(0, 1))
    assert bench.pressure().ledger.committed == 2
    assert ids(bench.batch(1)) == ids(after)


def test_a_batch_of_which_a_part_was_trained_is_a_step() -> None:
    bench = ready()
    batch = bench.batch(0)
    trained, filtered = ids(batch)
    bench.settle(batch, trained=(trained,), filtered=(filtered,))
    bench.consumer(resume=PolicyVersion(0, 1))
    ledger = bench.pressure().ledger
    assert (ledger.committed, ledger.filtered, ledger.queued) == (1, 1, 2)


def test_a_rewound_batch_whose_lease_is_lost_comes_first_again() -> None:
    bench = ready(8)
    batches = [bench.train(step) for step in range(3)]
    bench.consumer(resume=PolicyVersion(0, 0))
    assert list(ids(bench.batch(0))) == batches[0]
    bench.ask(Release(consumer="c"), Ok)
    for step, wanted in enumerate(batches):
        assert bench.train(step) == wanted


def test_what_died_does_not_come_again() -> None:
    bench = ready(4)
    batch = bench.batch(0)
    good, bad = ids(batch)
    bench.settle(batch, trained=(good,), rejected=(Rejected(group_id=bad, reason="nan"),))
    bench.consumer(resume=PolicyVersion(0, 0))
    assert ids(bench.batch(0)) == (good,)


def test_much_that_is_uncommitted_asks_for_a_checkpoint() -> None:
    bench = ready(6, broker={"retain_bytes": 250})
    assert not bench.settle(bench.batch(0)).commit_wanted
    assert bench.settle(bench.batch(1)).commit_wanted
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 1)), Ok)
    assert bench.settle(bench.batch(2)).commit_wanted
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 3)), Ok)
    assert bench.core._state.rewind_buffer.nbytes == 0


def test_a_trainer_without_checkpoints_is_not_kept_for_without_end() -> None:
    bench = ready(40, broker={"retain_bytes": 500})
    trained = [bench.train(step) for step in range(10)]
    assert bench.core._state.rewind_buffer.nbytes == 1000
    assert bench.pressure().ledger.trained == 20
    bench.consumer(resume=PolicyVersion(0, 0))
    assert bench.pressure().ledger.rewound == 10
    again = [bench.train(step) for step in range(10)]
    assert again[:5] == trained[5:]
    assert bench.core._state.rewind_buffer.nbytes == 2000, "now it is known to resume"


def test_groups_of_two_consumer_groups_do_not_mix() -> None:
    bench = ready(4)
    bench.consumer("d", group="other")
    mine = bench.batch(0)
    theirs = bench.batch(0, consumer="d", group="other")
    bench.settle(mine)
    bench.settle(theirs, consumer="d")
    bench.consumer("d", group="other", resume=PolicyVersion(0, 0))
    assert bench.pressure().ledger.trained == 2
    assert ids(bench.batch(0, consumer="d", group="other")) == ids(theirs)


# Long polls


def test_a_waiting_pull_is_answered_by_the_group_that_completes_it() -> None:
    bench = ready(1)
    assert bench.wait(0) == []
    peer = bench.producer()
    bench.tick(1.0)
    assert bench.late == []
    peer.send()
    (reply,) = bench.late
    assert isinstance(reply.message, Batch)
    assert len(reply.frames) == 2


def test_a_pull_that_waited_long_enough_is_told_why() -> None:
    bench = ready(1)
    bench.wait(0, wait_s=5.0)
    assert bench.core.next_deadline(bench.now) <= bench.now
    bench.tick()
    bench.ask(ConsumerBeat(consumer="c"), Ok)
    assert bench.core.next_deadline(bench.now) <= bench.now + 5.0
    bench.tick(5.0)
    (reply,) = bench.late
    assert reply.message == NoBatch(wait=Wait.NO_BATCH, queued_sequences=4)
    assert bench.pressure().waits_s["no_batch"] == pytest.approx(5.0)


def test_every_pull_gets_one_answer_also_if_it_is_asked_twice() -> None:
    bench = ready(1)
    assert bench.wait(0, request_id="x") == []
    (superseded,) = bench.wait(0, request_id="x")
    assert isinstance(superseded.message, NoBatch)
    bench.consumer()
    (dismissed,) = bench.late
    assert isinstance(dismissed.message, NoBatch)


def test_no_lease_is_made_for_a_consumer_that_died_waiting() -> None:
    bench = ready(1)
    bench.wait(0, wait_s=3600.0)
    bench.tick(10.5)
    assert len(bench.late) == 1
    bench.producer("q").send()
    assert bench.pressure().ledger.leased == 0


def test_a_wait_that_is_no_number_is_refused() -> None:
    bench = ready()
    answer = bench.pull(0, wait_s=float("nan"))
    assert isinstance(answer, ErrorReply)
    pull = Pull(consumer="c", step=0, version=PolicyVersion(), sequences=999, request_id="y")
    assert bench.send(pull) == []


# One rank of several, restarted alone


def half_settled(bench: Bench, step: int = 0) -> tuple[dict[str, object], dict[str, object], Settled]:
    """Let rank 0 settle a step of two ranks, and rank 1 only pull it; return the ranks and the answer to rank 0."""
    one, two = world(bench)
    first, _ = bench.batch(step, 16, **one), bench.batch(step, 16, **two)
    return one, two, bench.settle(first, consumer="c0")


def lease_lost(answer: object) -> bool:
    return isinstance(answer, ErrorReply) and answer.code is ErrorCode.LEASE_LOST


def test_a_settlement_is_provisional_until_every_rank_has_settled() -> None:
    bench = ready(8)
    one, two = world(bench)
    first, second = bench.batch(0, 16, **one), bench.batch(0, 16, **two)
    assert bench.settle(first, consumer="c0").provisional
    assert not bench.settle(second, consumer="c1", rank=1).provisional
    assert not bench.settle(first, consumer="c0").provisional


def test_a_rank_is_told_once_that_its_settled_step_was_lost() -> None:
    bench = ready(8)
    one, _, settled = half_settled(bench)
    assert settled.provisional
    assert bench.wait(1, 16, request_id="waits", **one) == []
    bench.late.clear()
    bench.consumer("c1", rank=1, world_size=2)
    (told,) = [reply.message for reply in bench.late]
    assert lease_lost(told)
    bench.restart()
    assert lease_lost(bench.pull(1, 16, request_id="after a restart", **one))
    assert lease_lost(bench.pull(1, 16, request_id="after a restart", **one))
    again = bench.batch(0, 16, **one)
    other = bench.batch(0, 16, rank=1, world_size=2, consumer="c1")
    bench.settle(again, consumer="c0")
    bench.settle(other, consumer="c1", rank=1)
    assert bench.pressure().ledger.trained == 4


def test_a_void_settlement_outlives_a_snapshot() -> None:
    bench = ready(8)
    one, _, _ = half_settled(bench)
    bench.consumer("c1", rank=1, world_size=2)
    assert lease_lost(bench.reborn().pull(1, 16, **one))


def test_a_new_life_of_a_rank_is_not_told_of_the_settlement_before() -> None:
    bench = ready(8)
    one, two, _ = half_settled(bench)
    for rank in (0, 1):
        bench.consumer(f"c{rank}", rank=rank, world_size=2)
    assert isinstance(bench.batch(0, 16, **one), Batch)
    assert isinstance(bench.batch(0, 16, **two), Batch)


def test_a_lease_that_misses_a_rank_is_no_failure_of_its_groups() -> None:
    bench = ready(4, broker={"lease_s": 5.0, "max_deliveries": 2})
    one, _ = world(bench)
    for _ in range(4):
        bench.batch(0, 16, **one)
        for _ in range(8):
            bench.now += 1.0
            for name in ("c0", "c1"):
                bench.send_beat(name)
            bench.tick()
    ledger = bench.pressure().ledger
    assert (ledger.dead, ledger.queued) == (0, 4)


def test_a_rank_that_registers_during_a_step_is_told_the_policy_of_that_step() -> None:
    bench = ready(8)
    one, two = world(bench)
    bench.settle(bench.batch(0, 16, **one), consumer="c0")
    bench.wait(1, 16, **one)
    told = bench.ask(RegisterConsumer(consumer="c1", rank=1, world_size=2), ConsumerRegistered)
    assert told.policy == PolicyVersion(0, 0)
    assert isinstance(bench.batch(0, 16, **two), Batch)


def step_settled(bench: Bench) -> list[dict[str, object]]:
    ranks = world(bench)
    batches = [bench.batch(0, 16, **rank) for rank in ranks]
    for rank, batch in zip(ranks, batches, strict=True):
        bench.settle(batch, consumer=rank["consumer"], rank=rank["rank"])
    return ranks


def refused_in_the_end(bench: Bench, step: int, rank: dict[str, object]) -> ErrorReply:
    """Let a rank wait for a step that contradicts the others until it is refused; all ranks live."""
    assert bench.wait(step, 16, **rank) == []
    bench.late.clear()
    for _ in range(4):
        bench.now += 1.0
        bench.send_beat("c0")
        bench.send_beat("c1")
        bench.tick()
    (answer,) = [reply.message for reply in bench.late]
    assert isinstance(answer, ErrorReply)
    assert answer.code is ErrorCode.CONFLICT
    return answer


def test_a_rank_that_pulls_a_step_of_the_past_waits_and_is_refused() -> None:
    bench = ready(12)
    one, two = step_settled(bench)
    bench.consumer("c1", rank=1, world_size=2)
    refused = bench.pull(0, 16, **two)
    assert isinstance(refused, NoBatch)
    assert refused.wait is Wait.STEP_MISMATCH
    assert isinstance(bench.pull(1, 16, **one), Batch), "the others go on"
    refused_in_the_end(bench, 0, two)
    assert isinstance(bench.pull(1, 16, **two), Batch)


def test_a_group_whose_ranks_all_start_over_may_pull_any_step() -> None:
    bench = ready(12)
    one, two = step_settled(bench)
    bench.consumer("c0", rank=0, world_size=2)
    waits = bench.pull(0, 16, **one)
    assert isinstance(waits, NoBatch)
    bench.consumer("c1", rank=1, world_size=2)
    assert isinstance(bench.pull(0, 16, **two), Batch)
    assert isinstance(bench.pull(0, 16, **one), Batch)


def test_a_step_leased_to_a_rank_ahead_goes_to_the_rank_that_has_not_settled_the_one_before() -> None:
    """One rank had settled step 1, the other had not; the broker in between kept nothing."""
    bench = ready(12)
    one, two = world(bench)
    leased = bench.batch(2, 16, version=PolicyVersion(0, 1), **one)
    assert isinstance(bench.pull(1, 16, version=PolicyVersion(0, 0), **two), Batch)
    assert bench.refused(settle_of(leased, consumer="c0")) is ErrorCode.LEASE_LOST
    assert bench.batch(1, 16, version=PolicyVersion(0, 0), **one).step == 1
    assert bench.pressure().ledger.dead == 0


def test_a_rank_ahead_is_told_so_while_another_waits_for_the_step_before() -> None:
    bench = ready(2)
    one, two = world(bench)
    assert bench.wait(1, 16, version=PolicyVersion(0, 0), **two) == []
    assert lease_lost(bench.pull(2, 16, version=PolicyVersion(0, 1), **one))


def test_a_rank_that_registers_is_told_no_policy_that_a_lost_settlement_promised() -> None:
    """Rank 1 gave its batch back; rank 0 settled it in vain, and asked for the next step together with that."""
    bench = ready(12)
    one, two = step_settled(bench)
    first, _ = bench.batch(1, 16, **one), bench.batch(1, 16, **two)
    bench.ask(Release(consumer="c1", reason="gave it back"), Ok)
    assert bench.refused(settle_of(first, consumer="c0")) is ErrorCode.LEASE_LOST
    assert bench.batch(2, 16, **one).step == 2
    told = bench.ask(RegisterConsumer(consumer="c1", rank=1, world_size=2), ConsumerRegistered)
    assert told.policy == PolicyVersion(0, 1)
    assert bench.batch(1, 16, **two).step == 1
    assert bench.batch(1, 16, **one).step == 1


def test_a_rank_that_pulls_a_step_of_the_future_goes_back_or_is_refused() -> None:
    """It has not pulled its shard of the step that another rank has: neither would ever go on."""
    bench = ready(12)
    one, two = step_settled(bench)
    bench.settle(bench.batch(1, 16, **one), consumer="c0")
    assert lease_lost(bench.pull(2, 16, **two))
    refused = bench.pull(2, 16, **two)
    assert isinstance(refused, NoBatch)
    assert refused.wait is Wait.STEP_MISMATCH
    answer = refused_in_the_end(bench, 2, two)
    assert "follows step 1" in answer.detail
    assert bench.batch(1, 16, **two).step == 1
    assert isinstance(bench.pull(2, 16, **one), NoBatch), "the first of these waits in order"


def test_a_new_life_of_a_rank_that_had_settled_takes_the_step_back() -> None:
    """The new life would pull a step that the others may settle meanwhile, and neither would ever go on."""
    bench = ready(8)
    one, two, _ = half_settled(bench)
    told = bench.ask(RegisterConsumer(consumer="c0", rank=0, world_size=2), ConsumerRegistered)
    assert told.policy == PolicyVersion(0, 0)
    again = bench.batch(0, 16, **one)
    assert lease_lost(bench.pull(1, 16, **two))
    other = bench.batch(0, 16, **two)
    assert bench.settle(again, consumer="c0").provisional
    assert not bench.settle(other, consumer="c1", rank=1).provisional
    ledger = bench.pressure().ledger
    assert (ledger.trained, ledger.dead) == (4, 0)
    assert isinstance(bench.pull(1, 16, **one), Batch)
    assert isinstance(bench.pull(1, 16, **two), Batch)


def test_a_rank_that_registers_is_told_no_policy_of_a_refused_pull() -> None:
    """Rank 1 left before it had settled; rank 0 had, and its next pull came after the lease was lost."""
    bench = ready(8)
    one, two = world(bench)
    first, _ = bench.batch(0, 16, **one), bench.batch(0, 16, **two)
    assert bench.settle(first, consumer="c0").provisional
    bench.ask(Release(consumer="c1", reason="left"), Ok)
    assert lease_lost(bench.pull(1, 16, version=PolicyVersion(0, 1), **one))
    told = bench.ask(RegisterConsumer(consumer="c1", rank=1, world_size=2), ConsumerRegistered)
    assert told.policy == PolicyVersion(0, 0)
    again = [bench.batch(0, 16, **rank) for rank in (one, two)]
    assert not [bench.settle(part, consumer=f"c{rank}", rank=rank) for rank, part in enumerate(again)][
        1
    ].provisional


def test_a_rank_that_registers_after_a_lost_first_step_is_told_the_policy_of_that_step() -> None:
    """Rank 0 settled the first step too late and had asked for the second one together with that."""
    bench = ready(12)
    one, two = world(bench)
    first, _ = bench.batch(0, 16, **one), bench.batch(0, 16, **two)
    bench.ask(Release(consumer="c1", reason="gave it back"), Ok)
    assert bench.refused(settle_of(first, consumer="c0")) is ErrorCode.LEASE_LOST
    assert bench.batch(1, 16, version=PolicyVersion(0, 1), **one).step == 1
    told = bench.ask(RegisterConsumer(consumer="c1", rank=1, world_size=2), ConsumerRegistered)
    assert told.policy == PolicyVersion(0, 0)
    assert bench.batch(0, 16, version=PolicyVersion(0, 0), **two).step == 0
    assert bench.batch(0, 16, version=PolicyVersion(0, 0), **one).step == 0


def test_a_rank_that_was_told_of_the_loss_as_it_settled_pulls_that_step_again() -> None:
    """The first answer to its settlement was lost. Told twice, it would go back behind a step that all have settled."""
    bench = ready(12)
    one, two = step_settled(bench)
    first, _ = bench.batch(1, 16, **one), bench.batch(1, 16, **two)
    assert bench.settle(first, consumer="c0").provisional
    bench.ask(Release(consumer="c1", reason="gave it back"), Ok)
    assert bench.refused(settle_of(first, consumer="c0", version=PolicyVersion(0, 2))) is ErrorCode.LEASE_LOST
    assert bench.batch(1, 16, **one).step == 1
    assert bench.batch(1, 16, **two).step == 1


def test_a_rank_that_gathers_several_batches_for_one_step_is_told_a_loss() -> None:
    """It pulls the same step again, and its part of the lost batch must leave its gradient."""
    bench = ready(12)
    one, two = world(bench)
    first, _ = bench.batch(0, 16, **one), bench.batch(0, 16, **two)
    assert bench.settle(first, consumer="c0", version=PolicyVersion()).provisional
    bench.ask(Release(consumer="c1", reason="gave it back"), Ok)
    assert lease_lost(bench.pull(0, 16, **one))
    assert bench.batch(0, 16, **one).step == 0


def test_a_rank_that_pulls_behind_a_step_which_another_has_begun_is_refused() -> None:
    bench = ready(12)
    one, two = step_settled(bench)
    bench.batch(1, 16, **one)
    refused = bench.pull(0, 16, **two)
    assert isinstance(refused, NoBatch)
    assert refused.wait is Wait.STEP_MISMATCH
    answer = refused_in_the_end(bench, 0, two)
    assert answer.detail.startswith(
        "pull: step 0 is settled, and c0 is past it, with 0 as its last settled step"
    )
    assert bench.batch(1, 16, **two).step == 1
