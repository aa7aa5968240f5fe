"""Moments of the lanes: every accepted group once, whatever happens to it; the same for all who get a batch."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.broker.bench import WALL, Bench, Peer, config, right
from tests.services.broker.journal.test_verify_core import JournaledBench
from tests.services.broker.snapshots.test_restore import items

from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.control import Reset
from rolloutmq.schemas.wire.envelope import PolicyVersion, RewardSummary, Split
from rolloutmq.schemas.wire.replies import Batch, Ok, Rejected
from rolloutmq.schemas.wire.requests import Goodbye
from rolloutmq.services.broker.actions import Bury
from rolloutmq.services.broker.journal.format.events import LaneSnapshot
from rolloutmq.services.broker.journal.stored_group import GroupBody
from rolloutmq.services.broker.replay.recording import Transcript
from rolloutmq.services.broker.requests import vacancies


def of(*groups: RewardSummary, half_life: int | None = None) -> Moments:
    found = Moments()
    for group in groups:
        found = found.after(group, 4, half_life)
    return found


def held(bench: Bench, env: str = "e", split: Split = Split.TRAIN) -> Moments:
    """Return the moments of a lane, and check that a restart has the same."""
    found = [
        {(lane.env, lane.split): lane.rewards for lane in items(one, LaneSnapshot)} for one in lives(bench)
    ]
    assert found[0] == found[-1]
    return found[0].get((env, split), Moments())


def lives(bench: Bench) -> list[Bench]:
    return [bench] if isinstance(bench, JournaledBench) else [bench, bench.reborn()]


def scored(peer: Peer, *counts: int) -> list[RewardSummary]:
    """Send a group of four for each count of right answers; return their summaries."""
    summaries = [right(count, 4) for count in counts]
    for summary in summaries:
        peer.send(rewards=summary)
    return summaries


def test_a_lane_has_the_moments_of_all_its_groups() -> None:
    bench = Bench(config(e={}, f={}))
    here = scored(bench.producer(), 1, 4, 0, 2)
    there = scored(bench.producer("q", "f"), 3)
    evaluated = scored(bench.producer("v", split=Split.EVAL), 4)
    assert held(bench) == of(*here)
    assert held(bench, "f") == of(*there)
    assert held(bench, split=Split.EVAL) == of(*evaluated)
    assert held(bench).weight == 16


def test_it_does_not_matter_what_becomes_of_a_group() -> None:
    bench = Bench()
    sent = scored(bench.producer(), 1, 3, 2, 0, 4, 2)
    bench.consumer()
    bench.train(0)
    bench.settle(bench.batch(1), no_signal=True)
    batch = bench.batch(2)
    rejected = tuple(Rejected(group_id=one.header.group_id, reason="bad") for one in batch.groups)
    bench.settle(batch, trained=(), rejected=rejected, version=PolicyVersion(0, 2))
    assert held(bench) == of(*sent)


def test_a_group_that_is_sent_again_is_counted_once() -> None:
    bench = Bench()
    peer = bench.producer()
    head = peer.next(rewards=right(1, 4))
    for _ in range(3):
        peer.deliver(head)
    other = bench.producer()  # a new session sends the same group under another number
    other.deliver(other.next(group_id=head.group_id, rewards=right(1, 4)))
    assert bench.status().rejected_by_reason["duplicate"] == 3
    assert held(bench) == of(right(1, 4))


def test_a_dead_group_that_is_queued_again_is_counted_once() -> None:
    bench = Bench()
    sent = scored(bench.producer(), 1, 2)
    bench.consumer()
    batch = bench.batch()
    rejected = tuple(Rejected(group_id=one.header.group_id, reason="bad") for one in batch.groups)
    buried: list[Bury] = []
    done = bench._done

    def noting(actions: list[Any]) -> list[Any]:
        buried.extend(action for action in actions if isinstance(action, Bury))
        return done(actions)

    bench._done = noting  # type: ignore[method-assign]
    bench.settle(batch, trained=(), rejected=rejected, version=PolicyVersion(0, 0))
    refused: dict[str, str] = {}
    dead = [one.group for one in buried]
    for one in buried:
        one.group.body = GroupBody(one.frames, one.group.header.nbytes)
    actions, orders = bench.core.requeue((b"r",), dead, refused, bench.now, WALL)
    bench._done(actions)
    assert (len(orders), refused) == (2, {})
    assert bench.pressure().lanes[0].accepted_groups == 4
    assert held(bench) == of(*sent)
    bench.restart()
    assert held(bench) == of(*sent)


def test_a_group_whose_scores_overflow_is_left_out_and_counted() -> None:
    bench = Bench()
    peer = bench.producer()
    peer.send(rewards=right(1, 4))
    peer.send(rewards=RewardSummary(0.0, -1e200, 1e200, float("inf")))
    peer.send(rewards=RewardSummary(3.0, 0.0, 1.0, 1.0))
    peer.send(rewards=right(3, 4))
    found = held(bench)
    assert found == msgspec.structs.replace(of(right(1, 4), right(3, 4)), left_out=2)
    assert bench.pressure().lanes[0].accepted_groups == 4


def test_the_half_life_counts_groups_in_the_order_of_acceptance() -> None:
    bench = Bench(config(trainer={"rewards": {"half_life_groups": 2}}, e={}))
    sent = scored(bench.producer(), 4, 0, 1)
    assert held(bench) == of(*sent, half_life=2)
    assert held(bench) != of(*sent[::-1], half_life=2)
    bench.restart()
    assert held(bench) == of(*sent, half_life=2)


def test_another_half_life_holds_for_later_groups() -> None:
    bench = Bench(config(trainer={"rewards": {"half_life_groups": 2}}, e={}))
    before = scored(bench.producer(), 4, 0)
    bench.restart()
    bench.core = bench.reborn(config(e={})).core
    bench.shadowed, bench.settings = False, config(e={})
    (later,) = scored(bench.producer(), 1)
    (lane,) = items(bench, LaneSnapshot)
    assert lane.rewards == of(*before, half_life=2).after(later, 4)


def test_a_reset_begins_anew() -> None:
    bench = Bench()
    scored(bench.producer(), 1, 2)
    bench.ask(Reset(reason="x"), Ok)
    (sent,) = scored(bench.producer(), 3)
    assert held(bench) == of(sent)


def test_a_lane_that_was_forgotten_begins_anew_and_a_configured_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vacancies, "VACANT_KEPT", 1)
    bench = Bench(config(broker={"silence_s": 5.0}, mine={}))
    bench.consumer()
    sent = {}
    for name, env in (("p", "mine"), ("q", "other"), ("r", "last")):
        peer = bench.producer(name, env)
        sent[env] = scored(peer, 1, 3)
        bench.train(len(sent))
        bench.ask(Goodbye(producer=name, session=peer.session, produced=2), Ok)
        bench.core.forget_unclaimed()
        bench.tick(1.0)
    for _ in range(7):
        bench.tick(1.0)
    assert [lane.env for lane in bench.pressure().lanes] == ["mine", "last"]
    again = {env: scored(bench.producer(name, env), 2) for name, env in (("p", "mine"), ("q", "other"))}
    assert held(bench, "mine") == of(*sent["mine"], *again["mine"])
    assert held(bench, "other") == of(*again["other"])


# Batches


def mixed() -> Bench:
    bench = Bench(config(e={"stale": "pass"}, f={"stale": "pass"}))
    bench.shadowed = False
    scored(bench.producer(), 1, 2, 3)
    scored(bench.producer("q", "f"), 4, 0)
    return bench


def test_a_batch_brings_the_moments_of_its_environments_as_of_its_lease() -> None:
    bench = mixed()
    bench.producer("r", "unused")
    bench.consumer()
    before = {env: held(bench, env) for env in ("e", "f")}
    first = bench.batch(0, request_id="r")
    scored(bench.producer(), 4, 4, 4)
    again = bench.batch(0, request_id="r")
    assert first.moments == again.moments == before
    bench.settle(first)
    assert bench.batch(1).moments["e"] == held(bench)


def test_all_ranks_get_the_same_however_late_they_pull() -> None:
    bench = mixed()
    for rank in range(2):
        bench.consumer(f"c{rank}", rank=rank, world_size=2)
    shares: list[Batch] = []
    for rank in range(2):
        shares.append(bench.batch(0, consumer=f"c{rank}", rank=rank, world_size=2))
        scored(bench.producer(f"late-{rank}"), 4, 4)
    assert shares[0].moments == shares[1].moments
    assert {env: moments.groups for env, moments in shares[0].moments.items()} == {"e": 3, "f": 2}


def test_groups_of_a_lost_lease_come_with_the_moments_of_their_next_one() -> None:
    bench = mixed()
    bench.consumer()
    first = bench.batch(0)
    later = scored(bench.producer(), 4)
    bench.consumer()  # a new life of the trainer, without a checkpoint
    second = bench.batch(0)
    assert [one.header.group_id for one in second.groups] == [one.header.group_id for one in first.groups]
    assert second.moments["e"] == of(right(1, 4), right(2, 4), right(3, 4), *later)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_rewound_batch_brings_what_it_brought_before(restarted: bool) -> None:
    """A step on the same groups from the same policy must lead to the same policy, also with normalized scores."""
    bench = mixed()
    bench.consumer()
    first = bench.batch(0)
    bench.settle(first)
    scored(bench.producer(), 4, 4)
    second = bench.batch(1)
    if restarted:
        bench.restart()
    bench.consumer(resume=PolicyVersion(1, 0))
    if restarted:
        bench.restart()
    assert first.moments != second.moments
    for before, step in ((first, 0), (second, 1)):
        again = bench.batch(step)
        assert again.rewound
        assert again.moments == before.moments
        if restarted:
            bench.restart()
        bench.settle(again)


def test_a_replay_brings_what_was_recorded() -> None:
    bench = mixed()
    bench.consumer()
    seen = []
    for step in range(2):
        batch = bench.batch(step)
        bench.settle(batch)
        seen.append(batch.moments)
        scored(bench.producer(), 4, 1)
    transcript = Transcript()
    for event in bench.journal.read():
        transcript.read(event)
    assert [batch.moments for batch in transcript.batches] == seen
    assert seen[0] != seen[1]


def test_status_shows_mean_and_deviation_of_the_raw_scores() -> None:
    bench = Bench()
    peer = bench.producer()
    (lane,) = bench.pressure().lanes
    assert (lane.reward_mean, lane.reward_deviation, lane.reward_groups) == (None, None, 0)
    peer.send(rewards=right(1, 4))
    peer.send(rewards=right(3, 4))
    (lane,) = bench.pressure().lanes
    assert (lane.reward_mean, lane.reward_deviation, lane.reward_groups) == (0.5, 0.5, 2)


# Verification from the files alone


def journaled(tmp_path: Path, half_life: int | None) -> JournaledBench:
    bench = JournaledBench(tmp_path)
    bench.disk.close()
    rewards = bench.settings.trainer.rewards.model_copy(update={"half_life_groups": half_life})
    trainer = bench.settings.trainer.model_copy(update={"rewards": rewards})
    bench.settings = bench.settings.model_copy(update={"trainer": trainer})
    bench.open()
    return bench


@pytest.mark.parametrize("half_life", [None, 3])
def test_the_journal_proves_the_moments(tmp_path: Path, half_life: int | None) -> None:
    bench = journaled(tmp_path, half_life)
    env = next(iter(bench.settings.environment))
    peer = bench.producer(env=env)
    sent = scored(peer, 1, 2, 3, 4, 0, 1, 2)
    bench.restart()
    sent += scored(bench.producer(env=env), 4, 4, 1)
    bench.restart()
    bench.catch_up()
    assert bench.verify().problems == []
    assert held(bench, env) == of(*sent, half_life=half_life)
    lane = bench.core._state.lanes.find(env, Split.TRAIN)
    assert lane is not None
    lane.rewards = msgspec.structs.replace(lane.rewards, mean=lane.rewards.mean + 1e-3)
    bench.restart()
    bench.catch_up()
    assert bench.verify().problems == []  # the next life counted the groups itself
    lane = bench.core._state.lanes.find(env, Split.TRAIN)
    assert lane is not None
    lane.rewards = msgspec.structs.replace(lane.rewards, groups=9)
    bench.disk.rotate(bench.core.snapshot())
    bench.catch_up()
    (problem,) = bench.verify().problems
    assert f"the moments of {env} (train)" in str(problem)
    bench.disk.close()
