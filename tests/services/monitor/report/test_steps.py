"""Steps and figures of a trainer that was killed, fenced or resumed: each step once, as its last life took it."""

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.monitor.report.figure_course import FigurePoint
from rolloutmq.services.monitor.report.steps import NAMES_LIMIT, FoldedTokens, StepRecord


def live(record: StepRecord, incarnation: int, first: int, last: int, t: float) -> None:
    """Play a life of a trainer that logs each step before it settles it; its loss is its incarnation."""
    for step in range(first, last + 1):
        at, version = t + step, PolicyVersion(incarnation, step)
        record.logged(version, at, {"loss": float(incarnation)})
        record.settled(version, 10)


def losses(record: StepRecord) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in record.figures()["loss"].recent]


def points(record: StepRecord) -> dict[str, list[FigurePoint]]:
    return {name: list(course.recent) for name, course in record.figures().items()}


def test_rewound_steps_count_as_their_last_life_took_them() -> None:
    record = StepRecord()
    live(record, 0, 1, 5, t=0.0)
    live(record, 1, 4, 6, t=100.0)
    assert losses(record) == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert record.steps == [1, 2, 3, 4, 5, 6]


def test_a_life_that_ends_before_it_has_caught_up_voids_what_it_has_not_taken_again() -> None:
    record = StepRecord()
    live(record, 0, 1, 9, t=0.0)
    live(record, 1, 4, 5, t=100.0)
    record.logged(PolicyVersion(0, 9), 200.0, {"loss": 9.0})  # the first life still sends
    record.settled(PolicyVersion(0, 9), 10)
    assert losses(record) == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0)]
    assert record.steps == [1, 2, 3, 4, 5]


def test_a_step_that_is_logged_again_has_its_last_values() -> None:
    """Its lease was lost, or the same figures were sent twice."""
    record = StepRecord()
    version = PolicyVersion(0, 1)
    record.logged(version, 1.0, {"loss": 3.0})
    record.logged(version, 2.0, {"kl": 0.5})
    record.logged(version, 3.0, {"loss": 2.0})
    assert points(record) == {"kl": [FigurePoint(2.0, 1, 0.5)], "loss": [FigurePoint(3.0, 1, 2.0)]}


def test_a_later_life_leaves_no_figure_of_an_earlier_one_at_its_step() -> None:
    record = StepRecord()
    record.logged(PolicyVersion(0, 1), 1.0, {"loss": 3.0, "kl": 0.5})
    record.logged(PolicyVersion(1, 1), 2.0, {"loss": 2.0})
    record.logged(PolicyVersion(0, 1), 3.0, {"loss": 1.0})
    assert points(record) == {"loss": [FigurePoint(2.0, 1, 2.0)]}


def test_a_reported_step_brings_its_figures_once() -> None:
    record = StepRecord()
    version = PolicyVersion(0, 1)
    record.told(version, 1.0, 10, {"loss": 3.0, "kl": None})
    record.told(version, 2.0, 11, {"loss": 4.0})
    assert losses(record) == [(1, 3.0)]
    assert list(record.figures()) == ["loss"]
    assert record.tokens == 10


def test_a_long_run_keeps_few_steps_and_the_means_of_both_ends() -> None:
    record = StepRecord(steps_kept=100, points_kept=400)
    for step in range(1, 5001):
        version = PolicyVersion(0, step)
        record.settled(version, 7)
        record.logged(version, float(step), {"loss": float(step), "kl": None})
        assert len(record._steps) <= 100
        assert record._points <= 400
    assert record.tokens == 7 * 5000
    course = record.figures()["loss"]
    assert course.ends() == (25.5, 4975.5)
    assert len(course.recent) <= 200
    times, values, joined = course.curve()
    assert len(times) <= 1024 + 200 / joined + 1
    assert (times[0], times[-1]) == (values[0], values[-1])


def test_a_resume_within_the_last_steps_voids_them_in_a_long_run_too() -> None:
    record = StepRecord(steps_kept=100, points_kept=400)
    for life, first in ((0, 1), (1, 991)):
        for step in range(first, 1001):
            record.told(PolicyVersion(life, step), float(step), 7, {"loss": float(life)})
    assert record.tokens == 7 * 1000
    ends = record.figures()["loss"].ends()
    assert ends == (0.0, 10 / 50)


def test_steps_without_figures_and_names_without_end_are_bounded() -> None:
    record = StepRecord(points_kept=400)
    for step in range(1, 1000):
        record.logged(PolicyVersion(0, step), float(step), {"loss": None})
        record.logged(PolicyVersion(0, step), float(step), {f"name-{step}": 1.0})
    assert len(record._figures) <= 400
    assert len(record.figures()) == NAMES_LIMIT


def test_a_resume_beyond_the_last_steps_counts_each_step_once() -> None:
    record = StepRecord(steps_kept=100, points_kept=400)
    for life, first in ((0, 1), (1, 501)):
        for step in range(first, 1001):
            record.logged(PolicyVersion(life, step), 1000.0 * life + step, {"loss": float(life)})
            record.settled(PolicyVersion(life, step), 7)
    assert record.tokens == 7 * 1000
    course = record.figures()["loss"]
    assert course.ends() == (0.0, 1.0)
    times, values, _ = course.curve()
    assert [value for t, value in zip(times, values, strict=True) if 501.0 <= t <= 1000.0] == []


def test_a_resume_at_the_beginning_forgets_all() -> None:
    record = StepRecord(steps_kept=100, points_kept=400)
    live(record, 0, 1, 1000, t=0.0)
    live(record, 1, 1, 20, t=2000.0)
    assert record.tokens == 10 * 20
    assert record.figures()["loss"].ends() == (1.0, 1.0)


def test_the_means_of_a_life_that_was_rewound_far_are_those_of_what_is_left() -> None:
    record = StepRecord(steps_kept=100, points_kept=400)
    for step in range(1, 1001):
        record.logged(PolicyVersion(0, step), float(step), {"loss": float(step)})
        record.settled(PolicyVersion(0, step), 1)
    record.logged(PolicyVersion(1, 401), 2000.0, {"loss": 401.0})
    record.settled(PolicyVersion(1, 401), 1)
    assert record.tokens == 401
    assert record.figures()["loss"].ends() == (25.5, 376.5)


def test_folded_tokens_are_voided_to_within_one_sum() -> None:
    folded = FoldedTokens(limit=16)
    for step in range(1, 1001):
        folded.add(step, 7)
    assert folded.total() == 7 * 1000
    assert len(folded._sums) <= 16
    folded.void(2000)
    assert folded.total() == 7 * 1000
    folded.void(501)
    assert folded.total() == 7 * 500
    folded.void(1)
    assert folded.total() == 0
