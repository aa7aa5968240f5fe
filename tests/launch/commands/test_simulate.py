import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutmq.launch.cli import app
from rolloutmq.launch.commands.simulate import decide_again, simulate
from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.orchestrator.autoscaling.control_law import PressureController
from rolloutmq.services.orchestrator.autoscaling.decision_log import (
    DecisionLog,
    DecisionLogHeader,
    LoggedDecision,
)
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample, WorkerCounts


def test_a_table_has_a_line_for_each_law(capsys: pytest.CaptureFixture[str]) -> None:
    simulate([20.0], 1, ["noise"], None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["noise", "20", "s", "rolloutmq"],
        ["noise", "20", "s", "ratio"],
        ["noise", "20", "s", "pid"],
    ]
    assert "breaks" not in lines[1]
    assert "breaks" in lines[3]


def test_a_recorded_demand_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = tmp_path / "mine.csv"
    recorded.write_text("seconds,sequences per second\n100,10\n200,30\n400,30\n")
    simulate([2.0, 20.0], 1, [], recorded, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(one["scenario"], one["start_s"], one["law"]) for one in found] == [
        ("mine.csv", start_s, law) for start_s in (2.0, 20.0) for law in ("rolloutmq", "ratio", "pid")
    ]
    assert {one["ideal"] for one in found} == {15}
    assert found[0]["peak"]["worst"] <= 18


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,2\n",
        "a,b\n1,x\n",
        "1,2\n1,3\n",
        "2,1\n1,1\n",
        "1,-2\n3,4\n",
        "1,nan\n3,4\n",
        "1,2\n1e300,4\n",
        "1\n2\n",
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(text: str, tmp_path: Path) -> None:
    recorded = tmp_path / "bad.csv"
    recorded.write_text(text)
    with pytest.raises(ConfigError):
        simulate([20.0], 1, [], recorded)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown \(got 'storm'\)"):
        simulate([20.0], 1, ["storm"], None)
    with pytest.raises(ConfigError):
        simulate([float("nan")], 1, [], None)
    with pytest.raises(ConfigError):
        simulate([20.0], 1, [], tmp_path / "missing.csv")


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate([20.0], 1, ["noise"], None, picture=tmp_path / "noise.png")
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")
    assert "noise" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="picture"):
        simulate([20.0], 1, ["noise"], None, picture=tmp_path / "noise.nothing")
    with pytest.raises(ConfigError, match="picture"):
        simulate([20.0], 1, ["noise"], None, picture=tmp_path / "missing" / "noise.png")


def record(run_dir: Path, ticks: int = 5) -> Path:
    """Write a few decisions down, as an orchestrator does."""
    law, log = PressureController(1, 9, ScalingConfig()), DecisionLog(run_dir / "decisions.jsonl")
    state = law.initial(2)
    log.begin([DecisionLogHeader("e", 1, 9, law.scaling.model_dump(), state)])
    for tick in range(ticks):
        sample = PressureSample(crew=WorkerCounts(ready=2), heard_at=float(tick), number=tick, wanted=tick)
        state, decision = law.decide(state, sample, float(tick))
        log.add(LoggedDecision("e", 0.0, float(tick), sample, decision))
    return run_dir / "decisions.jsonl"


def test_the_decisions_of_a_run_are_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path)
    assert decide_again(tmp_path) == 0
    assert capsys.readouterr().out == "5 decisions, 0 of them different from the record\n"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0].replace('"max_workers":9', '"max_workers":3'), *lines[1:], ""]))
    assert decide_again(path) == 1
    told = capsys.readouterr().out
    assert "1 of them different" in told, "one goes no further than 3; another wording is no difference"
    assert "recorded 4: pinned to 4" in told
    assert "now      3: pinned to 4; 1 to 3 allowed" in told
    assert decide_again(path, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["differences"] == 1


def test_what_records_no_decisions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replay"):
        decide_again(tmp_path)
    (tmp_path / "decisions.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"decisions\.jsonl:1"):
        decide_again(tmp_path)


def test_the_command_line_decides_again(tmp_path: Path) -> None:
    record(tmp_path, 2)
    result = CliRunner().invoke(app, ["simulate", "--replay", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "2 decisions, 0 of them different from the record\n")
