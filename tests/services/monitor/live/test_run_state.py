"""The board keeps what is true now."""

from collections.abc import Callable

import pytest

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import (
    LaneStatus,
    Pressure,
    StepDone,
    StepSkipped,
    WorkerState,
    WorkerStatus,
)
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.telemetry import GpuAbsence, GpuSample
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.live.view import flow_line
from rolloutmq.services.monitor.report.history import Event, History
from rolloutmq.services.monitor.report.waited import WaitedLives

MakeStep = Callable[..., StepDone]
MakeSettled = Callable[..., BatchSettled]


@pytest.fixture
def board() -> RunState:
    return RunState.of(RunConfig(environment={"e": EnvironmentConfig(entry="a:B", max_staleness=3)}))


def test_board_takes_its_limits_from_the_configuration(board: RunState) -> None:
    assert (board.name, board.total_steps, board.low, board.high) == ("run", 400, 0.75, 3.0)
    assert board.staleness_bound == 3


def test_the_bound_that_shows_is_the_one_in_force(
    board: RunState, make_pressure: Callable[..., Pressure]
) -> None:
    """An environment for evaluation has no say; one that has no lane yet keeps the configured bound."""

    def lane(env: str, bound: int, split: Split = Split.TRAIN) -> LaneStatus:
        return LaneStatus(env=env, split=split, weight=1.0, min_share=0.0, max_staleness=bound)

    board.feed(make_pressure(lanes=(lane("other", 1), lane("v", 9, Split.EVAL))), 1.0)
    assert board.staleness_bound == 3
    board.feed(make_pressure(lanes=(lane("other", 1), lane("e", 2))), 2.0)
    assert board.staleness_bound == 2
    board.feed(make_pressure(lanes=(lane("other", 7), lane("e", 2))), 3.0)
    assert board.staleness_bound == 7


def test_findings_stay_until_they_end_and_momentary_ones_for_a_minute(board: RunState) -> None:
    def finding(name: str, *, ended: bool = False) -> HealthFinding:
        return HealthFinding(env="e", at=0.0, finding=name, problem="" if ended else "found", ended=ended)

    board.feed(finding("collapse"), 1.0)
    board.feed(finding("held"), 1.0)
    assert [one.finding for one in board.findings(60.0)] == ["collapse", "held"]
    assert [one.finding for one in board.findings(62.0)] == ["collapse"]
    board.feed(finding("collapse", ended=True), 70.0)
    board.feed(finding("drift", ended=True), 70.0)
    assert board.findings(71.0) == []


def test_a_board_that_begins_later_has_the_clock_and_the_rewards_of_the_run(
    board: RunState, make_step: MakeStep
) -> None:
    finding = HealthFinding(env="e", at=0.0, finding="collapse", problem="found")
    past = [Event(900.0 + step, make_step(step, step / 10, extra={"kl": 0.5})) for step in range(1, 6)]
    board.recall(History(300.0, 1000.0, (*past, Event(950.0, finding))), 50.0)
    assert board.elapsed_s(50.0) == 300.0
    assert board.rewards() == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert board.figures["kl"] == 0.5
    assert [one.finding for one in board.findings(50.0)] == ["collapse"]
    assert board.steps_per_s(50.0) == pytest.approx(4 / 99), "the steps were long ago"
    board.feed(make_step(5, 0.5), 51.0)  # told again
    board.feed(make_step(6, 0.6), 52.0)
    assert board.rewards()[-2:] == [0.5, 0.6]
    assert board.elapsed_s(52.0) == 302.0


def test_waits_are_those_of_all_lives_of_the_broker(
    board: RunState, make_pressure: Callable[..., Pressure]
) -> None:
    earlier = WaitedLives()
    earlier.take(make_pressure(trainer_waits_s={"no_batch": 60.0}))
    board.recall(History(300.0, 1000.0, (), earlier), 50.0)
    board.feed(make_pressure(epoch=2, trainer_waits_s={"no_batch": 2.0}), 51.0)
    frozen = board.frozen()
    board.feed(make_pressure(epoch=2, trainer_waits_s={"no_batch": 3.0}), 52.0)
    board.feed(make_pressure(epoch=3, producer_waits_s={"no_credit": 1.0}), 53.0)
    assert board.waited().waits_s == {"no_batch": 63.0, "no_credit": 1.0}
    assert frozen.waited().waits_s == {"no_batch": 62.0}
    assert "waited: no_batch 63 s · no_credit 1 s" in flow_line(board, make_pressure(epoch=3)).plain


def test_rate_and_time_left_follow_the_last_ten_seconds(board: RunState, make_step: MakeStep) -> None:
    assert board.left_s(0.0) is None
    for step in range(1, 201):
        board.feed(make_step(step), step * 0.1)

    assert board.steps_per_s(20.0) == pytest.approx(10.0, rel=0.02)
    assert board.left_s(20.0) == pytest.approx(20.0, rel=0.02)


def test_stalled_trainer_loses_its_rate(board: RunState, make_step: MakeStep) -> None:
    for step in range(1, 11):
        board.feed(make_step(step), step * 0.1)

    assert board.steps_per_s(6.0) < 2.0
    assert board.steps_per_s(60.0) < 0.1


def test_two_quick_steps_after_a_long_wait_are_few_in_ten_seconds(
    board: RunState, make_step: MakeStep, make_pressure: Callable[..., Pressure]
) -> None:
    board.feed(make_pressure(), 0.0)
    board.feed(make_step(1), 33.9)
    board.feed(make_step(2), 34.0)
    assert board.steps_per_s(34.0) == pytest.approx(0.2)


def test_slow_steps_have_a_rate_and_a_time_left(board: RunState, make_step: MakeStep) -> None:
    for step in range(1, 11):
        board.feed(make_step(step), step * 60.0)
    assert board.steps_per_s(600.0) == pytest.approx(1 / 60, rel=0.01)
    assert board.left_s(630.0) == pytest.approx((board.total_steps - 10) * 60.0, rel=0.15)


def test_resumed_trainer_takes_its_steps_again(board: RunState, make_step: MakeStep) -> None:
    for step in range(1, 6):
        board.feed(make_step(step, step / 10), float(step))
    board.feed(make_step(3, 0.9), 10.0)

    assert board.rewards() == [0.1, 0.2, 0.9]
    assert board.steps_done == 3
    assert board.steps_per_s(10.0) == pytest.approx(1 / 9)


def test_a_batch_without_a_signal_is_no_step(board: RunState, make_step: MakeStep) -> None:
    board.feed(make_step(1, 0.5), 1.0)
    board.feed(
        StepSkipped(run="r", incarnation=0, step=1, at=2.0, reason="r", groups=2, filtered=2, rejected=0), 2.0
    )
    assert board.steps_done == 1
    assert board.rewards() == [0.5]


def test_steps_are_known_from_pressure_before_the_first_event(
    board: RunState, make_pressure: Callable[..., Pressure]
) -> None:
    board.feed(make_pressure(step=42), 1.0)

    assert board.steps_done == 42


def test_silence_of_the_broker_shows(board: RunState, make_pressure: Callable[..., Pressure]) -> None:
    assert board.silent_s(100.0) == 0.0
    board.feed(make_pressure(), 10.0)

    assert board.silent_s(11.0) == 0.0
    assert board.silent_s(18.0) == 8.0


def test_workers_that_have_gone_are_not_shown(
    board: RunState, make_pressure: Callable[..., Pressure], make_worker: Callable[..., WorkerStatus]
) -> None:
    board.feed(make_pressure(workers=(make_worker("a"), make_worker("b", state=WorkerState.GONE))), 1.0)

    assert [worker.worker for worker in board.workers()] == ["a"]


def test_gpu_that_is_found_or_lost_replaces_what_was_known(board: RunState) -> None:
    gpu = GpuSample(
        uuid="GPU-1",
        number=1,
        at=0.0,
        name="n",
        utilisation_percent=1.0,
        memory_used_bytes=1,
        memory_total_bytes=2,
        temperature_c=30.0,
        clock_event_reasons=0,
    )
    absence = GpuAbsence(host="h", number=1, at=0.0, why="no driver")
    board.feed(absence, 1.0)
    board.feed(gpu, 2.0)
    assert (list(board.gpus), board.gpu_absence) == (["GPU-1"], None)

    board.feed(absence, 3.0)

    assert (list(board.gpus), board.gpu_absence) == ([], absence)


def test_steps_of_a_trainer_that_reports_none_come_from_the_broker(
    board: RunState, make_settled: MakeSettled
) -> None:
    board.feed(make_settled(1, 0.25), 1.0)
    board.feed(make_settled(1, 0.0, stepped=False), 1.5)  # a batch without a signal is no step
    board.feed(make_settled(2, 0.75, staleness_max=3), 2.0)
    assert board.rewards() == [0.25, 0.75]
    assert (board.steps_done, board.steps_per_s(2.0)) == (2, 1.0)
    assert board.step is not None
    assert board.step.staleness_max == 3


def test_a_step_that_broker_and_trainer_report_counts_once(
    board: RunState, make_step: MakeStep, make_settled: MakeSettled
) -> None:
    for step in (1, 2, 3):
        board.feed(make_settled(step, 0.5), float(step))
        board.feed(make_step(step, 0.25), step + 0.1)
    board.feed(make_settled(3, 0.5), 3.2)  # in the other order, too
    assert board.rewards() == [0.25, 0.25, 0.25]
    assert board.steps_per_s(3.2) == pytest.approx(2 / 2.2)
    assert isinstance(board.step, StepDone)


def test_a_resumed_trainer_takes_steps_again(board: RunState, make_settled: MakeSettled) -> None:
    for step in (1, 2, 3):
        board.feed(make_settled(step, 0.1 * step), float(step))
    board.feed(make_settled(2, 0.9, incarnation=1), 4.0)
    assert board.rewards() == [0.1, 0.9]
    assert board.steps_done == 2


def test_figures_of_learning_are_the_last_told(board: RunState, make_step: MakeStep) -> None:
    def figures(step: int, *not_finite: str, **values: float) -> StepFigures:
        return StepFigures(run="r", incarnation=0, step=step, at=0.0, figures=values, not_finite=not_finite)

    board.feed(figures(1, loss=0.5, kl=0.1), 1.0)
    board.feed(figures(2, "kl", loss=0.4), 2.0)
    assert (board.figures, board.not_finite) == ({"loss": 0.4, "kl": 0.1}, ("kl",))
    board.feed(figures(3, loss=0.3), 3.0)
    assert board.not_finite == ()
    board.feed(make_step(4, extra={"entropy": 1.5, "trained_tokens": 9.0}), 4.0)
    assert set(board.figures) == {"loss", "kl", "entropy"}
