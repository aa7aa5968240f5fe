import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutmq.launch.cli import app
from rolloutmq.launch.commands.simulate import (
    decide_again,
    load_plant,
    print_decisions,
    simulate,
)
from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.orchestrator.autoscaling.control_law import PressureController
from rolloutmq.services.orchestrator.autoscaling.decision_log import (
    DecisionLog,
    DecisionLogHeader,
    LoggedDecision,
)
from rolloutmq.services.orchestrator.autoscaling.pressure import PressureSample, WorkerCounts

PLANT = """
[scenario]
lasts_s = 300
changes = [100]

[trainer]
demand = {csv = "demand.csv"}

[environment.math]
start_s = 5
ready = 5

[environment.code]
start_s = 10
ready = 5
"""
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "autoscaling.md"


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    (tmp_path / "demand.csv").write_text("0,20\n100,40\n")
    (tmp_path / "mine.toml").write_text(PLANT)
    return tmp_path / "mine.toml"


def test_a_table_has_a_row_for_each_controller(capsys: pytest.CaptureFixture[str], plant: Path) -> None:
    simulate([], 1, plants=[plant])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine, environment math, start 5 s, 1 seed: needs 10.0 workers at most")
    rows = [line.split()[0] for line in lines if line[:1].strip()]
    assert rows == 2 * ["mine,", "reference", "rolloutmq", "ratio", "pid"]
    assert all(len(line) <= 120 for line in lines)
    assert any(line.strip().startswith("breaks: ") for line in lines)


def test_a_scenario_is_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    simulate([2.0], 1, ["few"], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(one["scenario"], one["start_s"], one["law"]) for one in found] == [
        ("few", 2.0, law) for law in ("reference", "rolloutmq", "ratio", "pid")
    ]
    assert found[0]["moves"]["ratio"] == 1.0
    assert found[1]["starved_s"].keys() == {"median", "worst", "ratio"}
    assert len(found[1]["settle_s"]) == 2
    assert found[3]["broken"]


def test_a_plants_figures_stand_beside_those_of_the_reference(
    capsys: pytest.CaptureFixture[str], plant: Path
) -> None:
    simulate([], 2, plants=[plant], as_json=True)
    found = {(one["env"], one["law"]): one for one in json.loads(capsys.readouterr().out)}
    assert {one["start_s"] for one in found.values()} == {5.0, 10.0}
    for env in ("math", "code"):
        reference, own = found[env, "reference"], found[env, "rolloutmq"]
        assert reference["peak"]["median"] == 10
        assert own["peak"]["ratio"] == own["peak"]["median"] / 10
        assert reference["broken"] == own["broken"] == []
        assert own["moves"]["median"] >= own["least_moves"] == 10 - 1 - (5 + 1)


def test_a_recorded_demand_is_tried_from_its_first_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = tmp_path / "mine.csv"
    recorded.write_text("seconds,sequences per second\n1000,10\n1200,30\n1500,30\n")
    simulate([2.0, 20.0], 1, [], recorded, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(one["scenario"], one["start_s"], one["law"]) for one in found] == [
        ("mine.csv", start_s, law)
        for start_s in (2.0, 20.0)
        for law in ("reference", "rolloutmq", "ratio", "pid")
    ]
    assert {one["peak_need"] for one in found} == {15.0}
    assert {one["least_moves"] for one in found} == {14 - 6}
    reference, own = found[:2]
    assert reference["moves"]["median"] == 10, "from 5 to 15, none before the change"
    assert own["peak"]["worst"] <= 18
    assert reference["starved_s"]["median"] < 20.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no rows"),
        ("1,2\n", "must span 1 to 43200 s"),
        ("1,2\n1,3\n", "seconds must increase"),
        ("1,-2\n3,4\n", "must be 0 to 400"),
        ("1,nan\n3,4\n", "must be 0 to 400"),
        ("1,2\n3,401\n", "a plant describes other workers"),
        ("0,2\n43201,4\n", "must span 1 to 43200 s"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    recorded = tmp_path / "bad.csv"
    recorded.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        simulate([20.0], 1, [], recorded)
    assert str(caught.value).startswith("trace: ")


def test_what_is_not_known_is_refused(tmp_path: Path, plant: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown \(got 'storm'\)"):
        simulate([20.0], 1, ["storm"])
    with pytest.raises(ConfigError, match="start: must be 0 to 3600 s"):
        simulate([float("nan")], 1)
    with pytest.raises(ConfigError, match=r"trace: .*missing\.csv: cannot be read"):
        simulate([20.0], 1, [], tmp_path / "missing.csv")
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        simulate([], 1, plants=[tmp_path / "missing.toml"])
    with pytest.raises(ConfigError, match="start: must not be beside plant"):
        simulate([20.0], 1, plants=[plant])
    with pytest.raises(ConfigError, match="plant: must not be beside scenario"):
        simulate([], 1, ["step"], plants=[plant])


def test_parameters_of_the_autoscaler_are_set_for_scenarios_and_plants(
    capsys: pytest.CaptureFixture[str], plant: Path
) -> None:
    def wasted(*settings: str) -> tuple[float, float]:
        simulate([2.0], 1, ["few"], settings=settings, as_json=True)
        reference, own, *_ = json.loads(capsys.readouterr().out)
        return reference["waste"]["median"], own["waste"]["median"]

    window = "orchestrator.scaling.down_window_s"
    usual, longer = wasted(), wasted(f"{window}=600")
    assert longer[0] == usual[0]
    assert longer[1] > usual[1] + 0.2
    assert load_plant(plant, [f"{window}=600", "trainer.batch=32"]).site.trainer.batch == 32
    plant.write_text(PLANT + "[orchestrator.scaling]\ndown_window_s = 500\nrefill_s = 30\n")
    scaling = load_plant(plant, [f"{window}=600"]).scaling
    assert (scaling.down_window_s, scaling.refill_s, scaling.up_least) == (600.0, 30.0, 4)
    with pytest.raises(ConfigError, match=r"^orchestrator\.scaling\.refil_s: unknown key; did you mean"):
        simulate([2.0], 1, ["few"], settings=["orchestrator.scaling.refil_s=3"])
    with pytest.raises(ConfigError, match=r"^trainer: unknown key; allowed: orchestrator"):
        simulate([2.0], 1, ["few"], settings=["trainer.batch=3"])


def test_controllers_are_chosen_by_name(capsys: pytest.CaptureFixture[str], plant: Path) -> None:
    simulate([], 1, plants=[plant], controllers=["pid", "rolloutmq"], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(one["env"], one["law"]) for one in found] == [
        (env, law) for env in ("math", "code") for law in ("rolloutmq", "pid")
    ]
    assert found[0]["peak"]["ratio"], "beside the reference fleet, which runs in any case"
    with pytest.raises(ConfigError, match=r"^controller: unknown \(got 'pi'\); use one of 'reference'"):
        simulate([], 1, plants=[plant], controllers=["pi"])


def test_decisions_are_printed_where_target_or_reason_change(
    capsys: pytest.CaptureFixture[str], plant: Path
) -> None:
    print_decisions([], plants=[plant])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "mine, start 10 s"
    assert all(re.match(r" +\d+ s  (math|code)  target +\d+  ready ", line) for line in lines)
    assert lines[0].endswith("hold: no measurement yet")
    print_decisions([], plants=[plant], as_json=True)
    ((found,),) = (json.loads(capsys.readouterr().out),)
    assert (found["scenario"], found["start_s"], len(found["decisions"])) == ("mine", 10.0, len(lines))
    targets = [one["target"] for one in found["decisions"] if one["env"] == "math"]
    assert targets[0] == 5
    assert max(targets) >= 10
    result = CliRunner().invoke(app, ["simulate", "--plant", str(plant), "--decisions"])
    assert result.output.splitlines() == [title, *lines]


def test_a_queue_that_holds_no_rollouts_is_warned_about(
    capsys: pytest.CaptureFixture[str], plant: Path
) -> None:
    simulate([], 1, plants=[plant])
    assert capsys.readouterr().err == ""
    plant.write_text(PLANT + "rollout_s = 60\n")
    simulate([], 1, plants=[plant])
    assert capsys.readouterr().err == (
        "rolloutmq: warning: mine: trainer.queue: 1000 sequences are too few: at 40 a second with "
        "environment.code.rollout_s = 60, 2400 are under way, and workers wait for room; set at least 2464\n"
    )


def test_the_command_line_refuses_a_plant_by_its_key(plant: Path) -> None:
    plant.write_text(PLANT + "max_workers = nan\n")
    result = CliRunner().invoke(app, ["simulate", "--plant", str(plant)])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("environment.code.max_workers: ")


def test_the_plant_of_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "plant.toml").write_text(text)
    (scenario,) = (load_plant(tmp_path / "plant.toml"),)
    assert set(scenario.site.environments) == {"math", "code"}
    assert scenario.site.servers
    simulate([], 1, plants=[tmp_path / "plant.toml"])
    assert "breaks: " not in capsys.readouterr().out.partition("ratio ")[0]


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], plant: Path) -> None:
    simulate([], 1, plants=[plant], picture=tmp_path / "mine.png")
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert "mine" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="picture"):
        simulate([], 1, plants=[plant], picture=tmp_path / "mine.nothing")
    with pytest.raises(ConfigError, match="picture"):
        simulate([], 1, plants=[plant], picture=tmp_path / "missing" / "mine.png")
    with pytest.raises(ConfigError, match=r"picture: .*at most 60 rows"):
        simulate([], 1, plants=31 * [plant], picture=tmp_path / "mine.png")


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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--replay", "nope"],
            "replay: nope cannot be read: No such file or directory; name a run directory",
        ),
        (
            ["--replay", "nope", "--set", "orchestrator.scaling.band_part=0.3"],
            "set: must not be beside replay",
        ),
        (["--replay", "nope", "--trace", "demand.csv"], "trace: must not be beside replay"),
        (["--replay", "nope", "--decisions"], "decisions: must not be beside replay"),
        (["--decisions", "--controller", "pid"], "controller: must not be beside decisions"),
        (["--seed", "3"], "seed: is that of decisions"),
    ],
)
def test_options_that_would_be_ignored_are_refused(words: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code != 0
    assert told in str(result.exception)


def test_another_seed_has_other_decisions(capsys: pytest.CaptureFixture[str], plant: Path) -> None:
    print_decisions([], plants=[plant])
    first = capsys.readouterr().out
    print_decisions([], plants=[plant], seed=1)
    assert capsys.readouterr().out != first
    result = CliRunner().invoke(app, ["simulate", "--plant", str(plant), "--decisions", "--seed", "0"])
    assert result.output == first


def test_a_misspelled_environment_is_refused(plant: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^environment\.maht: is not in the file .*; use one of 'math', 'code'"
    ):
        load_plant(plant, ["environment.maht.per_worker=4"])
    assert load_plant(plant, ["environment.math.ready=7"]).site.environments["math"].ready == 7
