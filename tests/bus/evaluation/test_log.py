"""`evaluations.jsonl`."""

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from rolloutmq.bus.evaluation.log import in_force, postponed, record, recorded
from rolloutmq.schemas.files import PostponedPoint
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone


def point(step: int, incarnation: int = 0, name: str = "") -> EvaluationDone:
    version = PolicyVersion(incarnation, step)
    scores = EnvironmentScores(tasks=2, answered=2, greedy=0.5)
    return EvaluationDone(
        run="r",
        id=name or f"{incarnation}.{step}",
        at=1.0,
        version=version,
        oldest=version,
        newest=version,
        all=scores,
        environments={"e": scores},
        rollouts=2,
    )


def test_a_point_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    assert list(recorded(path)) == []
    record(path, point(0))
    record(path, point(5))
    assert list(recorded(path)) == [point(0), point(5)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_line_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    record(path, point(0))
    with path.open("ab") as file:
        file.write(b'{"kind":"evaluation_done","ru')
    record(path, point(5))
    assert list(recorded(path)) == [point(0), point(5)]


def test_a_line_that_does_not_decode_is_told_and_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "evaluations.jsonl"
    record(path, point(0))
    with path.open("ab") as file:
        file.write(b"\xff{}\n")
    record(path, point(5))
    assert [one.version.step for one in recorded(path)] == [0, 5]
    assert "evaluation not read" in caplog.text


def test_points_of_policies_that_a_resume_lost_do_not_count() -> None:
    lost = [point(0), point(10), point(20), point(10, 1), point(30, 1)]
    assert [one.id for one in in_force(lost)] == ["0.0", "1.10", "1.30"]
    assert in_force([]) == []


def test_of_a_step_that_was_evaluated_twice_the_last_counts() -> None:
    assert [one.id for one in in_force([point(5, name="a"), point(5, name="b")])] == ["b"]


def test_one_policy_means_the_one_that_was_asked_for() -> None:
    assert point(5).one_policy
    assert not replace(point(5), newest=PolicyVersion(0, 6)).one_policy
    assert not replace(point(5), version=PolicyVersion(0, 6)).one_policy
    assert not replace(point(5), rollouts=0).one_policy


def test_a_postponed_point_is_no_point(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    late = PostponedPoint(at=1.0, step=10, every=10, max_share=0.1)
    for line in (point(0), late, point(20)):
        record(path, line)
    assert [one.version.step for one in recorded(path)] == [0, 20]
    assert list(postponed(path)) == [late]
    assert list(postponed(tmp_path / "none")) == []


def test_two_writers_lose_no_line(tmp_path: Path) -> None:
    """A point ends in its own thread while the trainer postpones the next one."""
    path = tmp_path / "evaluations.jsonl"
    late = [PostponedPoint(at=1.0, step=step, every=1) for step in range(100)]

    def postpone() -> None:
        for line in late:
            record(path, line)

    other = threading.Thread(target=postpone)
    other.start()
    for step in range(100):
        record(path, point(step))
    other.join(60)
    assert [one.version.step for one in recorded(path)] == list(range(100))
    assert list(postponed(path)) == late
