"""Waits as a broker counts them: whatever a trainer waits for is told, with its share of the time."""

from collections.abc import Callable

import msgspec
import pytest
from tests.services.broker.bench import Bench, config
from tests.services.broker.test_waits import TIGHT, fill, slow

from rolloutmq.schemas.wire.replies import NoBatch, Wait
from rolloutmq.services.monitor.profile.advice import advice
from rolloutmq.services.monitor.profile.usage import Usage, UsageLine, read_usage

SECONDS = 8
"""Shorter than `broker.silence_s`: a producer that the test leaves alone still counts."""


def line(bench: Bench, t: float) -> UsageLine:
    """Return the recorded line of the broker's present message, as after a first settled batch."""
    fields = msgspec.to_builtins(bench.pressure())
    one = msgspec.convert({**fields, "t": t, "kind": "pressure"}, UsageLine, strict=False)
    return msgspec.structs.replace(one, settled_busy_s=1.0)


def used(bench: Bench, every_s: Callable[[], object] = lambda: None) -> Usage:
    """Let time pass, record a line each second, and return the use of that time."""
    lines = [line(bench, 0.0)]
    for t in range(1, SECONDS + 1):
        bench.tick(1.0)
        every_s()
        lines.append(line(bench, float(t)))
    return read_usage(lines, {})


def _no_batch() -> Bench:
    bench = Bench()
    bench.producer().send(1)
    bench.consumer()
    assert bench.wait(0) == []
    return bench


def _batch_exceeds_cap() -> Bench:
    bench = Bench(config(broker={**TIGHT, "max_group_bytes": 2000}, e={"high_bytes": 1500}))
    fill(bench.producer(), 1000)
    bench.consumer()
    assert bench.wait(0) == []
    return bench


def _journal_slow() -> Bench:
    bench = Bench()
    bench.producer()
    slow(bench)
    bench.consumer()
    assert bench.wait(0) == []
    return bench


def _leased_elsewhere() -> Bench:
    """One of two ranks has settled, and waits for the other one."""
    bench = Bench()
    bench.producer().send(4)
    bench.consumer("other", rank=0, world_size=2)
    bench.consumer("c", rank=1, world_size=2)
    bench.batch(0, consumer="other", world_size=2)
    bench.settle(bench.batch(0, rank=1, world_size=2), rank=1)
    assert bench.wait(1, rank=1, world_size=2) == []
    return bench


@pytest.mark.parametrize(
    ("made", "reason", "ranks", "change"),
    [
        (_no_batch, Wait.NO_BATCH, 1, "more workers"),
        (_batch_exceeds_cap, Wait.BATCH_EXCEEDS_CAP, 1, "a larger mark"),
        (_journal_slow, Wait.JOURNAL_SLOW, 1, "a faster disk"),
        (_leased_elsewhere, Wait.LEASED_ELSEWHERE, 2, "a faster slowest rank"),
    ],
)
def test_every_wait_of_a_trainer_is_named(
    made: Callable[[], Bench], reason: Wait, ranks: int, change: str
) -> None:
    bench = made()
    bench.tick()
    assert bench.pressure().trainer_wait == reason

    def beat() -> None:
        for name in ("c", "other")[:ranks]:
            bench.send_beat(name)

    found = used(bench, beat)
    assert found.trainer_s == SECONDS
    assert found.trainer_waits_s == {reason: pytest.approx(SECONDS / ranks)}
    (one,) = advice(found)
    assert one.share == pytest.approx(1 / ranks)
    assert f"({reason})" in one.where
    assert one.change.startswith(change)


def test_polls_in_vain_are_a_wait_for_a_batch() -> None:
    bench = Bench()
    bench.producer().send(1)
    bench.consumer()

    def poll() -> None:
        assert isinstance(bench.pull(0), NoBatch)

    poll()
    found = used(bench, poll)
    assert found.trainer_waits_s == {Wait.NO_BATCH: pytest.approx(SECONDS)}
    assert found.starved == pytest.approx(1.0)


def test_groups_that_expire_are_no_growth_of_the_queue() -> None:
    bench = Bench(config(e={"max_staleness": 0}))
    peer = bench.producer(slots=99)
    bench.consumer()
    peer.send(2)
    bench.train(0)
    steps = iter(range(1, SECONDS + 1))

    def step() -> None:
        at = next(steps)
        peer.send(1, step=at - 1)  # too old
        peer.send(2, step=at)
        bench.train(at)

    found = used(bench, step)
    assert bench.pressure().ledger.expired == SECONDS
    assert (found.made, found.grown, found.queued) == (3 * 4 * SECONDS, 0, 0.0)
