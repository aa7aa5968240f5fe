"""Counters of trainer demand and worker supply: they only grow."""

import pytest
from tests.services.broker.bench import Bench, config

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import LaneStatus, WorkerBeat, WorkerBeatReply, WorkerState
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Batch, Ok, Rejected
from rolloutmq.schemas.wire.requests import ConsumerBeat, Release, TrainerPause
from rolloutmq.services.broker.batches.consumers import POLL_S, SLEEP_S


def lane(bench: Bench) -> LaneStatus:
    (found,) = bench.pressure().lanes
    return found


def test_sequences_that_came_and_that_trainers_are_done_with_are_counted() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.consumer()
    first = peer.send(2)
    bench.train(0)
    names = peer.send(2, step=1)
    batch = bench.batch(1)
    filtered, rejected = names
    bench.settle(
        batch, trained=(), filtered=(filtered,), rejected=(Rejected(group_id=rejected, reason="nan"),)
    )
    peer.send(1, step=1)
    assert len(first) == 2
    assert (lane(bench).accepted_sequences, lane(bench).settled_sequences) == (20, 16)


def test_how_long_a_group_was_rolled_out_is_a_mean_that_forgets() -> None:
    bench = Bench()
    peer = bench.producer()
    assert lane(bench).rollout_s == 0.0
    peer.send(1, started_at=100.0, finished_at=130.0)
    assert lane(bench).rollout_s == 30.0
    peer.send(60, started_at=100.0, finished_at=110.0)
    assert lane(bench).rollout_s == pytest.approx(10.0, rel=0.01)
    peer.send(1, started_at=100.0, finished_at=1e9)
    assert lane(bench).rollout_s == pytest.approx(10.0, rel=0.01)


def test_a_trainer_that_waits_for_groups_starves_and_one_that_waits_for_others_does_not() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.consumer()
    bench.wait(0)
    bench.tick(3.0)
    assert bench.pressure().starved_s == pytest.approx(3.0)
    peer.send(2)
    bench.tick(2.0)
    bench.wait(1)
    bench.tick(5.0)
    assert bench.pressure().trainer_wait == "leased_elsewhere"
    assert bench.pressure().starved_s == pytest.approx(3.0)


def test_what_is_for_evaluation_starves_nobody() -> None:
    bench = Bench()
    bench.consumer()
    bench.wait(0, split=Split.EVAL)
    bench.tick(3.0)
    assert bench.pressure().starved_s == 0.0
    assert bench.pressure().trainer_waits_s == {}
    assert not bench.core._state.credits.starved, "nothing of the reserve is granted for it"
    bench.consumer("t", group="trainer")
    bench.wait(0, consumer="t", group="trainer")
    assert bench.core._state.credits.starved


def test_a_batch_that_is_leased_for_evaluation_does_not_hide_that_a_trainer_starves() -> None:
    bench = Bench()
    bench.producer("v", split=Split.EVAL).send(1)
    bench.consumer("v", group="evaluator")
    bench.batch(0, 4, split=Split.EVAL, consumer="v", group="evaluator")
    bench.consumer()
    bench.wait(0)
    assert bench.core._state.credits.starved


def test_ranks_starve_each_for_its_part() -> None:
    bench = Bench()
    for rank in range(2):
        bench.consumer(f"c{rank}", rank=rank, world_size=2)
        bench.wait(0, consumer=f"c{rank}", rank=rank, world_size=2)
    bench.tick(4.0)
    assert bench.pressure().starved_s == pytest.approx(4.0)


def test_a_trainer_that_polls_starves_between_two_polls_but_not_for_ever() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.consumer()
    bench.pull(0)
    bench.now += 2.0
    bench.pull(0)
    bench.now += 1.0
    peer.send(2)
    bench.train(0)
    bench.now += 3.0
    bench.pull(1)
    assert bench.pressure().starved_s == pytest.approx(3.0)
    for seconds in range(60):
        assert bench.pressure().starved_s == pytest.approx(3.0 + min(seconds, POLL_S))
        bench.tick(1.0)
        bench.send_beat()
    bench.pull(1)
    assert bench.pressure().starved_s == pytest.approx(3.0 + POLL_S)


def test_a_trainer_that_polls_waits_until_soon_after_a_batch_is_there() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.consumer()
    bench.pull(0)
    bench.tick(2.0)
    peer.send(2)
    bench.tick(0.0)
    bench.tick(5.0)
    bench.train(0)
    assert bench.pressure().starved_s == pytest.approx(2.0 + SLEEP_S), (
        "the rest of five seconds was no wait for groups"
    )


def test_a_trainer_that_polls_in_vain_although_sequences_are_queued_waits_the_whole_time() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.consumer()
    bench.pull(0, 6)
    bench.tick(1.0)
    peer.send(2, sequences=4)
    bench.tick(0.0)
    bench.tick(2.0)
    assert not isinstance(bench.pull(0, 6), Batch), "two groups of four are no six"
    assert bench.pressure().starved_s == pytest.approx(3.0)


def test_a_trainer_that_waits_again_and_again_starves_once() -> None:
    """Its pulls wait for half a second each, and it asks again a tenth of a second after each empty answer."""
    bench = Bench()
    bench.producer()
    bench.consumer()
    for _ in range(10):
        bench.wait(0, wait_s=0.5)
        bench.tick(0.25)
        bench.tick(0.25)
        bench.tick(0.1)
        bench.send_beat()
    assert bench.pressure().starved_s == pytest.approx(6.0)
    assert sum(bench.pressure().trainer_waits_s.values()) == pytest.approx(5.0)


def test_a_trainer_that_takes_all_there_is_and_polls_once_more_does_not_wait() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.consumer()
    peer.send(4)
    for step in range(2):
        bench.train(step)
        bench.tick(0.1)
    bench.pull(2)
    bench.tick(9.0)
    bench.pull(2)
    assert bench.pressure().starved_s == 0.0, "it trained on two batches"
    bench.tick(1.0)
    bench.pull(2)
    assert bench.pressure().starved_s == pytest.approx(1.0)


def test_a_trainer_counts_while_it_lives() -> None:
    bench = Bench(RunConfig.model_validate({"broker": {"silence_s": 5.0}}))
    assert bench.pressure().trainers == 0
    bench.consumer()
    bench.pull(0, split=Split.EVAL)
    assert bench.pressure().trainers == 0
    bench.pull(0)
    assert bench.pressure().trainers == 1
    for _ in range(20):
        bench.tick(1.0)
    assert bench.pressure().trainers == 0


def beat(bench: Bench, blocked_s: float, *, worker: str = "w", pid: int = 1) -> None:
    message = WorkerBeat(worker=worker, env="e", state=WorkerState.READY, pid=pid, blocked_s=blocked_s)
    bench.ask(message, WorkerBeatReply)


def test_completions_are_summed_over_workers_that_come_and_go() -> None:
    bench = Bench(config(e={}))
    for worker, pid, completions in (
        ("w", 1, 5),
        ("w", 1, 8),
        ("v", 3, 2),
        ("v", 3, 6),
        ("w", 2, 1),
        ("w", 2, 3),
    ):
        message = WorkerBeat(
            worker=worker,
            env="e",
            state=WorkerState.READY,
            pid=pid,
            completions=completions,
            completion_tokens=10 * completions,
        )
        bench.ask(message, WorkerBeatReply)
    assert bench.pressure().completions == {"e": 3 + 4 + 2}
    assert bench.pressure().completion_tokens == {"e": 90}


def test_what_slots_waited_is_summed_over_workers_that_come_and_go() -> None:
    bench = Bench(config(e={}))
    beat(bench, 50.0)
    assert bench.pressure().blocked_s == {}
    beat(bench, 53.0)
    beat(bench, 10.0, worker="v")
    beat(bench, 12.0, worker="v")
    beat(bench, 1.0, pid=2)
    beat(bench, 2.5, pid=2)
    assert bench.pressure().blocked_s == {"e": pytest.approx(6.5)}


def told(bench: Bench, seconds: float) -> float:
    """Let a trainer tell how long it has evaluated, and return what the broker has counted."""
    bench.ask(ConsumerBeat(consumer="c", waits_s={TrainerPause.EVALUATION: seconds}), Ok)
    return bench.pressure().trainer_waits_s.get("evaluation", 0.0)


def test_a_trainer_that_evaluates_waits_and_starves_not() -> None:
    bench = Bench()
    bench.consumer()
    bench.now += 1.0
    assert told(bench, 0.75) == pytest.approx(0.75)
    assert told(bench, 0.75) == pytest.approx(0.75)  # a repeated heartbeat
    bench.now += 2.0
    assert told(bench, 2.5) == pytest.approx(2.5)
    bench.now += 1.0
    bench.ask(Release(consumer="c", leaves=True, waits_s={TrainerPause.EVALUATION: 3.0}), Ok)
    assert bench.pressure().trainer_waits_s == {"evaluation": pytest.approx(3.0)}
    assert bench.pressure().starved_s == 0.0


def test_no_wait_is_longer_than_the_time_since_it_was_told_last() -> None:
    bench = Bench()
    bench.consumer()
    bench.now += 1.0
    assert told(bench, 1e300) == pytest.approx(1.0)
    bench.now += 2.0
    assert told(bench, 0.5) == pytest.approx(1.5)  # a trainer that began to count anew
    bench.restart()  # the trainer does not know yet, and tells what it told the life before
    bench.now += 0.25
    assert told(bench, 60.0) == pytest.approx(0.25)
