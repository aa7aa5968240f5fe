"""The picture is drawn from whatever a run left, be it nothing."""

import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.bus.evaluation import log
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone
from rolloutmq.services.monitor.report.plot import HEIGHT_PX, WIDTH_PX, key_figures, smoothed, write_report

CONFIG = RunConfig(environment={"e": EnvironmentConfig(entry="a:B")})
SUMMARY: dict[str, Any] = {
    "reward_first": 0.2,
    "reward_last": 0.97,
    "steps": 400,
    "wall_s": 41.2,
    "groups_accepted": 6544,
    "groups_lost": 0,
    "groups_trained_twice": 0,
    "staleness_max": 4,
    "staleness_bound": 4,
}


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def record(layout: RunLayout) -> None:
    """Leave a short run with a killed worker, a drained one and a trainer that resumed."""
    pressures = [
        {
            "t": 100.0 + second,
            "topic": "pressure",
            "kind": "pressure",
            "rollout_pressure": second / 10,
            "worker_states": {"ready": 2, "draining": int(second > 12)},
            "workers": [
                {"worker": "e-0", "state": "ready", "pid": 1 + (second > 5)},
                {"worker": "e-1", "state": "ready", "pid": 9, "draining": second > 12},
            ],
        }
        for second in range(20)
    ]
    layout.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in pressures))
    steps = [(0, step, False) for step in range(1, 11)] + [(1, 8, True), (1, 9, False), (1, 10, False)]
    layout.trained.write_bytes(
        b"".join(
            msgspec.json.encode(
                SettledBatch(
                    at=101.0 + index,
                    version=PolicyVersion(incarnation, step),
                    resumed=resumed,
                    trained=() if resumed else (f"g{incarnation}-{step}",),
                    staleness=() if resumed else (step % 5,),
                    rewards=() if resumed else (step / 10,),
                )
            )
            + b"\n"
            for index, (incarnation, step, resumed) in enumerate(steps)
        )
    )


def test_picture_of_a_run(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    record(layout)

    write_report(layout, CONFIG, SUMMARY, layout.report)

    assert size_of(layout.report) == (WIDTH_PX, HEIGHT_PX)
    empty = RunLayout(run_dir / "empty")
    empty.root.mkdir()
    write_report(empty, CONFIG, {}, empty.report)
    assert layout.report.stat().st_size > empty.report.stat().st_size + 5000


def test_names_of_a_foreign_record_are_text(run_dir: Path) -> None:
    """A `$` began a formula, which may have no end: then there was no picture."""
    layout = RunLayout(run_dir)
    name = "$x_{$\u200b_"
    lines = [
        {"t": 1.0, "kind": "step_done", "step": 1, "loss": 1.0, "extra": {name: 1.0, "_hidden": 2.0}},
        {"t": 2.0, "kind": "pressure", "workers": [{"worker": name, "state": "failed", "pid": 1}]},
    ]
    layout.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    write_report(layout, CONFIG, SUMMARY, run_dir / "report.png")
    assert size_of(run_dir / "report.png") == (WIDTH_PX, HEIGHT_PX)


def test_run_that_never_began_has_a_picture_too(run_dir: Path) -> None:
    layout = RunLayout(run_dir)

    write_report(
        layout,
        RunConfig(),
        {"reward_last": None, "reward_first": None, "staleness_bound": None},
        layout.report,
    )

    assert size_of(layout.report) == (WIDTH_PX, HEIGHT_PX)


def test_title_names_the_key_figures() -> None:
    assert key_figures(SUMMARY).split("   ·   ") == [
        "reward 0.20 to 0.97",
        "400 steps in 41 s",
        "6,544 groups accepted",
        "0 lost",
        "0 trained twice",
        "staleness 4 of 4",
    ]
    assert key_figures({}) == ""


def test_smoothing_is_centred_and_keeps_the_length() -> None:
    assert smoothed([], 20) == []
    assert smoothed([0.0, 3.0, 6.0, 9.0], 2) == [1.5, 3.0, 6.0, 7.5]
    assert smoothed([1.0] * 50, 20) == pytest.approx([1.0] * 50)


def test_missing_matplotlib_is_said(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(MissingError, match=r"pip install 'rolloutmq\[report\]'"):
        write_report(RunLayout(run_dir), CONFIG, SUMMARY, run_dir / "report.png")


def test_points_of_the_evaluation_are_drawn(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    record(layout)
    write_report(layout, CONFIG, SUMMARY, layout.report)
    without = layout.report.read_bytes()
    scores = EnvironmentScores(tasks=1, answered=1, greedy=0.5)
    version = PolicyVersion(0, 5)
    point = EvaluationDone(
        run="r",
        id="p",
        at=105.0,
        version=version,
        oldest=version,
        newest=version,
        all=scores,
        environments={},
    )
    log.record(layout.evaluations, point)
    write_report(layout, CONFIG, SUMMARY, layout.report)
    assert layout.report.read_bytes() != without


def test_figures_of_learning_have_a_panel(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    record(layout)
    write_report(layout, CONFIG, SUMMARY, layout.report)
    without = layout.report.stat().st_size
    figures = [
        {
            "t": 101.0 + step,
            "kind": "step_figures",
            "step": step,
            "figures": {"loss": 1 / (1 + step), "flat": 2.0},
        }
        for step in range(10)
    ]
    with layout.metrics.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in figures))
    write_report(layout, CONFIG, SUMMARY, layout.report)
    assert size_of(layout.report) == (WIDTH_PX, HEIGHT_PX)
    assert layout.report.stat().st_size > without + 2000


def test_the_log_of_the_broker_is_drawn_where_the_trainer_has_none(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    record(layout)
    layout.trained.rename(layout.settled)
    write_report(layout, CONFIG, SUMMARY, layout.report)
    drawn = layout.report.stat().st_size
    layout.settled.unlink()
    write_report(layout, CONFIG, SUMMARY, layout.report)
    assert drawn > layout.report.stat().st_size + 2000
