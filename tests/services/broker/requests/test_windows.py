"""Windows: several leases in one hand, settled group by group, exact through restarts, rewinds and losses."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from tests.services.broker.bench import Bench, Peer, config, ids

from rolloutmq.schemas.wire.control import JournalStatus
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.replies import (
    Batch,
    ConsumerRegistered,
    ErrorReply,
    NoBatch,
    Ok,
    Rejected,
    RunInfo,
    Settled,
    Wait,
)
from rolloutmq.schemas.wire.requests import WINDOW_LIMIT, Commit, RegisterConsumer, SettleGroups

INFO = RunInfo(batch_sequences=8)


class Trainer:
    """A consumer with a window, on the wire."""

    def __init__(self, bench: Bench, *, window: int = 8, groups: int = 4, **given: Any) -> None:
        self.bench, self.window, self.groups = bench, window, groups
        self.generation = bench.consumer(info=INFO, **given)
        self.step = given["resume"].step if given.get("resume") else 0
        self._keys = count()

    def pull(self, **given: Any) -> Batch | NoBatch | ErrorReply:
        given = {"groups": self.groups, "window": self.window, "sequences": 0, **given}
        return self.bench.pull(given.pop("step", self.step), **given)

    def take(self, **given: Any) -> tuple[str, ...]:
        """Pull groups that must be there."""
        got = self.pull(**given)
        assert isinstance(got, Batch), got
        return ids(got)

    def wait(self) -> Wait:
        got = self.pull()
        assert isinstance(got, NoBatch), got
        return got.wait

    def request(
        self,
        trained: Sequence[str] = (),
        filtered: Sequence[str] = (),
        rejected: Sequence[str] = (),
        **given: Any,
    ) -> SettleGroups:
        self.step += bool(trained)
        given = {"key": f"k{self.generation}-{next(self._keys)}", "generation": self.generation, **given}
        given.setdefault("version", PolicyVersion(0, self.step))
        bad = tuple(Rejected(group_id=one, reason="bad") for one in rejected)
        return SettleGroups(
            consumer="c", trained=tuple(trained), filtered=tuple(filtered), rejected=bad, **given
        )

    def settle(self, *groups: str, **given: Any) -> Settled:
        return self.bench.ask(self.request(groups, **given), Settled)

    def commit(self) -> None:
        self.bench.ask(Commit(consumer="c", version=PolicyVersion(0, self.step)), Ok)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def peer(bench: Bench) -> Peer:
    return bench.producer()


def places(bench: Bench) -> dict[str, int]:
    ledger = bench.pressure().ledger
    names = ("queued", "leased", "trained", "committed", "filtered", "dead")
    return {name: found for name in names if (found := getattr(ledger, name))}


def test_groups_come_as_they_are_there_in_several_leases(bench: Bench, peer: Peer) -> None:
    trainer = Trainer(bench, groups=4)
    assert trainer.wait() is Wait.NO_BATCH
    sent = peer.send(1)
    assert trainer.take() == tuple(sent)
    sent = peer.send(6)
    assert trainer.take() + trainer.take() == tuple(sent)
    assert places(bench) == {"leased": 7}


def test_any_mix_of_groups_is_settled_at_once(bench: Bench, peer: Peer) -> None:
    a, b, c, d, e, f = peer.send(6)
    trainer = Trainer(bench, groups=2)
    for _ in range(3):
        trainer.take()
    assert trainer.settle(b, e, filtered=[c], rejected=[f]).lost == ()
    assert places(bench) == {"leased": 2, "trained": 2, "filtered": 1, "dead": 1}
    trainer.settle(a, d)
    trainer.commit()
    assert places(bench) == {"committed": 4, "filtered": 1, "dead": 1}


def test_the_window_bounds_the_groups(bench: Bench, peer: Peer) -> None:
    a, b, _ = peer.send(3)
    trainer = Trainer(bench, window=2, groups=1)
    trainer.take()
    trainer.take()
    assert trainer.wait() is Wait.UNSETTLED
    trainer.settle(b)
    assert len(trainer.take()) == 1
    assert trainer.wait() is Wait.UNSETTLED
    trainer.settle(a)
    assert trainer.wait() is Wait.NO_BATCH


def test_groups_that_come_one_by_one_fill_no_window(bench: Bench, peer: Peer) -> None:
    """It has room for so many groups, in however many leases they came; the last one takes what is left of it."""
    trainer = Trainer(bench, window=2, groups=4)
    held: list[str] = []
    for _ in range(6):
        (name,) = peer.send(1)
        assert trainer.take() == (name,)
        held.append(name)
    sent = peer.send(3)
    assert trainer.take() == tuple(sent[:2])
    assert trainer.wait() is Wait.UNSETTLED
    trainer.settle(held[3])
    assert trainer.take() == (sent[2],)


def test_settled_steps_that_come_again_fill_no_window(bench: Bench, peer: Peer) -> None:
    sent = peer.send(6)
    trainer = Trainer(bench, window=2, groups=4)
    trainer.take()
    trainer.take()
    for name in sent:
        trainer.settle(name)
    trainer = Trainer(bench, window=2, groups=4, resume=PolicyVersion(0, 0))
    assert [trainer.take() for _ in sent] == [(name,) for name in sent]
    assert trainer.wait() is Wait.NO_BATCH


def test_a_rewound_step_comes_as_a_whole(bench: Bench, peer: Peer) -> None:
    sent = peer.send(6)
    trainer = Trainer(bench, window=1, groups=6)
    trainer.take()
    trainer.settle(*sent[:4])
    trainer = Trainer(bench, window=3, groups=1, resume=PolicyVersion(0, 0))
    assert trainer.take() == tuple(sent[:4])
    assert trainer.wait() is Wait.UNSETTLED
    trainer.settle(*sent[:2])
    assert trainer.take() == tuple(sent[4:])


def test_a_waiting_pull_is_answered_by_a_settlement(bench: Bench, peer: Peer) -> None:
    a, b = peer.send(2)
    trainer = Trainer(bench, window=1, groups=1)
    trainer.take()
    assert bench.wait(0, 0, groups=1, window=1) == []
    trainer.settle(a)
    (reply,) = bench.late
    assert isinstance(reply.message, Batch)
    assert ids(reply.message) == (b,)
    assert bench.core._state.run.policy.step == 1, "the waiting pull named the policy before the settlement"


def test_a_repeated_pull_gets_the_same_groups(bench: Bench, peer: Peer) -> None:
    peer.send(4)
    trainer = Trainer(bench, groups=2)
    first = trainer.take(request_id="same")
    assert trainer.take(request_id="same", step=3) == first
    assert trainer.take() != first


def test_a_repeated_settlement_changes_nothing(bench: Bench, peer: Peer) -> None:
    a, b, _ = peer.send(3)
    trainer = Trainer(bench)
    trainer.take()
    request = trainer.request([a], [b])
    first = bench.ask(request, Settled)
    before = places(bench)
    bench.restart()
    trainer.generation = bench.consumer(generation=trainer.generation)
    assert bench.ask(request, Settled) == first
    assert places(bench) == before


def test_a_group_that_is_not_held_is_told_and_the_others_are_settled(bench: Bench, peer: Peer) -> None:
    a, b = peer.send(2)
    trainer = Trainer(bench)
    trainer.take()
    request = trainer.request([a, "gone"], [b])
    assert bench.ask(request, Settled).lost == ("gone",)
    assert bench.ask(request, Settled).lost == ("gone",), "and told again when it is repeated"
    assert places(bench) == {"trained": 1, "filtered": 1}


def test_groups_of_one_id_are_settled_one_after_another(bench: Bench, peer: Peer) -> None:
    """The same id with other contents is another group."""
    peer.deliver(peer.next(group_id="same"))
    peer.deliver(peer.next(group_id="same", nbytes=120))
    trainer = Trainer(bench)
    assert trainer.take() == ("same", "same")
    assert trainer.settle("same").lost == ()
    assert places(bench) == {"leased": 1, "trained": 1}
    assert trainer.settle("same").lost == ()
    assert places(bench) == {"trained": 2}


def test_a_new_life_of_the_consumer_gets_everything_again(bench: Bench, peer: Peer) -> None:
    a, b, c, d = peer.send(4)
    trainer = Trainer(bench, groups=2)
    trainer.take()
    trainer.take()
    trainer.settle(b)
    later = Trainer(bench)
    assert later.take() == (a, c, d)
    assert bench.refused(trainer.request([a])) is ErrorCode.FENCED


def test_the_policy_after_a_loss_is_the_settled_one(bench: Bench, peer: Peer) -> None:
    a, *_ = peer.send(3)
    trainer = Trainer(bench, groups=1)
    trainer.take()
    trainer.take()
    trainer.settle(a)
    bench.consumer()
    assert bench.core._state.run.policy.step == 1


def test_silence_loses_what_is_held_and_counts_a_failure(bench: Bench, peer: Peer) -> None:
    a, b = peer.send(2)
    trainer = Trainer(bench, groups=1)
    trainer.take()
    trainer.take()
    bench.tick(bench.settings.broker.silence_s + 1)
    assert places(bench) == {"queued": 2}
    trainer = Trainer(bench)
    assert trainer.take() == (a, b)
    assert trainer.settle(a, b).lost == ()


def test_a_rewind_brings_settlements_in_order_then_what_was_held(bench: Bench, peer: Peer) -> None:
    a, b, c, d, e, f = peer.send(6)
    trainer = Trainer(bench, groups=2)
    for _ in range(3):
        trainer.take()
    trainer.settle(a)
    trainer.commit()
    trainer.settle(f, c)
    trainer.settle(b)
    again = Trainer(bench, groups=2, resume=PolicyVersion(0, 1))
    taken = []
    while isinstance(got := again.pull(), Batch):
        assert got.rewound
        taken.append(ids(got))
    assert taken == [(f, c), (b,), (d,), (e,)]
    again.settle(d, c, b)
    bench.restart()
    again.generation = bench.consumer(generation=again.generation)
    assert again.settle(e, f).lost == ()
    again.commit()
    assert places(bench) == {"committed": 6}
    assert a not in {group for batch in taken for group in batch}


def test_a_resume_before_the_last_commit_is_told_what_is_gone(bench: Bench, peer: Peer) -> None:
    peer.send(5)
    trainer = Trainer(bench)
    held = trainer.take() + trainer.take()
    for group in held[:3]:
        trainer.settle(group)
    trainer.commit()
    trainer.settle(held[3])

    def deleted(resume: int) -> int:
        asked = RegisterConsumer(consumer="c", info=INFO, resume=PolicyVersion(0, resume))
        return bench.ask(asked, ConsumerRegistered).deleted_steps

    assert deleted(3) == 0
    assert deleted(1) == 2


def test_rewound_and_new_groups_are_settled_together(bench: Bench, peer: Peer) -> None:
    a, b = peer.send(2)
    trainer = Trainer(bench)
    trainer.take()
    trainer.settle(a)
    trainer = Trainer(bench, resume=PolicyVersion(0, 0))
    (c,) = peer.send(1)
    assert [trainer.take() for _ in range(3)] == [(a,), (b,), (c,)]
    request = trainer.request([a, c], [b])
    assert bench.ask(request, Settled).lost == ()
    assert bench.ask(request, Settled).lost == ()
    assert places(bench) == {"trained": 2, "filtered": 1}


def test_the_trainer_is_told_to_settle_when_the_mark_is_full_of_what_it_holds() -> None:
    bench = Bench(config(broker={"high_bytes": 400, "max_group_bytes": 100}, e={}))
    peer = bench.producer()
    trainer = Trainer(bench)
    held: list[str] = []
    heads = [peer.next() for _ in range(6)]
    for head in heads * 6:
        peer.deliver(head)  # refused without credit, or if it is here already
        bench.tick(0.1)
        if isinstance(got := trainer.pull(), Batch):
            held += ids(got)
    assert len(held) == 4
    assert trainer.wait() is Wait.UNSETTLED
    trainer.settle(*held)
    assert trainer.wait() is Wait.NO_BATCH


def test_the_trainer_is_told_to_settle_when_no_rollout_may_start() -> None:
    bench = Bench(config(e={"pacing": True, "max_staleness": 1}))
    peer = bench.producer(slots=8)
    trainer = Trainer(bench)
    bench.tick()
    peer.send(4)
    trainer.take()
    bench.tick(1.0)
    assert trainer.wait() is Wait.UNSETTLED
    trainer.settle(f"p-{peer.session}-1")
    bench.tick(1.0)
    assert trainer.wait() is Wait.NO_BATCH


def test_a_slow_journal_is_not_taken_for_a_full_hand() -> None:
    bench = Bench(config(e={"pacing": True, "max_staleness": 1}))
    peer = bench.producer(slots=8)
    trainer = Trainer(bench)
    bench.tick()
    peer.send(2)
    trainer.take()
    bench.core.journaled(JournalStatus(health="slow"), bench.now)
    bench.tick(1.0)
    assert trainer.wait() is Wait.JOURNAL_SLOW


def test_staleness_is_that_of_the_step_not_of_the_pull() -> None:
    """In whatever order the trainer takes its groups: what exceeds the bound when it is trained on is counted."""
    bench = Bench(config(e={"max_staleness": 1}))
    peer = bench.producer()
    trainer = Trainer(bench)
    old, *others = peer.send(4, step=0)
    trainer.take()
    for group in others:
        trainer.settle(group)
    assert bench.core._state.staleness.max_delivered == 2
    trainer.settle(old)
    assert bench.core._state.staleness.max_delivered == 3
    assert bench.pressure().ledger.reasons == {"passed(stale)": 2}


def test_environments_share_as_they_come_by_weight() -> None:
    bench = Bench(config(a={"weight": 3.0}, b={}))
    bench.shadowed = False
    for env in ("a", "b"):
        bench.producer(env, env).send(60)
    trainer = Trainer(bench, window=64, groups=1)
    taken = [trainer.take()[0] for _ in range(40)]
    assert sum(name.startswith("a") for name in taken) == 30


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 0}, "window: must be at least 1 with groups"),
        ({"groups": 0, "sequences": 8}, "and 0 without"),
        ({"sequences": 8}, "exactly one of sequences, tokens and groups"),
    ],
)
def test_contradictions_are_refused(bench: Bench, given: dict[str, int], message: str) -> None:
    refusal = Trainer(bench).pull(**given)
    assert isinstance(refusal, ErrorReply)
    assert message in refusal.detail
    assert refusal.code is ErrorCode.INVALID


def test_several_ranks_are_refused(bench: Bench) -> None:
    trainer = Trainer(bench, world_size=2)
    refusal = trainer.pull(world_size=2)
    assert isinstance(refusal, ErrorReply)
    assert "steps, which all ranks share" in refusal.detail


def test_a_settlement_is_refused_behind_the_policy_or_with_a_group_twice(bench: Bench, peer: Peer) -> None:
    a, b = peer.send(2)
    trainer = Trainer(bench)
    trainer.take()
    trainer.settle(a)
    assert bench.refused(trainer.request([b], version=PolicyVersion(0, 0))) is ErrorCode.INVALID
    assert bench.refused(trainer.request([b], [b])) is ErrorCode.INVALID
    assert places(bench) == {"leased": 1, "trained": 1}


def test_a_step_and_a_window_do_not_mix(bench: Bench, peer: Peer) -> None:
    peer.send(4)
    trainer = Trainer(bench, groups=1)
    trainer.take()
    step = bench.pull(0)
    assert isinstance(step, NoBatch)
    assert step.wait is Wait.LEASED_ELSEWHERE
    bench.consumer()
    bench.batch(0)
    assert trainer.wait() is Wait.LEASED_ELSEWHERE


def test_the_largest_window_survives_a_restart(bench: Bench, peer: Peer) -> None:
    bench.shadowed = False
    sent = peer.send(WINDOW_LIMIT)
    trainer = Trainer(bench, window=WINDOW_LIMIT, groups=1)
    held = [trainer.take()[0] for _ in sent]
    bench.restart()
    trainer.generation = bench.consumer(generation=trainer.generation)
    assert trainer.settle(*reversed(held)).lost == ()
    assert places(bench) == {"trained": WINDOW_LIMIT}
