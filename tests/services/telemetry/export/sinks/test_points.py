"""Events become points at the step that they belong to."""

import math

import pytest
from tests.services.telemetry.export.events import (
    evaluation,
    every_kind,
    lane,
    latency,
    pressure,
    row,
    settled,
    step,
    worker,
)

from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.schemas.wire.training import StepFigures
from rolloutmq.services.telemetry.export.sinks.points import ENVIRONMENTS, FIGURES, SAMPLE_S, Point, Points
from rolloutmq.services.telemetry.export.sinks.protocol import line_of, point_decoder


def points_of(*events: Event, points: Points | None = None, now: float = 0.0) -> list[Point]:
    points = points or Points()
    return [point for event in events for point in points.feed(event, now, 100.0)]


def test_a_batch_is_a_point_at_its_step() -> None:
    (point,) = points_of(settled(3))
    assert (point.step, point.values["train/reward"], point.values["reward/math"]) == (3, 0.5, 0.5)
    assert (point.values["train/staleness_max"], point.values["train/groups_filtered"]) == (2, 1)


def test_the_two_reports_of_a_step_do_not_name_one_figure_twice() -> None:
    batch, trainer = points_of(settled(3), step(3))
    assert batch.step == trainer.step == 3
    assert not batch.values.keys() & trainer.values.keys()
    assert trainer.values == {"train/loss": 0.25, "time/pull_s": 0.5, "time/step_s": 1.5}


def test_figures_of_a_step_have_the_names_of_logged_ones() -> None:
    (point,) = points_of(step(3, extra={"entropy": 1.5, "grad_norm": 0.25}))
    assert point.values["figures/entropy"] == 1.5
    assert point.values["figures/grad_norm"] == 0.25


def test_figures_that_are_not_finite_stay_as_gaps() -> None:
    event = StepFigures(run="run", incarnation=0, step=2, at=0.0, figures={"kl": 0.5}, not_finite=("grad",))
    (point,) = points_of(event)
    assert point.values["figures/kl"] == 0.5
    value = point.values["figures/grad"]
    assert value is not None
    assert math.isnan(value)
    assert point_decoder.decode(line_of(point)).values == {"figures/kl": 0.5, "figures/grad": None}


def test_an_evaluation_is_at_the_step_of_its_policy() -> None:
    (point,) = points_of(evaluation(5))
    assert point.step == 5
    assert point.values["evaluation/mean"] == point.values["evaluation/math/mean"] == 0.75
    assert "evaluation/greedy" not in point.values


def test_state_is_sampled_at_intervals() -> None:
    points = Points()
    hops = latency(row(Hop.QUEUE, [0.1] * 99 + [5.0], env="math"), row(Hop.QUEUE, [0.2], env="code"))
    first = pressure([lane()], [worker("a"), worker("b", silent_s=9.0)], starved_s=4.0)
    assert points_of(first, hops, points=points) == []
    assert points_of(hops, points=points, now=SAMPLE_S - 1) == []
    again = latency(row(Hop.ROLLOUT, [9.0], env="math"), name="math-0")
    assert points_of(again, points=points, now=SAMPLE_S - 1) == []
    (point,) = points_of(pressure(starved_s=5.0), points=points, now=SAMPLE_S)
    assert (point.step, point.at) == (7, 100.0)
    assert point.values["latency/queue/p50_s"] == pytest.approx(0.1, rel=0.01)
    assert point.values["latency/queue/math/p99_s"] == pytest.approx(0.1, rel=0.01)
    assert point.values["latency/queue/code/p99_s"] == pytest.approx(0.2, rel=0.01)
    assert "latency/rollout/p50_s" not in point.values  # the broker tells the same ones
    assert point.values["queue/rollout_pressure"] == 1.5
    assert point.values["wait/trainer_starved_s"] == 5.0
    (point,) = points_of(pressure(workers=[worker("a")], starved_s=6.5), points=points, now=2 * SAMPLE_S)
    assert point.values["wait/trainer_starved_s"] == 1.5  # since the sample before
    assert point.values["workers/ready"] == 1
    assert not [name for name in point.values if name.startswith("latency/")]
    (point,) = points_of(pressure(epoch=2, starved_s=0.5), points=points, now=3 * SAMPLE_S)
    assert point.values["wait/trainer_starved_s"] == 0.5  # of the next broker


@pytest.mark.parametrize("seconds", [0.301 * 1.003**step for step in range(8)])
def test_no_percentile_exceeds_the_slowest(seconds: float) -> None:
    points = Points()
    points_of(latency(row(Hop.QUEUE, [0.1, seconds], slowest_s=seconds)), points=points)
    (point,) = points_of(pressure(), points=points, now=SAMPLE_S)
    found = [value for name, value in point.values.items() if name.startswith("latency/")]
    assert found
    assert all(value is not None and value <= seconds for value in found)


def test_names_are_bounded() -> None:
    points, seen = Points(), set[str]()
    for number in range(1000):
        figures = {f"f{number}": 1.0}
        events: list[Event] = [
            settled(env=f"env-{number}"),
            StepFigures(run="run", incarnation=0, step=1, at=0.0, figures=figures),
            latency(row(Hop.QUEUE, [0.1], env=f"env-{number}")),
            pressure(trainer_waits_s={f"reason-{number}": 1.0}),
        ]
        for point in points_of(*events, points=points, now=number * SAMPLE_S / 1000):
            seen |= point.values.keys()
    assert len([name for name in seen if name.startswith("reward/")]) == ENVIRONMENTS
    assert len([name for name in seen if name.startswith(("figures/", "wait/"))]) <= FIGURES + 1


def test_every_kind_of_event_can_be_a_point() -> None:
    points = points_of(*every_kind())
    assert all(point_decoder.decode(line_of(point)) == point for point in points)
    assert len(points) >= 6
