from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.broker.bench import Bench, config, ids

from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Batch, ErrorReply, NoBatch, Wait
from rolloutmq.schemas.wire.requests import Pull
from rolloutmq.services.broker.actions import Expired
from rolloutmq.services.broker.batches import builder


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
    assert bench.expired == [Expired("e", 2, 2, newest_step=1)]
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


# Groups above the batch


def test_a_group_larger_than_the_batch_goes_alone_at_once_and_says_so() -> None:
    bench = Bench(config(e={}))
    bench.producer().send(1, sequences=16)
    bench.consumer()
    batch = bench.batch(0, 8, request_id="r")
    assert (sizes(batch), batch.over, batch.short) == ([16], True, False)
    bench.restart()
    again = bench.batch(0, 8, request_id="r")
    assert (sizes(again), again.over) == ([16], True)
    bench.settle(again)


@pytest.mark.parametrize("asked", [{"sequences": 16}, {"sequences": 0, "tokens": 160}])
def test_a_group_that_is_just_what_was_asked_is_not_over(asked: dict[str, int]) -> None:
    bench = Bench(config(e={}))
    bench.producer().send(1, sequences=16, tokens=160)
    bench.consumer()
    assert not bench.batch(0, **asked).over


def test_a_batch_that_comes_again_for_a_smaller_number_says_that_it_is_over() -> None:
    bench = Bench(config(e={}))
    bench.producer().send(4)
    bench.consumer()
    bench.train(0, 16)
    bench.consumer(resume=PolicyVersion(0, 0))
    again = bench.batch(0, 8)
    assert (sizes(again), again.over, again.rewound) == ([4] * 4, True, True)


def test_a_group_larger_than_the_batch_waits_for_its_turn_and_ends_every_wait() -> None:
    """Groups of 3 that make no 8 would let the trainer wait; the large one behind them is delivered."""
    bench = Bench(config(broker={"exact_wait_s": 60.0}, e={}))
    peer = bench.producer()
    bench.consumer()
    peer.send(2, sequences=4)
    peer.send(1, sequences=9)
    peer.send(2, sequences=4)
    for step, (expected, over) in enumerate((([4, 4], False), ([9], True), ([4, 4], False))):
        batch = bench.batch(step, 8)
        assert (sizes(batch), batch.over) == (expected, over)
        bench.settle(batch)
    peer.send(4, sequences=3)
    bench.wait(3, 8)
    peer.send(1, sequences=9)
    assert [sizes(batch) for batch in batches(bench)] == [[9]]


def test_groups_that_never_fit_do_not_hold_back_a_larger_one_behind_them() -> None:
    bench = Bench(config(broker={"exact_wait_s": 60.0}, e={}))
    peer = bench.producer(slots=99)
    bench.consumer()
    peer.send(1, sequences=3)
    peer.send(1, sequences=9)
    taken = []
    for step in range(2):
        peer.send(2, sequences=4)
        taken.append(sizes(batch := bench.batch(step, 8)))
        bench.settle(batch)
    assert taken == [[9], [4, 4]]


def test_groups_larger_than_the_batch_get_the_share_of_their_environment_and_no_more() -> None:
    bench = Bench(config(a={"weight": 1.0}, b={"weight": 1.0}))
    bench.producer("pa", "a", slots=99).send(40, sequences=4)
    bench.producer("pb", "b", slots=99).send(20, sequences=16)
    bench.consumer()
    taken: Counter[str] = Counter()
    for _ in range(16):
        batch = bench.batch(0, 8)
        taken.update({d.env: d.header.sequences for d in batch.groups if d.env == "b"})
        taken["a"] += sum(d.header.sequences for d in batch.groups if d.env == "a")
        assert batch.over == (sizes(batch) == [16])
        bench.settle(batch, no_signal=True)
    assert 0.7 < taken["a"] / taken["b"] < 1.4


def test_a_larger_group_that_kills_its_trainers_dies_alone() -> None:
    bench = Bench(config(broker={"max_deliveries": 2}, e={}))
    (poison,) = bench.producer().send(1, sequences=9)
    bench.consumer()
    for _ in range(2):
        assert bench.batch(0, 8).over
        bench.consumer()
    assert [(record.group_id, record.state) for record in bench.dropped] == [(poison, "dead")]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 20)), min_size=1, max_size=20), st.integers(2, 9)
)
@settings(max_examples=60, deadline=None)
def test_no_batch_is_ever_over_unless_it_says_so_and_no_larger_group_is_stuck(
    groups: list[tuple[str, int]], target: int
) -> None:
    bench = Bench(
        config(broker={"exact_wait_s": 0.0}, batch=target, a={"group_size": 1}, b={"group_size": 1})
    )
    bench.shadowed = False
    peers = {env: bench.producer(f"p{env}", env, slots=99) for env in "ab"}
    for env, size in groups:
        peers[env].send(1, sequences=size)
    bench.consumer()
    larger = sum(size > target for _, size in groups)
    while isinstance(batch := bench.pull(0, target), Batch):
        assert batch.over == (sum(sizes(batch)) > target) == (max(sizes(batch)) > target)
        assert not batch.over or len(batch.groups) == 1
        larger -= batch.over
        bench.settle(batch, no_signal=True)
    assert larger == 0


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=30),
    st.sampled_from([2, 4, 6, 12]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_batches_of_equal_groups_are_those_of_the_search(
    groups: list[tuple[int, int]], target: int, alike: bool
) -> None:
    """The way of a queue without a choice gives the batches that composing them gives."""
    built: list[list[tuple[str, ...]]] = []
    for searched in (False, True):
        bench = Bench(
            config(broker={"exact_wait_s": 0.0}, batch=target, e={"group_size": 1, "max_staleness": 9})
        )
        bench.shadowed = False
        with pytest.MonkeyPatch.context() as patch:
            if searched:
                patch.setattr(builder, "_take_alike", lambda *_: None)
            peer = bench.producer(slots=99)
            for size, step in groups:
                peer.send(1, sequences=2 if alike else size, step=step)
            bench.consumer()
            built.append([])
            while isinstance(batch := bench.pull(4, target), Batch):
                built[-1].append(ids(batch))
                bench.settle(batch, no_signal=True)
    assert built[0] == built[1]


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 4)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_groups_as_they_come_from_one_queue_are_those_of_the_turns(
    groups: list[tuple[int, int]], count: int, alike: bool, drops: bool
) -> None:
    """The way of a queue without a choice gives the leases that taking one group after another gives."""
    built: list[list[tuple[str, ...]]] = []
    for one_by_one in (False, True):
        rule = {"group_size": 1, "max_staleness": 9, "stale": "drop" if drops else "pass"}
        bench = Bench(config(e=rule))
        bench.shadowed = False
        with pytest.MonkeyPatch.context() as patch:
            if one_by_one:
                patch.setattr(builder, "_take_alike", lambda *_: None)
            peer = bench.producer(slots=99)
            for size, step in groups:
                peer.send(1, sequences=2 if alike else size, step=step)
            bench.consumer()
            built.append([])
            while isinstance(batch := bench.pull(4, 0, groups=count, window=99), Batch):
                built[-1].append(ids(batch))
    assert built[0] == built[1]
    assert sum(map(len, built[0])) == len(groups)


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


def sizes(batch: Batch) -> list[int]:
    return [delivery.header.sequences for delivery in batch.groups]


def test_groups_of_three_for_a_batch_of_sixty_four_come_as_sixty_three() -> None:
    bench = Bench(config(broker={"exact_wait_s": 5.0}, batch=64, e={"group_size": 3}))
    peer = bench.producer(slots=99, group_size=3)
    bench.consumer()
    for step in range(3):
        peer.send(22, sequences=3, step=step)
        assert wait_of(bench.pull(step, 64)) is Wait.NO_EXACT_FIT
        bench.tick(5.0)
        batch = bench.batch(step, 64)
        assert batch.short
        assert sizes(batch) == [3] * 21
        bench.settle(batch)


def test_groups_of_three_and_a_lane_with_a_minimum_share_of_other_sizes_come_exactly() -> None:
    """64 of groups of 3, with at least a quarter from a lane of fives: 3 * 8 + 5 * 8."""
    bench = Bench(
        config(batch=64, a={"group_size": 3, "weight": 3.0}, b={"group_size": 5, "min_share": 0.25})
    )
    bench.producer("pa", "a", group_size=3).send(22, sequences=3)
    bench.producer("pb", "b", group_size=5).send(12, sequences=5)
    bench.consumer()
    batch = bench.batch(0, 64)
    taken = Counter(sizes(batch))
    assert not batch.short
    assert 3 * taken[3] + 5 * taken[5] == 64
    assert 5 * taken[5] >= 15


GROUPS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 7)), min_size=1, max_size=7)


@given(GROUPS, st.integers(2, 16), st.sampled_from([0.0, 0.3, 0.5]))
@settings(max_examples=60, deadline=None)
def test_the_best_sum_comes_in_time_whatever_is_queued(
    groups: list[tuple[str, int]], target: int, share: float
) -> None:
    """Compared with all subsets: exact at once or after the waits, else the largest below, and never nothing."""
    groups = [(env, min(size, target)) for env, size in groups]
    lanes = {env: {"group_size": 1, "min_share": share if env == "b" else 0.0} for env in ("a", "b")}
    bench = Bench(config(broker={"exact_wait_s": 2.0, "silent_env_s": 4.0}, batch=target, **lanes))
    bench.shadowed = False
    peers = {env: bench.producer(f"p{env}", env, slots=99) for env in ("a", "b")}
    for env, size in groups:
        peers[env].send(1, sequences=size)
    bench.consumer()
    sums = {0}
    for _, size in groups:
        sums |= {s + size for s in sums if s + size <= target}
    best = max(sums) if sum(size for _, size in groups) >= target else 0
    answer = bench.pull(0, target)
    for _ in range(9):
        if isinstance(answer, Batch):
            break
        bench.tick(1.0)
        answer = bench.pull(0, target)
    assert isinstance(answer, Batch) == bool(best), (answer, best)
    if isinstance(answer, Batch):
        assert sum(sizes(answer)) == best
        assert answer.short == (best < target)


def test_an_exact_sum_is_found_among_many_sizes_of_a_large_batch() -> None:
    """Every size from 1001 to 1400 once; only the last ones, 1399 and 1400, make 2799."""
    bench = Bench(config(broker={"exact_wait_s": 9.0}, e={}))
    bench.shadowed = False
    peer = bench.producer(slots=999)
    for size in range(1001, 1401):
        peer.send(1, sequences=size)
    bench.consumer()
    batch = bench.batch(0, 2799)
    assert sizes(batch) == [1399, 1400]
    bench.settle(batch)
    assert sum(sizes(bench.batch(1, 16_001))) == 16_001


# Ranks


def test_a_batch_has_a_group_for_every_rank_if_it_can() -> None:
    bench = Bench(config(e={}))
    peer = bench.producer()
    peer.send(1, sequences=8)
    big = peer.send(1, sequences=6)
    peer.send(4, sequences=2)
    bench.consumer(world_size=2)
    bench.consumer("d", rank=1, world_size=2)
    one = bench.batch(0, 8, world_size=2)
    two = bench.batch(0, 8, world_size=2, rank=1, consumer="d")
    assert sorted(sizes(one) + sizes(two)) == [2, 2, 2, 2]
    assert big[0] not in ids(one) + ids(two)


def test_a_batch_of_fewer_groups_than_ranks_is_waited_for_and_the_wait_is_named() -> None:
    bench = Bench(config(broker={"exact_wait_s": 2.0}, e={}))
    peer = bench.producer()
    peer.send(1, sequences=8)
    for name, rank in (("c", 0), ("d", 1)):
        bench.consumer(name, rank=rank, world_size=2)
    assert wait_of(bench.pull(0, 8, world_size=2)) is Wait.TOO_FEW_GROUPS
    bench.tick(3.0)
    assert wait_of(bench.pull(0, 8, world_size=2)) is Wait.TOO_FEW_GROUPS
    assert wait_of(bench.pull(0, tokens=80, world_size=2)) is Wait.TOO_FEW_GROUPS
    peer.send(2)
    assert sizes(bench.batch(0, 8, world_size=2)) == [4]
    assert sizes(bench.batch(0, 8, world_size=2, rank=1, consumer="d")) == [4]


# Tokens


def lengths(batch: Batch) -> list[int]:
    return [delivery.header.tokens for delivery in batch.groups]


@pytest.mark.parametrize(("sequences", "tokens"), [(0, 0), (8, 8)])
def test_a_pull_names_sequences_or_tokens_and_not_both(sequences: int, tokens: int) -> None:
    bench = Bench(config(e={}))
    bench.consumer()
    pull = Pull(
        consumer="c",
        step=0,
        version=PolicyVersion(),
        request_id="r",
        sequences=sequences,
        tokens=tokens,
    )
    (answer,) = [reply.message for reply in bench.send(pull, (b"x",))]
    assert isinstance(answer, ErrorReply)
    assert answer.code is ErrorCode.INVALID


def test_tokens_are_waited_for_and_taken_oldest_first_up_to_the_budget() -> None:
    bench = Bench(config(e={}))
    peer = bench.producer()
    sent = [peer.send(1, tokens=tokens)[0] for tokens in (40, 30, 50, 20)]
    bench.consumer()
    assert wait_of(bench.pull(0, tokens=141)) is Wait.NO_BATCH
    batch = bench.batch(0, tokens=100)
    assert list(ids(batch)) == [sent[0], sent[1], sent[3]]
    assert not batch.short
    bench.restart()
    assert ids(bench.batch(0, tokens=100, request_id="again")) == ids(batch)
    answer = bench.pull(0, tokens=99)
    assert isinstance(answer, ErrorReply)
    assert answer.code is ErrorCode.CONFLICT
    bench.settle(batch)
    assert lengths(bench.batch(1, tokens=50)) == [50]


def test_a_group_above_the_budget_goes_alone_and_blocks_nobody() -> None:
    bench = Bench(config(e={}))
    bench.producer().send(1, tokens=500)
    bench.producer("q").send(3, tokens=40)
    bench.consumer()
    for step, expected in enumerate(([500], [40, 40])):
        batch = bench.batch(step, tokens=100)
        assert lengths(batch) == expected
        bench.settle(batch)


def test_tokens_are_shared_by_weight_over_batches() -> None:
    bench = Bench(config(a={"weight": 3.0}, b={"weight": 1.0}))
    bench.producer("pa", "a").send(60, tokens=30)
    bench.producer("pb", "b").send(60, tokens=50)
    bench.consumer()
    taken: Counter[str] = Counter()
    for _ in range(16):
        batch = bench.batch(0, tokens=120)
        for delivery in batch.groups:
            taken[delivery.env] += delivery.header.tokens
        bench.settle(batch, no_signal=True)
    assert 2.4 < taken["a"] / taken["b"] < 3.6


def test_a_minimum_share_of_tokens_is_waited_for_and_given_up_by_a_silent_environment() -> None:
    bench = Bench(config(broker={"silent_env_s": 30.0}, a={}, b={"min_share": 0.5, "weight": 0.0}))
    bench.producer("pb", "b", slots=1)
    bench.producer("pa", "a").send(9)
    bench.consumer()
    assert wait_of(bench.pull(0, tokens=80)) is Wait.MIN_SHARE
    bench.tick(31.0)
    bench.consumer()
    assert {d.env for d in bench.batch(0, tokens=80).groups} == {"a"}


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_pacing_never_holds_back_a_budgets_worth(staleness: int) -> None:
    """Sequences get five times as long and then ten times as short, unannounced."""
    bench = Bench(config(batch=8, e={"pacing": True, "max_staleness": staleness}))
    peer = bench.producer(slots=999)
    bench.consumer()
    most = []
    for step in range(40):
        tokens = 20 if step < 10 else 100 if step < 20 else 10
        for _ in range(200):
            if isinstance(batch := bench.pull(step, tokens=400), Batch):
                break
            if peer.seq < peer.sync().start_limit:
                peer.send(1, tokens=tokens, step=step)
            bench.tick(0.01)
        assert isinstance(batch, Batch), (step, batch)
        bench.settle(batch)
        bench.tick()
        most.append(bench.pressure().batch_sequences)
    assert (most[9], most[19]) == (80, 40)
    assert most[39] == 160
    assert bench.pressure().ledger.expired == 0


# Order within an environment


def test_a_straggler_of_an_old_policy_goes_first_and_does_not_expire() -> None:
    bench = Bench(config(e={"max_staleness": 2}))
    peer = bench.producer()
    peer.send(4, step=3)
    late = peer.send(1, step=1)
    bench.consumer()
    assert late[0] in ids(bench.batch(3, 8))
    assert bench.pressure().ledger.expired == 0


def test_old_policies_starve_nobody() -> None:
    """A worker that is stuck at policy 0 goes first where that helps, until it is too stale."""
    bench = Bench(config(e={"max_staleness": 2}))
    stuck, fresh = bench.producer("stuck"), bench.producer("fresh")
    bench.consumer()
    trained: Counter[str] = Counter()
    for step in range(8):
        stuck.send(2, step=0)
        fresh.send(2, step=step)
        batch = bench.batch(step, 8)
        trained.update(delivery.producer for delivery in batch.groups)
        bench.settle(batch)
    assert trained["fresh"] >= 10


def test_where_nothing_expires_the_order_is_that_of_arrival() -> None:
    bench = Bench(config(e={"max_staleness": 2, "stale": "pass"}))
    peer = bench.producer()
    first = peer.send(2, step=3)
    peer.send(2, step=1)
    bench.consumer()
    assert list(ids(bench.batch(3, 8))) == first


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


def test_a_minimum_share_is_waited_for_once_and_for_a_short_time() -> None:
    bench = Bench(config(broker={"exact_wait_s": 5.0}, a={}, b={"min_share": 0.5, "weight": 0.0}))
    bench.producer("pb", "b", slots=1)
    bench.producer("pa", "a").send(9)
    bench.consumer()
    assert wait_of(bench.pull(0, 8)) is Wait.MIN_SHARE
    bench.wait(0, 8)
    bench.tick(4.9)
    assert batches(bench) == []
    bench.tick(0.2)
    (batch,) = batches(bench)
    assert {d.env for d in batch.groups} == {"a"}
    bench.settle(batch)
    bench.batch(1, 8)


def test_an_environment_that_can_meet_its_minimum_share_again_is_waited_for_again() -> None:
    bench = Bench(config(broker={"exact_wait_s": 5.0, "silence_s": 60.0}, a={}, b={"min_share": 0.5}))
    b = bench.producer("pb", "b")
    bench.producer("pa", "a").send(20)
    bench.consumer()
    assert wait_of(bench.pull(0, 8)) is Wait.MIN_SHARE
    bench.tick(5.0)
    bench.settle(bench.batch(0, 8))
    b.send(1)
    bench.settle(bench.batch(1, 8))
    assert wait_of(bench.pull(2, 8)) is Wait.MIN_SHARE
    bench.now += 31.0
    bench.consumer()
    bench.settle(bench.batch(2, 8))


def test_what_a_minimum_share_missed_is_made_up_for_by_later_batches() -> None:
    bench = Bench(
        config(
            broker={"exact_wait_s": 0.0},
            batch=32,
            a={"weight": 3.0, "stale": "pass"},
            b={"min_share": 0.5, "stale": "pass"},
        )
    )
    b = bench.producer("pb", "b", slots=99)
    bench.producer("pa", "a", slots=99).send(60)
    bench.consumer()
    bench.settle(bench.batch(0, 32))
    b.send(40)
    taken = []
    for step in range(1, 6):
        batch = bench.batch(step, 32)
        taken.append(sum(d.env == "b" for d in batch.groups))
        bench.settle(batch)
    assert taken[0] > 4
    assert sum(taken) == 6 * 4, "half of all six batches"


@pytest.mark.parametrize(
    ("target", "sizes", "share", "parts"),
    [
        (8, (8, 4, 4), 0.5, (0.25, 0.5, 0.25)),
        (8, (4, 4, 8), 0.5, (0.25, 0.5, 0.25)),
        (16, (16, 4, 4), 0.25, (1 / 3, 1 / 3, 1 / 3)),
        (16, (12, 4, 4), 0.5, (0.25, 0.5, 0.25)),
    ],
)
def test_groups_that_a_minimum_share_leaves_no_room_for_get_the_share_of_their_environment(
    target: int, sizes: tuple[int, int, int], share: float, parts: tuple[float, float, float]
) -> None:
    """The middle one has the minimum share. Groups as large as a batch got nothing, or what it left nothing to."""
    rules = {env: {"group_size": size} for env, size in zip("abc", sizes, strict=True)}
    rules["b"]["min_share"] = share  # type: ignore[assignment]
    bench = Bench(config(batch=target, **rules))
    bench.shadowed = False
    lanes = dict(zip("abc", sizes, strict=True))
    peers = {env: bench.producer(f"p{env}", env, slots=999, group_size=size) for env, size in lanes.items()}
    bench.consumer()
    taken: Counter[str] = Counter()
    for _ in range(48):
        for lane in bench.pressure().lanes:
            if lane.queued_sequences < 2 * target:
                peers[lane.env].send(target // lanes[lane.env] + 1, sequences=lanes[lane.env])
        batch = bench.batch(0, target)
        assert not batch.short
        taken.update({env: sum(d.header.sequences for d in batch.groups if d.env == env) for env in lanes})
        bench.settle(batch, no_signal=True)
    for env, part in zip("abc", parts, strict=True):
        assert abs(taken[env] - part * taken.total()) <= 2 * target, (env, taken)


def test_a_minimum_share_is_kept() -> None:
    bench = Bench(config(a={"weight": 99.0}, b={"min_share": 0.5, "weight": 1.0}))
    bench.producer("pb", "b").send(2)
    bench.producer("pa", "a").send(9)
    bench.consumer()
    assert sorted(d.env for d in bench.batch(0, 16).groups) == ["a", "a", "b", "b"]


def test_a_batch_that_is_full_without_a_minimum_share_is_not_short() -> None:
    bench = Bench(config(broker={"exact_wait_s": 5.0}, a={}, b={"group_size": 3, "min_share": 0.5}))
    bench.producer("pb", "b", group_size=3).send(sequences=3)
    bench.producer("pa", "a").send(2)
    bench.consumer()
    assert wait_of(bench.pull(0, 8)) is Wait.NO_EXACT_FIT
    bench.now += 5.0
    batch = bench.batch(0, 8)
    assert {d.env for d in batch.groups} == {"a"}
    assert not batch.short


def test_who_had_nothing_more_to_give_is_owed_nothing() -> None:
    bench = Bench(config(a={}, b={}))
    a, b = bench.producer("pa", "a"), bench.producer("pb", "b")
    a.send(20)
    b.send(1)
    bench.consumer()
    first = bench.batch(0, 16)
    assert sorted(d.env for d in first.groups) == ["a", "a", "a", "b"]
    bench.settle(first)
    b.send(20)
    assert sorted(d.env for d in bench.batch(1, 16).groups) == ["a", "a", "b", "b"]


def test_a_batch_that_the_mark_cannot_hold_is_named() -> None:
    bench = Bench(config(broker={"high_bytes": 2000, "max_group_bytes": 1000}, batch=64, e={}))
    peer = bench.producer()
    bench.consumer()
    assert bench.wait(0, 64) == []  # who waits gets all that the mark allows
    for _ in range(40):
        if peer.position + 600 <= peer.sync().byte_limit:
            peer.send(nbytes=600)
        bench.tick(0.6)
        bench.send_beat()
    assert wait_of(bench.pull(0, 64)) is Wait.BATCH_EXCEEDS_CAP
