"""Steps and figures of a trainer that was killed, fenced or resumed: each step once, as its last life took it."""

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.monitor.report.steps import FigurePoint, StepPoint, StepRecord


def point(t: float, step: int) -> StepPoint:
    return StepPoint(t, step, reward=0.5, staleness_max=0, tokens=10)


def live(record: StepRecord, incarnation: int, first: int, last: int, t: float) -> None:
    """Play a life of a trainer that logs each step before it settles it; its loss is its incarnation."""
    for step in range(first, last + 1):
        at, version = t + step, PolicyVersion(incarnation, step)
        record.logged(version, at, {"loss": float(incarnation)})
        record.settled(version, point(at, step))


def losses(record: StepRecord) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in record.figures()["loss"]]


def test_rewound_steps_count_as_their_last_life_took_them() -> None:
    record = StepRecord()
    live(record, 0, 1, 5, t=0.0)
    live(record, 1, 4, 6, t=100.0)
    assert losses(record) == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert [one.step for one in record.points()] == [1, 2, 3, 4, 5, 6]


def test_a_life_that_ends_before_it_has_caught_up_voids_what_it_has_not_taken_again() -> None:
    record = StepRecord()
    live(record, 0, 1, 9, t=0.0)
    live(record, 1, 4, 5, t=100.0)
    record.logged(PolicyVersion(0, 9), 200.0, {"loss": 9.0})  # the first life still sends
    record.settled(PolicyVersion(0, 9), point(200.0, 9))
    assert losses(record) == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0)]
    assert [one.step for one in record.points()] == [1, 2, 3, 4, 5]


def test_a_step_that_is_logged_again_has_its_last_values() -> None:
    """Its lease was lost, or the same figures were sent twice."""
    record = StepRecord()
    version = PolicyVersion(0, 1)
    record.logged(version, 1.0, {"loss": 3.0})
    record.logged(version, 2.0, {"kl": 0.5})
    record.logged(version, 3.0, {"loss": 2.0})
    assert record.figures() == {"kl": [FigurePoint(2.0, 1, 0.5)], "loss": [FigurePoint(3.0, 1, 2.0)]}


def test_a_later_life_leaves_no_figure_of_an_earlier_one_at_its_step() -> None:
    record = StepRecord()
    record.logged(PolicyVersion(0, 1), 1.0, {"loss": 3.0, "kl": 0.5})
    record.logged(PolicyVersion(1, 1), 2.0, {"loss": 2.0})
    record.logged(PolicyVersion(0, 1), 3.0, {"loss": 1.0})
    assert record.figures() == {"loss": [FigurePoint(2.0, 1, 2.0)]}


def test_a_reported_step_brings_its_figures_once() -> None:
    record = StepRecord()
    version = PolicyVersion(0, 1)
    record.told(version, point(1.0, 1), {"loss": 3.0, "kl": None})
    record.told(version, point(2.0, 1), {"loss": 4.0})
    assert losses(record) == [(1, 3.0)]
    assert list(record.figures()) == ["loss"]
