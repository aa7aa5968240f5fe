"""The trainer's evaluation: when a point is due, who waits, and that the training never depends on it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.bus.evaluation.answering import VERSION, Answer, answering, configured, of_index

from rolloutmq.bus.evaluation.log import postponed, record, recorded
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.schemas.config.evaluation import EvaluationConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.requests import TrainerPause
from rolloutmq.services.broker.server import running_broker
from rolloutmq.trainer.evaluation import Evaluation, PointWait, Schedule
from rolloutmq.trainer.process import Stop, StoppedError
from rolloutmq.trainer.ranks import Ranks


def schedule(last: int | None = None, **given: Any) -> Schedule:
    return Schedule(EvaluationConfig(enabled=True, **given), last)


def test_points_are_due_at_both_ends_and_every_so_many_steps() -> None:
    asked = schedule(every=10)
    assert asked.due_at_first()
    asked.began(0)
    due = []
    for step in range(1, 35):
        if asked.due(step):
            due.append(step)
            asked.began(step)
    assert due == [10, 20, 30]
    assert asked.due_at_last(34)
    asked.began(34)
    assert not asked.due_at_last(34)


def test_without_every_only_the_ends_are_due() -> None:
    asked = schedule()
    assert asked.due_at_first()
    asked.began(0)
    assert not any(asked.due(step) for step in range(1, 100))
    assert asked.due_at_last(99)


def test_a_resumed_trainer_goes_on_from_what_is_recorded() -> None:
    asked = schedule(20, every=10)
    assert not asked.due_at_first()
    assert not asked.due(25)
    assert asked.due(30)
    assert asked.due_at_last(25)
    assert not asked.due_at_last(20)


def test_a_point_in_between_waits_until_it_and_the_last_one_fit() -> None:
    asked = schedule(every=10, max_share=0.1)
    asked.began(0)
    assert asked.fits(0.0), "nothing is known of the cost yet"
    asked.ended(2.0)
    assert not asked.fits(59.0)
    assert asked.fits(60.0), "2 s spent, 2 s for this one, 2 s for the last one, of 60 s"
    asked.ended(4.0)
    assert (asked.spent_s, asked.fits(139.0), asked.fits(140.0)) == (6.0, False, True)
    seldom = schedule(every=10, max_share=1e-6)
    seldom.ended(0.1)
    assert not seldom.fits(1e5)
    always = schedule(every=10, max_share=1.0)
    always.ended(1e9)
    assert always.fits(1.0)


def test_a_postponed_point_is_told_once() -> None:
    asked = schedule(every=10)
    told = [asked.postpone(step, 50.0, busy=step > 15) for step in (10, 11, 12, 20, 21)]
    assert [line is not None for line in told] == [True, False, False, True, False]
    first, second = filter(None, told)
    assert (first.step, first.every, first.max_share, first.wall_s) == (10, 10, 0.1, 50.0)
    assert (second.step, second.max_share) == (20, None)


@contextmanager
def workers(run_dir: Path, answer: Answer = of_index, step: int = 0) -> Iterator[None]:
    """Answer in a thread of their own."""
    stop, ready = threading.Event(), threading.Event()

    async def work() -> None:
        async with answering(run_dir, answer, version=lambda _: PolicyVersion(0, step)):
            ready.set()
            await asyncio.to_thread(stop.wait, 120.0)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        assert ready.wait(60.0)
        yield
    finally:
        stop.set()
        thread.join(60.0)


@contextmanager
def evaluating(
    config: RunConfig, run_dir: Path, version: PolicyVersion = PolicyVersion(), **given: Any
) -> Iterator[Evaluation]:
    made = Evaluation(config, RunLayout(run_dir), version, Ranks(), **given)
    try:
        yield made
    finally:
        made.close()


def nothing() -> None: ...


def points(run_dir: Path) -> list[tuple[int, bool, bool]]:
    found = recorded(RunLayout(run_dir).evaluations)
    return [(one.version.step, one.waited, one.one_policy) for one in found]


def until(met: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_trainer_waits_at_both_ends_and_goes_on_in_between(run_dir: Path) -> None:
    config = configured(run_dir, evaluation={"every": 2, "max_share": 1.0})
    calls: list[int] = []
    with running_broker(config, RunLayout(run_dir)), evaluating(config, run_dir) as asked:
        with workers(run_dir):
            asked.before_first(PolicyVersion(), Stop(), lambda: calls.append(1))
            assert points(run_dir) == [(0, True, True)]
        gate = threading.Event()

        def slow(task: LeasedTask) -> list[float]:
            gate.wait(60.0)
            return of_index(task)

        with workers(run_dir, slow, step=2):
            asked.after_step(PolicyVersion(0, 1))
            asked.after_step(PolicyVersion(0, 2))
            asked.after_step(PolicyVersion(0, 3))
            assert len(points(run_dir)) == 1, "a point under way keeps nobody"
            gate.set()
            until(lambda: len(points(run_dir)) == 2)
        with workers(run_dir, step=5):
            asked.after_last(PolicyVersion(0, 5), Stop(), nothing)
    assert points(run_dir) == [(0, True, True), (2, False, True), (5, True, True)]
    assert calls
    last = list(recorded(RunLayout(run_dir).evaluations))[-1]
    assert last.total_s == pytest.approx(sum(one.seconds for one in recorded(RunLayout(run_dir).evaluations)))
    assert last.share is not None
    assert 0.0 < last.share <= 1.0


def test_the_last_point_waits_for_the_one_before_it(run_dir: Path) -> None:
    config = configured(run_dir, evaluation={"every": 2, "max_share": 1.0})
    with running_broker(config, RunLayout(run_dir)), evaluating(config, run_dir, VERSION) as asked:
        asked.after_step(PolicyVersion(0, 4))
        with workers(run_dir):
            asked.after_last(PolicyVersion(0, 5), Stop(), nothing)
    assert [step for step, _, _ in points(run_dir)] == [4, 5]


def test_nothing_is_asked_twice_after_a_resume(run_dir: Path) -> None:
    config = configured(run_dir)
    with running_broker(config, RunLayout(run_dir)), workers(run_dir):
        with evaluating(config, run_dir) as first:
            first.before_first(PolicyVersion(), Stop(), nothing)
        with evaluating(config, run_dir, PolicyVersion(1, 0)) as second:
            second.before_first(PolicyVersion(1, 0), Stop(), nothing)
            second.after_last(PolicyVersion(1, 0), Stop(), nothing)
    assert [step for step, _, _ in points(run_dir)] == [0]


def test_a_later_point_of_a_lost_policy_does_not_count(run_dir: Path) -> None:
    config = configured(run_dir, evaluation={"every": 10})
    with running_broker(config, RunLayout(run_dir)), workers(run_dir), evaluating(config, run_dir) as first:
        first.before_first(PolicyVersion(0, 0), Stop(), nothing)
    (done,) = recorded(RunLayout(run_dir).evaluations)
    late = type(done)(
        **{name: getattr(done, name) for name in done.__struct_fields__} | {"version": PolicyVersion(0, 40)}
    )
    record(RunLayout(run_dir).evaluations, late)
    with evaluating(config, run_dir, PolicyVersion(1, 15)) as resumed:
        assert resumed._schedule.due(16), "the point at 40 is of weights that are lost"


def test_a_stop_ends_the_wait_and_leaves_no_thread(run_dir: Path) -> None:
    config, stop = configured(run_dir), Stop()
    before = threading.active_count()
    with running_broker(config, RunLayout(run_dir)):
        threads = threading.active_count()
        with evaluating(config, run_dir) as asked:
            threading.Timer(0.5, lambda: stop.request("test")).start()
            with pytest.raises(StoppedError):
                asked.before_first(PolicyVersion(), stop, nothing)
        until(lambda: threading.active_count() <= threads)
    assert points(run_dir) == []
    until(lambda: threading.active_count() <= before)


def test_a_failing_evaluation_costs_only_itself(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(run_dir, evaluation={"environments": ["e"]})
    other = RunConfig.model_validate(
        {**config.model_dump(), "environment": {"x": {"entry": "a:B", "group_size": 2}}, "evaluation": {}}
    )
    with running_broker(other, RunLayout(run_dir)), evaluating(config, run_dir) as asked:
        asked.before_first(PolicyVersion(), Stop(), nothing)
    assert "evaluation failed, training continues" in caplog.text
    assert "there is no environment e" in caplog.text


def test_no_answer_by_the_deadline_is_recorded_as_missing(run_dir: Path) -> None:
    config = configured(run_dir, evaluation={"deadline_s": 0.5})
    with running_broker(config, RunLayout(run_dir)), evaluating(config, run_dir) as asked:
        asked.before_first(PolicyVersion(), Stop(), nothing)
    (done,) = recorded(RunLayout(run_dir).evaluations)
    assert (done.all.missing, done.all.greedy, done.why) == (3, None, "its deadline of 0.5 s passed")


def test_a_postponed_point_is_in_the_log(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = configured(run_dir, evaluation={"every": 2})
    with (
        running_broker(config, RunLayout(run_dir)),
        workers(run_dir),
        evaluating(config, run_dir, clock=lambda: 1.0) as asked,
    ):
        asked.before_first(PolicyVersion(), Stop(), nothing)
        for step in (1, 2, 3):
            asked.after_step(PolicyVersion(0, step))
    assert caplog.text.count("evaluation postponed step=2") == 1
    assert "it would exceed evaluation.max_share = 0.1" in caplog.text
    assert len(points(run_dir)) == 1
    (line,) = postponed(RunLayout(run_dir).evaluations)
    assert (line.step, line.every, line.max_share) == (2, 2, 0.1)


def test_cost_and_time_are_those_of_all_lives(run_dir: Path) -> None:
    config, layout = configured(run_dir, evaluation={"every": 2, "max_share": 0.5}), RunLayout(run_dir)
    with running_broker(config, layout), workers(run_dir):
        with evaluating(config, run_dir) as first:
            first.before_first(PolicyVersion(), Stop(), nothing)
        (done,) = recorded(layout.evaluations)
        record(layout.evaluations, replace(done, seconds=40.0))
        now = time.time()
        write_json(layout.lives, [Life(now - 1000.0, now - 900.0), Life(now - 10.0)])
        with evaluating(config, run_dir, PolicyVersion(1, 2), clock=lambda: 7.0) as second:
            assert not second._schedule.fits(second._wall_s()), "40 s of 110 s, and two more of 40 s"
            second.after_last(PolicyVersion(1, 2), Stop(), nothing)
    last = list(recorded(layout.evaluations))[-1]
    assert last.total_s == pytest.approx(done.seconds + 40.0 + last.seconds)
    assert last.share == pytest.approx(last.total_s / 110.0, rel=0.05)


def test_without_the_section_nothing_happens(run_dir: Path) -> None:
    with evaluating(RunConfig(), run_dir) as asked:
        asked.before_first(PolicyVersion(), Stop(), nothing)
        asked.after_step(PolicyVersion(0, 1))
        asked.after_last(PolicyVersion(0, 1), Stop(), nothing)
    assert points(run_dir) == []


class Follower(Ranks):
    """A rank that does not lead; the leading one is done as soon as it is asked."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.told: list[int] = []

    def most(self, value: int) -> int:
        self.told.append(value)
        return 1 if len(self.told) == 1 else value


def test_a_rank_that_does_not_lead_waits_and_asks_nothing(run_dir: Path) -> None:
    config, ranks = configured(run_dir), Follower()
    follower = Evaluation(config, RunLayout(run_dir), PolicyVersion(), ranks)
    follower.before_first(PolicyVersion(), Stop(), nothing)
    follower.after_step(PolicyVersion(0, 1))
    follower.close()
    assert ranks.told == [0, 0, 0], "whether it is due, and two waits"
    assert points(run_dir) == []


def test_the_wait_for_a_point_is_counted_as_it_goes_on() -> None:
    now, told, supplied = 10.0, [0.0], []

    def waited(reason: TrainerPause, seconds: float) -> None:
        assert reason is TrainerPause.EVALUATION
        told[0] += seconds

    wait = PointWait(lambda: supplied.append(now), waited, lambda: now)
    with wait:
        now += 5.0  # no point is due, and nobody waits
    assert told == [0.0]
    with wait:
        for _ in range(3):
            wait()
            now += 0.5
        assert told == [1.0]
    assert told == [1.5]
    assert len(supplied) == 3
