"""Series and marks out of the record."""

from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.schemas.wire.control import WorkerState
from rolloutmq.services.monitor.report.figure_course import FigurePoint
from rolloutmq.services.monitor.report.metrics import (
    MARKS_LIMIT,
    PRESSURES_LIMIT,
    WORKERS_LIMIT,
    MarkKind,
    WorkerLine,
    WorkerWatch,
    read_metrics,
)


def line(name: str, state: WorkerState = WorkerState.READY, pid: int = 1, **fields: Any) -> WorkerLine:
    return WorkerLine(name, state, pid, **fields)


def marks(*reports: list[WorkerLine]) -> list[tuple[float, MarkKind]]:
    watch = WorkerWatch()
    return [(mark.t, mark.kind) for t, report in enumerate(reports, 100) for mark in watch.see(t, report)]


def test_worker_that_drains_is_marked_once() -> None:
    drained = [
        [line("w", WorkerState.STARTING)],
        [line("w")],
        [line("w", draining=True)],
        [line("w", WorkerState.DRAINING)],
        [line("w", WorkerState.GONE)],
    ]

    assert marks(*drained) == [(102, MarkKind.DRAINED)]


def test_worker_that_comes_back_after_a_drain_was_not_killed() -> None:
    assert marks([line("w", WorkerState.GONE)], [line("w", pid=2)]) == [(100, MarkKind.DRAINED)]


def test_worker_replaced_without_a_drain_was_killed() -> None:
    assert marks([line("w")], [line("w", WorkerState.STARTING, pid=2)]) == [(101, MarkKind.KILLED)]


def test_silent_worker_was_killed_when_it_fell_silent_and_only_once() -> None:
    found = marks([line("w")], [line("w", silent_s=4.0)], [line("w", pid=2)], [line("w", pid=3)])

    assert found == [(97.0, MarkKind.KILLED), (103, MarkKind.KILLED)]


def test_worker_missing_from_a_report_is_not_gone() -> None:
    assert marks([line("w")], [], [line("w")]) == []


def test_failed_worker_is_marked() -> None:
    assert marks([line("w", WorkerState.FAILED)]) == [(100, MarkKind.FAILED)]


def test_record_is_read_into_series(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step = {"t": 2.0, "topic": "step", "kind": "step_done", "incarnation": 0, "step": 1, "tokens": 5}
    records = [
        {
            "t": 1.0,
            "topic": "pressure",
            "kind": "pressure",
            "rollout_pressure": 0.5,
            "worker_states": {"ready": 2, "draining": 1},
            "workers": [{"worker": "w", "state": "draining", "pid": 3, "in_hand": 1}],
        },
        step | {"reward": 0.25, "staleness_max": 3},
        step,
        step | {"incarnation": 1, "step": 2},
        {
            "t": 3.0,
            "kind": "step_skipped",
            "incarnation": 1,
            "step": 1,
            "groups": 2,
            "rejected": 1,
            "reason": "r",
        },
        {"t": 4.0, "topic": "telemetry.host.h", "kind": "host_sample", "load_1m": 2.0},
        {"t": 5.0, "topic": "pressure", "kind": "pressure", "trimmed": ["workers"]},
    ]
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))

    metrics = read_metrics(path)

    found = metrics.pressures.points()
    assert [(one.pressure, one.ready, one.draining) for one in found] == [(0.5, 2, 1), (0, 0, 0)]
    assert (metrics.steps.steps, metrics.steps.tokens) == ([1, 2], 10)
    assert [mark.kind for mark in metrics.marks] == [MarkKind.DRAINED]
    assert metrics.span_s == 4.0


def test_late_members_are_those_that_the_broker_counted_last(tmp_path: Path) -> None:
    record = tmp_path / "metrics.jsonl"
    counts: list[dict[str, int]] = [{}, {"a": 2}, {"a": 2, "b": 5}, {"a": 1}]
    lines = [{"t": 1.0, "kind": "pressure", "late_members": count} for count in counts]
    record.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert read_metrics(record).late_members == 7


def test_the_last_progress_of_each_curriculum_is_kept(tmp_path: Path) -> None:
    counts = {"sampler": "uniform", "drawn": 9, "outcomes": 8, "flat": 2, "failed": 1, "dropped": 0}
    lines = [
        {"t": 1.0, "kind": "curriculum", "env": "a", **counts},
        {"t": 2.0, "kind": "curriculum", "env": "b", **counts, "outcomes": 3},
        {"t": 3.0, "kind": "curriculum", "env": "a", **counts, "outcomes": 9, "success": None},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    assert read_metrics(path).curricula == {"a": counts | {"outcomes": 9}, "b": counts | {"outcomes": 3}}


def test_a_step_counts_once_whoever_reports_it(tmp_path: Path) -> None:
    settled = {"kind": "batch_settled", "incarnation": 0, "stepped": True, "tokens": 5, "reward": 0.5}
    told = {"kind": "step_done", "incarnation": 0, "tokens": 7, "reward": 0.25, "loss": None, "extra": {}}
    lines = [
        settled | {"t": 1.0, "step": 1},
        told | {"t": 1.1, "step": 1},
        settled | {"t": 2.0, "step": 2},
        settled | {"t": 3.0, "step": 2, "stepped": False, "tokens": 100},
        settled | {"t": 4.0, "step": 2, "tokens": 100},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    steps = read_metrics(path).steps
    assert (steps.steps, steps.tokens) == ([1, 2], 7 + 5)


def test_figures_of_learning_are_series_by_name(tmp_path: Path) -> None:
    lines = [
        {"t": 1.0, "kind": "step_figures", "step": 1, "figures": {"loss": 0.5, "mine": 3.0}},
        {"t": 2.0, "kind": "step_figures", "step": 2, "figures": {"loss": 0.25}, "not_finite": ["mine"]},
        {"t": 3.0, "kind": "step_done", "step": 3, "loss": 0.125, "extra": {"kl": None, "ratio": 1.0}},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    found = {name: list(course.recent) for name, course in read_metrics(path).figures.items()}
    assert found == {
        "loss": [FigurePoint(1.0, 1, 0.5), FigurePoint(2.0, 2, 0.25), FigurePoint(3.0, 3, 0.125)],
        "mine": [FigurePoint(1.0, 1, 3.0)],
    }


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"t": 1.0, "kind": "pressure"}\n{"t": 2.0, "ki\n{"t": "x"}\n{"t": 3.0, "kind": "pressure"}\n{"t'
    )
    assert [one.t for one in read_metrics(path).pressures.points()] == [1.0, 3.0]


def test_a_long_record_is_thinned(tmp_path: Path) -> None:
    """It has as many pressures as the run has seconds, and other workers in each."""
    path = tmp_path / "metrics.jsonl"
    count = 3 * PRESSURES_LIMIT
    with path.open("wb") as file:
        for t in range(1, count + 1):
            workers = [{"worker": f"w-{t}", "state": "failed", "pid": t}]
            states = {"ready": t % 3, "draining": 1}
            fields = {"rollout_pressure": 0.5, "worker_states": states, "workers": workers}
            file.write(msgspec.json.encode({"t": float(t), "kind": "pressure"} | fields) + b"\n")
    metrics = read_metrics(path)
    points = metrics.pressures.points()
    assert PRESSURES_LIMIT // 4 < len(points) <= PRESSURES_LIMIT
    assert {one.pressure for one in points} == {0.5}
    assert (points[0].t < 5, points[-1].t > count - 5) == (True, True)
    assert (len(metrics.marks), metrics.marks[-1].t) == (MARKS_LIMIT, float(count))
    assert set(metrics.ready.numbers()) == {0, 1, 2}


def test_the_names_of_workers_are_bounded() -> None:
    watch = WorkerWatch()
    for number in range(WORKERS_LIMIT + 10):
        watch.see(1.0, [line(f"w-{number}", WorkerState.FAILED)])
    assert len(watch._pids) == len(watch._over) == WORKERS_LIMIT
