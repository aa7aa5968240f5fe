"""The curriculum without files and sockets: its states, and the outcome of a group."""

import math
import random

import msgspec
import pytest
from tests.services.curriculum.stubs import curriculum, done, identity, step

from rolloutmq.schemas.wire.envelope import RewardSummary
from rolloutmq.schemas.wire.tasks import TaskState, TaskStatus
from rolloutmq.services.curriculum.core import Drawn, Ended, Event, ScoreRange


def test_so_many_tasks_are_open_and_no_more() -> None:
    one = curriculum(ahead=3)
    assert step(one) == ["l-0", "l-1", "l-2"]
    assert one.refill("l") is None
    one.apply(one.ended(done("l-1", 0, 1)))
    assert step(one) == ["l-0", "l-2", "l-3"]
    assert one.figures.drawn == 4


def test_an_outcome_reaches_the_sampler_and_the_figures() -> None:
    one = curriculum(ahead=2)
    step(one)
    for name, scores in (("l-0", (1.0, 1.0)), ("l-1", (0.0, 1.0, 1.0, 0.0))):
        one.apply(one.ended(done(name, *scores)))
    figures = one.figures
    assert (figures.outcomes, figures.flat, figures.failed, figures.dropped) == (2, 1, 0, 0)
    assert figures.success / figures.recent == pytest.approx((0.98 * 1.0 + 0.5) / 1.98)
    assert figures.flat_share / figures.recent == pytest.approx(0.98 / 1.98)
    assert one.state().sampler != curriculum().state().sampler


@pytest.mark.parametrize("state", [TaskState.FAILED, TaskState.EXPIRED, TaskState.CANCELLED])
def test_a_task_without_a_group_teaches_the_sampler_nothing_and_is_replaced(state: TaskState) -> None:
    one = curriculum(ahead=1)
    before = one.state().sampler
    step(one)
    one.apply(one.ended(TaskStatus(id="l-0", state=state, reason="why", sequences=0)))
    assert one.state().sampler == before
    assert (one.figures.failed, one.figures.dropped) == ((1, 0) if state is TaskState.FAILED else (0, 1))
    assert step(one) == ["l-1"]


@pytest.mark.parametrize(
    "rewards",
    [
        RewardSummary(math.nan, 0.0, 1.0, 1.0),
        RewardSummary(math.inf, 0.0, math.inf, 1.0),
        RewardSummary(0.5, 0.0, 1.0, -1.0),
        RewardSummary(2.0, 0.0, 1.0, 1.0),
    ],
)
def test_a_summary_that_no_scores_have_is_no_outcome(rewards: RewardSummary) -> None:
    one = curriculum(ahead=1)
    before = one.state().sampler
    step(one)
    event = one.ended(TaskStatus(id="l-0", state=TaskState.DONE, sequences=2, rewards=rewards))
    one.apply(msgspec.json.decode(msgspec.json.encode(event), type=Ended))
    assert (one.figures.outcomes, one.figures.dropped, one.state().sampler) == (0, 1, before)


def test_an_event_out_of_order_or_of_another_task_is_refused() -> None:
    one = curriculum()
    step(one)
    for event, problem in (
        (Drawn(3, {"l-9": 1}), "event 3 does not follow event 1"),
        (Ended(2, "l-9", TaskState.DONE), "task l-9 is not open"),
        (Drawn(2, {"l-8": 1, "l-9": 100}), r"task l-9 is not in the task space \(got 100 of 100\)"),
        (Drawn(2, {"l-9": -1}), r"task l-9 is not in the task space \(got -1 of 100\)"),
    ):
        with pytest.raises(ValueError, match=problem):
            one.apply(event)
    assert (one.events, len(one.open)) == (1, 4)


def test_an_open_task_of_another_space_is_refused() -> None:
    one = curriculum()
    state = msgspec.structs.replace(one.state(), open={"l-0": 100})
    with pytest.raises(ValueError, match="task l-0 is not in the task space"):
        one.restore(state)


def test_the_same_events_make_the_same_state_from_any_state_between() -> None:
    rng = random.Random(2)
    one = curriculum(ahead=3)
    events: list[Event] = []
    states = [one.state()]
    for number in range(60):
        event: Event | None = one.refill("l") if number % 2 == 0 else None
        if event is None:
            name = rng.choice(list(one.open))
            event = one.ended(done(name, *(rng.random() for _ in range(4))))
        one.apply(event)
        events.append(event)
        states.append(one.state())
    for start in (0, 17, 60):
        again = curriculum(ahead=3)
        again.restore(states[start], events)
        assert again.state() == states[-1]
        assert step(again) == step(one if start == 60 else again)


def test_the_success_rate_is_the_mean_within_the_range_of_scores() -> None:
    scores = ScoreRange(0.0, 1.0)
    first = scores.outcome(7, 2, RewardSummary(0.5, 0.0, 1.0, 0.5))
    assert (first.index, first.sequences, first.success, first.deviation, first.flat) == (
        7,
        2,
        0.5,
        0.5,
        False,
    )
    lost = scores.outcome(7, 2, RewardSummary(-1.0, -1.0, -1.0, 0.0))
    assert (lost.success, lost.deviation, lost.flat) == (0.0, 0.0, True)
    assert scores.outcome(7, 2, RewardSummary(0.0, -1.0, 1.0, 2.0)).success == 0.5, "the range is now -1 to 1"


def test_the_largest_scores_overflow_nothing() -> None:
    one = curriculum(ahead=1)
    step(one)
    huge = RewardSummary(0.0, -1.7e308, 1.7e308, math.inf)
    status = TaskStatus(id="l-0", state=TaskState.DONE, sequences=2, rewards=huge)
    event = one.ended(status)
    assert math.isfinite(event.rewards.m2), "it can be written as JSON"
    one.apply(event)
    assert one.figures.success / one.figures.recent == pytest.approx(0.5)
    assert ScoreRange(-1.7e308, 1.7e308).outcome(0, 2, huge).deviation == 0.5


def test_another_curriculum_is_told_by_the_first_field_that_differs() -> None:
    assert identity().difference(identity()) == ""
    assert identity().difference(identity(sampler="uniform")) == "sampler learnability -> uniform"
    assert identity().difference(identity(options={"decay": 0.5})) == "options {} -> {'decay': 0.5}"
    assert identity().difference(identity(run_seed=1)) == "run_seed 0 -> 1"
    assert identity().difference(identity(environment="a:C {}")) == "environment a:B {} -> a:C {}"
