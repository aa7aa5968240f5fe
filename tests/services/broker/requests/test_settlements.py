"""The broker tells of every training batch from its headers, whoever trains, and passes on what a trainer logs."""

from math import inf, nan
from typing import Any

import pytest
from tests.services.broker.bench import Bench, config, ids, right

from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, RewardSummary, Split
from rolloutmq.schemas.wire.replies import Ok, Rejected, Settled
from rolloutmq.schemas.wire.requests import LogFigures, Release, Settle, SettleGroups
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures


@pytest.fixture
def bench() -> Bench:
    return Bench(config(e={"max_staleness": 9, "stale": "pass"}, other={}))


def reports(bench: Bench) -> list[BatchSettled]:
    return [one.message for one in bench.published if isinstance(one.message, BatchSettled)]


def test_a_settled_batch_has_a_line_and_an_event(bench: Bench) -> None:
    bench.consumer()
    peer = bench.producer()
    names = (
        *peer.send(step=0, rewards=right(4, 4), tokens=30),
        *peer.send(step=2, rewards=right(1, 4), tokens=50),
        *peer.send(step=3, rewards=right(0, 4), tokens=70),
        *peer.send(step=3, tokens=90),
    )
    batch = bench.batch(step=4, sequences=16, version=PolicyVersion(0, 3))
    assert ids(batch) == names
    bad = Rejected(group_id=names[3], reason="bad")
    bench.settle(batch, trained=names[:2], filtered=names[2:3], rejected=(bad,), version=PolicyVersion(0, 4))
    (line,) = bench.settled_lines
    assert (line.version, line.consumer) == (PolicyVersion(0, 4), "c")
    assert (line.trained, line.filtered, line.rejected) == (names[:2], names[2:3], names[3:])
    assert (line.staleness, line.rewards) == ((3, 1), (1.0, 0.25, 0.0))
    (event,) = reports(bench)
    assert (event.run, event.incarnation, event.step, event.stepped) == ("run", 0, 4, True)
    assert (event.trained, event.filtered, event.rejected) == (2, 1, 1)
    assert (event.sequences, event.tokens) == (12, 150)
    assert event.reward == pytest.approx(5 / 12)
    assert (event.staleness_max, event.staleness_mean) == (3, 2.0)
    (lane,) = event.scores
    assert (lane.env, lane.groups, lane.flat, lane.sequences) == ("e", 3, 2, 12)
    assert (lane.low, lane.high, lane.at_low, lane.at_high) == (0.0, 1.0, 7, 5)
    assert lane.mean == pytest.approx(5 / 12)


def test_a_batch_without_a_signal_is_no_step(bench: Bench) -> None:
    bench.consumer()
    bench.producer().send(2)
    bench.settle(bench.batch(sequences=8), no_signal=True)
    (event,) = reports(bench)
    assert (event.stepped, event.step, event.trained, event.filtered) == (False, 0, 0, 2)


def test_several_ranks_settle_one_batch(bench: Bench) -> None:
    for rank in range(2):
        bench.consumer(f"c{rank}", rank=rank, world_size=2)
    bench.producer().send(4)
    shards = [bench.batch(0, 16, consumer=f"c{rank}", rank=rank, world_size=2) for rank in range(2)]
    bench.settle(shards[0], consumer="c0", rank=0)
    assert not bench.settled_lines
    bench.settle(shards[1], consumer="c1", rank=1)
    (line,) = bench.settled_lines
    assert len(line.trained) == 4


def test_an_evaluation_is_no_training() -> None:
    exam = Bench(config(e={"split": "eval"}))
    exam.consumer()
    exam.producer(split=Split.EVAL).send(2)
    exam.settle(exam.batch(split=Split.EVAL))
    assert not exam.settled_lines
    assert not reports(exam)


def test_a_resumed_trainer_voids_the_lines_of_later_steps(bench: Bench) -> None:
    bench.consumer()
    bench.producer().send(6)
    for step in range(3):
        bench.train(step)
    bench.consumer(resume=PolicyVersion(1, 1))
    assert (bench.settled_lines[-1].resumed, bench.settled_lines[-1].version) == (True, PolicyVersion(1, 1))
    again = bench.batch(1, version=PolicyVersion(1, 1))
    bench.settle(again, version=PolicyVersion(1, 2))
    assert (bench.settled_lines[-1].rewound, bench.settled_lines[-1].version) == (True, PolicyVersion(1, 2))


def test_the_first_life_of_a_trainer_resumes_nothing(bench: Bench) -> None:
    """The shipped trainer always tells its policy, so that a fresh run had one resumption in its summary."""
    bench.consumer(resume=PolicyVersion(0, 0))
    assert not bench.settled_lines
    bench.producer().send(4)
    bench.train(0)
    bench.consumer(resume=PolicyVersion(0, 0))  # from scratch: the line of the step is void
    assert [line.resumed for line in bench.settled_lines] == [False, True]


def test_a_restart_tells_nothing_again(bench: Bench) -> None:
    bench.consumer()
    bench.producer().send(4)
    bench.train(0)
    bench.restart()
    bench.tick()
    assert len(bench.settled_lines) == len(reports(bench)) == 1


def test_groups_of_a_window_are_as_stale_as_at_their_step(bench: Bench) -> None:
    bench.consumer()
    names = bench.producer().send(2)
    batch = bench.batch(0, 0, groups=4, window=4)
    assert ids(batch) == tuple(names)
    for step, name in enumerate(names, 5):
        version = PolicyVersion(0, step)
        bench.send(SettleGroups(consumer="c", generation=0, key=name, version=version, trained=(name,)))
    assert [(line.trained, line.staleness) for line in bench.settled_lines] == [
        ((names[0],), (4,)),
        ((names[1],), (5,)),
    ]


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        (right(3, 4), (1, 3)),
        (RewardSummary(2.0, 2.0, 2.0, 0.0), (4, 4)),
        (RewardSummary(0.5, 0.0, 1.0, 0.5), (1, 1)),  # 0, 0.5, 0.5, 1: what lies between is not in a header
    ],
)
def test_scores_at_the_ends_are_exact_where_no_other_occurs(
    bench: Bench, rewards: RewardSummary, ends: tuple[int, int]
) -> None:
    bench.consumer()
    bench.producer().send(2, rewards=rewards)
    bench.train(0)
    (lane,) = reports(bench)[0].scores
    assert (lane.at_low, lane.at_high) == (2 * ends[0], 2 * ends[1])


@pytest.mark.parametrize("rewards", [RewardSummary(nan, nan, nan, nan), RewardSummary(0.0, inf, -inf, 0.0)])
def test_a_summary_that_contradicts_itself_is_left_out_of_the_scores(
    bench: Bench, rewards: RewardSummary
) -> None:
    bench.shadowed = False  # NaN equals nothing, not even after a restart
    bench.consumer()
    peer = bench.producer()
    peer.send(rewards=rewards)
    peer.send(rewards=right(4, 4))
    bench.train(0)
    (event,) = reports(bench)
    assert (event.trained, event.scores[0].groups) == (2, 1)
    assert abs(event.reward) < inf


def figures(step: int = 1, **values: float) -> StepFigures:
    return StepFigures(run="anything", incarnation=0, step=step, at=0.0, figures=values)


def test_logged_figures_are_published_under_the_name_of_the_run(bench: Bench) -> None:
    bench.consumer()
    bench.ask(LogFigures(consumer="c", logged=(figures(1, loss=0.5), figures(2, loss=0.4))), Ok)
    found: Any = [one for one in bench.published if isinstance(one.message, StepFigures)]
    assert [(one.topic, one.message.run, one.message.step) for one in found] == [
        (b"telemetry.figures.run", "run", 1),
        (b"telemetry.figures.run", "run", 2),
    ]


def test_figures_of_a_consumer_that_was_taken_over_are_refused(bench: Bench) -> None:
    old = bench.consumer()
    bench.consumer()
    request = LogFigures(consumer="c", generation=old, logged=(figures(),))
    assert bench.refused(request) is ErrorCode.FENCED


@pytest.mark.parametrize(("step", "is_valid"), [(4, False), (5, True), (6, True), (7, False), (99, False)])
def test_a_batch_is_at_most_one_step(bench: Bench, step: int, is_valid: bool) -> None:
    """A version of step 99 after the first batch ended a run of 40 steps as done."""
    bench.consumer()
    bench.producer().send(2)
    batch = bench.batch(6, version=PolicyVersion(0, 5))
    settle = Settle(
        consumer="c",
        lease=batch.lease,
        generation=batch.generation,
        version=PolicyVersion(0, step),
        trained=ids(batch),
    )
    if is_valid:
        assert bench.ask(settle, Settled).step == 6
    else:
        assert bench.refused(settle) is ErrorCode.INVALID
        assert bench.pressure().step == 5


def test_figures_of_strangers_and_infinite_ones_are_refused(bench: Bench) -> None:
    assert bench.refused(LogFigures(consumer="c", logged=(figures(),))) is ErrorCode.UNKNOWN
    bench.consumer()
    assert bench.refused(LogFigures(consumer="c", logged=(figures(loss=nan),))) is ErrorCode.INVALID


def test_a_consumer_that_has_left_is_no_trainer_any_more(bench: Bench) -> None:
    bench.consumer()
    bench.producer().send(2)
    bench.train(0)
    assert bench.pressure().trainers == 1
    bench.ask(Release(consumer="c", reason="pulled ahead"), Ok)
    assert bench.pressure().trainers == 1
    bench.ask(Release(consumer="c", reason="closed", leaves=True), Ok)
    assert bench.pressure().trainers == 0
    bench.consumer()
    bench.pull(1)
    assert bench.pressure().trainers == 1


def test_trainers_are_told_with_their_steps_and_the_last_one_with_its_end(bench: Bench) -> None:
    assert bench.pressure().untrained_s == 0.0
    bench.producer().send(6)
    bench.consumer("registers-only")
    bench.tick(7.0)
    found = bench.pressure()
    assert (found.leaders, found.untrained_s) == ((), 7.0)
    for name in ("b", "a"):
        bench.consumer(name)
        bench.settle(bench.batch(consumer=name), consumer=name)
    found = bench.pressure()
    assert [(one.consumer, one.step, one.connected) for one in found.leaders] == [
        ("a", 0, True),
        ("b", 0, True),
    ]
    assert found.untrained_s == 0.0
    bench.ask(Release(consumer="a", leaves=True), Ok)
    bench.tick(1.0)
    bench.send_beat("b")
    assert [one.consumer for one in bench.pressure().leaders] == ["b"]
    bench.tick(4.0)
    assert [one.silent_s for one in bench.pressure().leaders] == [4.0]
    bench.tick(6.0)  # it falls silent
    (last,) = bench.pressure().leaders
    assert (last.consumer, last.connected, last.has_left, bench.pressure().untrained_s) == (
        "b",
        False,
        False,
        10.0,
    )
    bench.tick(90.0)  # the broker has forgotten its registration
    (last,) = bench.pressure().leaders
    assert (last.consumer, last.silent_s, bench.pressure().untrained_s) == ("b", 100.0, 100.0)
    bench.consumer("b")
    bench.pull(1, consumer="b")
    bench.ask(Release(consumer="b", leaves=True), Ok)
    (last,) = bench.pressure().leaders
    assert (last.consumer, last.has_left) == ("b", True)
