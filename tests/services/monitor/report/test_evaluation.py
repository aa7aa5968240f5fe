"""The evaluation in the summary and in the report."""

from pathlib import Path
from typing import Any

from rolloutmq.bus.evaluation.log import record
from rolloutmq.schemas.files import PostponedPoint, RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone
from rolloutmq.services.monitor.report.evaluation import (
    NO_EVALUATIONS,
    Evaluations,
    LeftOut,
    cost_text,
    figures,
    lines,
    policies,
    scores_text,
)


def scores(**given: Any) -> EnvironmentScores:
    usual = {"tasks": 64, "answered": 64, "greedy": 0.75, "mean": 0.5, "mean_error": 0.0125}
    return EnvironmentScores(**(usual | {"pass_1": 0.25, "pass_k": 0.875, "k": 8} | given))


def point(step: int, newest: int | None = None, **given: Any) -> EvaluationDone:
    usual: dict[str, Any] = {
        "run": "r",
        "id": f"eval-{step}",
        "at": 1.0,
        "version": PolicyVersion(0, step),
        "oldest": PolicyVersion(0, step),
        "newest": PolicyVersion(0, step if newest is None else newest),
        "all": scores(),
        "environments": {"e": scores()},
        "rollouts": 128,
        "seconds": 2.0,
    }
    return EvaluationDone(**(usual | given))


def test_a_run_without_evaluation_has_neither_figures_nor_lines() -> None:
    assert figures(NO_EVALUATIONS) is None
    assert list(lines(NO_EVALUATIONS)) == []


def test_the_first_and_the_last_point_are_told_with_the_cost() -> None:
    points = [point(0), point(50, 57), point(100, seconds=2.25, total_s=6.25, share=0.0825)]
    assert list(lines(Evaluations(points))) == [
        "step 0: greedy 0.750, mean 0.500 ± 0.013, pass@1 0.250, pass@8 0.875",
        "step 100: greedy 0.750, mean 0.500 ± 0.013, pass@1 0.250, pass@8 0.875",
        "3 points, 6.2 s, 8.2% of the wall time",
    ]
    found = figures(Evaluations(points))
    assert found is not None
    assert (found["points"], found["seconds"], found["share"]) == (3, 6.25, 0.0825)
    assert (found["first"]["step"], found["last"]["step"], found["last"]["pass_k"]) == (0, 100, 0.875)
    assert (found["last"]["one_policy"], found["environments"]["e"]["greedy"]) == (True, 0.75)


def test_a_point_of_several_policies_says_so() -> None:
    assert policies(point(50)) == "step 50"
    assert policies(point(50, 57)) == "steps 50 to 57"
    assert policies(point(50, rollouts=0)) == "step 50"
    spread = figures(Evaluations([point(50, 57)]))
    assert spread is not None
    assert (spread["last"]["oldest"], spread["last"]["newest"], spread["last"]["one_policy"]) == (
        [0, 50],
        [0, 57],
        False,
    )


def test_tasks_without_every_answer_are_never_left_out() -> None:
    partly = scores(answered=60, failed=1, missing=3, mean=None, mean_error=None, pass_1=None, pass_k=None)
    assert scores_text(partly) == "greedy 0.750, 1 of 64 tasks failed, 3 of 64 tasks missing"
    nothing = EnvironmentScores(tasks=64, missing=64)
    assert scores_text(nothing) == "64 of 64 tasks missing"
    assert scores_text(EnvironmentScores()) == "no answer"


def test_several_environments_have_a_line_each() -> None:
    both = point(9, environments={"a": scores(greedy=1.0), "b": scores(greedy=0.5)})
    found = list(lines(Evaluations([both])))
    assert found[0] == "step 9: pass@1 0.250, pass@8 0.875", "means over different scales say nothing"
    assert found[1].startswith("  a: greedy 1.000")
    assert found[2].startswith("  b: greedy 0.500")
    assert found[-1] == "1 point, 2.0 s"


def test_the_cost_is_that_of_all_points_without_a_trainer_of_the_run() -> None:
    assert cost_text(2.0, None) == "2.0 s"
    assert figures(Evaluations([point(1), point(2)]))["seconds"] == 4.0  # type: ignore[index]


def test_the_share_is_that_of_the_time_that_the_report_names() -> None:
    """The trainer records it at the last point; the run goes on for some seconds."""
    found = Evaluations([point(0), point(9, total_s=4.0, share=0.5)])
    assert list(lines(found, 16.0))[-1] == "2 points, 4.0 s, 25.0% of the wall time"
    assert figures(found, 16.0)["share"] == 0.25  # type: ignore[index]
    assert figures(found)["share"] == 0.5  # type: ignore[index]


def test_points_of_one_version_are_one_score_and_count_each(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    for number in range(8):
        record(layout.evaluations, point(0, id=f"eval-{number}", all=scores(greedy=number / 8)))
    found = Evaluations.read(layout)
    assert [one.all.greedy for one in found.in_force] == [0.875]
    assert list(lines(found))[-1] == "8 points, 16.0 s"
    assert len(list(lines(found))) == 2
    figure = figures(found)
    assert figure is not None
    assert (figure["points"], figure["seconds"], figure["first"]["id"]) == (8, 16.0, "eval-7")


def test_the_share_to_set_is_above_the_one_that_left_points_out() -> None:
    for max_share, spent_s, told in (
        (0.1, 4.9, "0.11"),
        (0.29, 0.0, "0.3"),
        (0.1, 5.0, "0.15"),
        (0.105, 0.1, "0.11"),
    ):
        cost = {"spent_s": spent_s, "wall_s": 100.0 if spent_s < 5 else 70.0}
        text = LeftOut.of([], [late(10, max_share, **cost)]).text()
        assert f"with points of 5.0 s all need about {told}: raise max_share" in text


def late(step: int, max_share: float | None = 0.1, **given: Any) -> PostponedPoint:
    usual: dict[str, Any] = {"point_s": 5.0, "spent_s": 5.0, "wall_s": 50.0}
    return PostponedPoint(at=1.0, step=step, every=10, max_share=max_share, **(usual | given))


def test_points_that_never_began_are_told_with_what_to_set(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    told = [late(10), late(20), late(30, None), late(40), late(40)]  # that of step 40 began at step 43
    for line in told:
        record(layout.evaluations, line)
    for done in (point(0), point(43), point(50)):
        record(layout.evaluations, done)
    found = Evaluations.read(layout)
    assert [one.version.step for one in found.points] == [0, 43, 50]
    assert (found.left_out.postponed, found.left_out.by_share, found.left_out.by_point) == (4, 2, 1)
    why = (
        "3 points of evaluation.every = 10 left out (2 by evaluation.max_share = 0.1, 1 because the point before was "
        "under way); with points of 5.0 s all need about 0.4: raise max_share, or raise evaluation.every or lower "
        "evaluation.tasks"
    )
    assert list(lines(found))[-1] == why
    figure = figures(found)
    assert figure is not None
    assert (figure["postponed"], figure["left_out"], figure["left_out_why"]) == (4, 3, why)


def test_a_point_that_takes_longer_than_the_steps_between_two_asks_for_fewer() -> None:
    busy = LeftOut.of([point(0)], [late(10, None)])
    assert busy.text() == (
        "1 point of evaluation.every = 10 left out (1 because the point before was under way); a point takes 5.0 s: "
        "raise evaluation.every or lower evaluation.tasks"
    )
    never = LeftOut.of([point(0)], [late(10, wall_s=6.0)])
    assert "do not fit into the time of the run: raise evaluation.every" in never.text()
    assert LeftOut.of([point(0), point(12)], [late(10)]).text() == ""
    assert LeftOut.of([], []) == LeftOut()
