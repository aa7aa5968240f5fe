"""Batches near the mark: a trainer that waits gets all room at once, and what is reserved follows from what is seen."""

from collections.abc import Callable

import pytest
from tests.services.broker.bench import Bench, Peer, config

from rolloutmq.schemas.wire.replies import Batch, NoBatch, Wait
from rolloutmq.services.broker.core import GRANT_S
from rolloutmq.services.broker.flow.credits import IDLE_S

HIGH = 100_000
GROUP = 2000


def loop(
    bench: Bench,
    peers: list[Peer],
    sequences: int,
    until: Callable[[], bool],
    *,
    step_s: float,
    within_s: float = 60.0,
) -> float:
    """Let peers send whenever they have credit, and a trainer train; return the time that passed."""
    began = bench.now
    while not until():
        assert bench.now < began + within_s, bench.pressure()
        for peer in peers:
            if peer.position + GROUP <= peer.sync().byte_limit:
                peer.send(nbytes=GROUP)
        bench.send_beat()
        for reply in bench.late:
            if isinstance(reply.message, Batch):
                bench.settle(reply.message, no_signal=True)
        bench.late.clear()
        pressure = bench.pressure()
        if not pressure.trainer_wait and not pressure.ledger.leased:
            bench.late += bench.wait(0, sequences)
        bench.tick(step_s)
    return bench.now - began


def mark(**broker: int) -> Bench:
    bench = Bench(config(batch=4, broker={"high_bytes": HIGH, "max_group_bytes": HIGH // 2, **broker}, e={}))
    bench.shadowed = False
    bench.consumer()
    return bench


def settled(bench: Bench, groups: int) -> Callable[[], bool]:
    return lambda: bench.pressure().lanes[0].settled_sequences >= 4 * groups


@pytest.mark.parametrize("part", [0.25, 0.5, 0.95])
def test_batches_near_the_mark_wait_for_no_timer(part: float) -> None:
    """Ten batches in a hundredth of the time that grants by timer would take for one."""
    bench = mark()
    peers = [bench.producer(f"p{i}", slots=999) for i in range(2)]
    groups = int(part * HIGH / GROUP)
    loop(bench, peers, 4 * groups, settled(bench, 10 * groups), step_s=1e-5, within_s=GRANT_S)


def test_idle_producers_hold_no_room_that_a_starving_trainer_needs() -> None:
    """Their unused grants are reclaimed once, and do not come back before those that send have theirs."""
    bench = mark()
    idle = [bench.producer(f"idle{i}", slots=9) for i in range(3)]
    for peer in idle:
        peer.send(nbytes=GROUP)
    busy = bench.producer("busy", slots=999)
    groups = int(0.9 * HIGH / GROUP)
    loop(bench, [busy], 4 * groups, settled(bench, groups), step_s=GRANT_S)
    took = loop(bench, [busy], 4 * groups, settled(bench, 6 * groups), step_s=1e-3)
    assert took < 2 * IDLE_S, "it was a second a batch"
    for peer in idle:
        peer.send(nbytes=GROUP)
    assert bench.status().rejected_messages == 0


def test_the_reserve_is_of_what_is_seen_and_is_told() -> None:
    bench = mark()
    assert bench.pressure().reserved_bytes == HIGH // 2 + HIGH // 4
    bench.producer().send(nbytes=GROUP)
    assert bench.pressure().reserved_bytes == 2 * GROUP + HIGH // 4
    bench.wait(0, 100)
    assert bench.pressure().reserved_bytes == 0, "all room is for the batch"


def test_a_group_larger_than_all_before_gets_in_while_others_take_all_room() -> None:
    """It has no room when it comes; what comes free is kept for it, and the others go on afterwards."""
    bench = mark()
    others = [bench.producer(f"p{i}", slots=999) for i in range(2)]
    large = bench.producer("large", slots=9)
    large.send(nbytes=GROUP)
    head = large.next(nbytes=HIGH // 2)

    def resent() -> bool:
        if head.position <= large.sync().byte_limit:
            large.deliver(head)
        return large.sync().cumulative == head.seq

    loop(bench, others, 4 * 20, resent, step_s=0.02)
    before = bench.pressure().lanes[0].settled_sequences
    loop(
        bench,
        others,
        4 * 20,
        lambda: bench.pressure().lanes[0].settled_sequences >= before + 400,
        step_s=0.02,
    )


def test_a_batch_above_the_mark_is_named_at_once_and_one_below_is_not() -> None:
    for part, reason in ((1.05, Wait.BATCH_EXCEEDS_CAP), (0.99, Wait.NO_BATCH)):
        bench = mark()
        peer = bench.producer(slots=999)
        bench.wait(0, int(4 * part * HIGH / GROUP))
        for _ in range(47):
            peer.send(nbytes=GROUP)
            bench.tick(1e-4)
        for _ in range(3):
            if peer.position + GROUP <= peer.sync().byte_limit and part > 1:
                peer.send(nbytes=GROUP)
                bench.tick(1e-4)
        answer = bench.pull(0, int(4 * part * HIGH / GROUP))
        assert isinstance(answer, NoBatch)
        assert answer.wait is reason
        assert bench.status().rejected_messages == 0
