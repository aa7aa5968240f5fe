"""Events of training as metrics."""

import math

import pytest
from tests.services.telemetry.export.events import (
    decision,
    evaluation,
    finding,
    settled,
    step,
)
from tests.services.telemetry.export.prometheus.pages import key, metrics_of, read

from rolloutmq.schemas.wire.training import StepFigures
from rolloutmq.services.telemetry.export.prometheus.bounds import FIGURES


def test_batches_are_counted_by_outcome() -> None:
    page = read(metrics_of([settled(1), settled(2, reward=0.75), settled(2, stepped=False, reward=0.75)]))
    assert page[key("batches_total", outcome="step")] == 2
    assert page[key("batches_total", outcome="without_signal")] == 1
    assert page[key("settled_groups_total", outcome="trained")] == 6
    assert page[key("settled_groups_total", outcome="filtered")] == 3
    assert page[key("settled_tokens_total")] == 300
    assert page[key("batch_reward")] == 0.75
    assert page[key("batch_env_reward", env="math")] == 0.75
    assert page[key("batch_staleness_max_steps")] == 2


@pytest.mark.parametrize("wrong", [-5.0, math.nan, math.inf])
def test_times_of_steps_add_up_and_never_fall(wrong: float) -> None:
    page = read(metrics_of([step(1), step(2), step(3, pull_s=wrong, step_s=wrong)]))
    assert page[key("trainer_pull_seconds_total")] == 1.0
    assert page[key("trainer_step_seconds_total")] == 3.0


def test_the_newest_figures_are_shown_and_bounded() -> None:
    events = [
        StepFigures(run="run", incarnation=0, step=at, at=0.0, figures={f"f{at}": 1.0, "loss": float(at)})
        for at in range(3 * FIGURES)
    ]
    page = read(metrics_of(events))
    assert page[key("figure", name="loss")] == 3 * FIGURES - 1
    assert sum(name == "figure" for name, _ in page) == FIGURES


def test_figures_of_a_step_are_shown_like_logged_ones() -> None:
    page = read(metrics_of([step(1, extra={"entropy": 1.5}), step(2, extra={"entropy": 1.25})]))
    assert page[key("figure", name="entropy")] == 1.25


def test_scores_of_an_evaluation() -> None:
    page = read(metrics_of([evaluation(5), evaluation(10, mean=0.875)]))
    assert page[key("evaluation_score", env="math", score="mean")] == 0.875
    assert page[key("evaluation_score", env="_all", score="pass_1")] == 0.5
    assert key("evaluation_score", env="math", score="greedy") not in page
    assert page[key("evaluation_step")] == 10
    assert page[key("evaluation_points_total")] == 2
    assert page[key("evaluation_seconds_total")] == 6


def test_a_finding_is_shown_while_it_holds() -> None:
    metrics = metrics_of([finding("collapse"), finding("hacking")])
    assert read(metrics)[key("finding", env="math", finding="collapse")] == 1
    metrics.feed(finding("collapse", ended=True), 0.0)
    page = read(metrics)
    assert key("finding", env="math", finding="collapse") not in page
    assert page[key("finding", env="math", finding="hacking")] == 1


def test_decisions_that_change_the_target_are_counted() -> None:
    page = read(metrics_of([decision(2), decision(2), decision(4), decision(3)]))
    assert page[key("scale_decisions_total", env="math")] == 2
    assert page[key("workers_target", env="math")] == 3
