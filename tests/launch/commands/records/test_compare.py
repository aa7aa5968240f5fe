"""`rolloutmq compare` on ended, living, damaged, foreign and missing runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.services.broker.journal.handmade import Handmade, batch, began, settles

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.commands.records.compare import compare
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.dashboard.record.damage import damaged_lines

Make = Callable[..., RunLayout]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Leave a run that ended in order: one group of two was trained."""

    def leave(name: str, env: str = "sort3", **sections: Any) -> RunLayout:
        root = tmp_path / name
        root.mkdir(parents=True)
        made = Handmade(root)
        sections = {"environment": {env: {"entry": "a:B"}}, "run": {"dir": str(root)}, **sections}
        write_json(made.layout.config, validate(sections))
        lease = made.lease([1, 2])
        made.log(began(), [made.accept(1), made.accept(2)], [lease, settles(lease, "g1", filtered=("g2",))])
        made.trained(batch(1, "g1", filtered=("g2",)))
        made.layout.summary.write_text(
            '{"ended": "the trainer is done", "wall_s": 2.5, "steps": 1, "groups_accepted": 2}'
        )
        return made.layout

    return leave


def cells(told: str, label: str) -> list[str]:
    """Return the cells of a row."""
    (row,) = (line for line in told.splitlines() if line.startswith(f"{label} "))
    return row.removeprefix(label).split()


def test_runs_stand_beside_each_other(make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, other = make("a"), make("b", trainer={"steps": 7})
    assert compare([one.root, other.root], as_json=False, output=tmp_path / "x.png") == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0].split() == ["a", "b"]
    assert cells(told, "groups accepted") == ["2", "2"]
    assert cells(told, "groups/s") == ["0.8", "0.8"]
    assert cells(told, "  trainer.steps")[1] == "7"
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_runs_of_one_name_are_told_apart(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make("x/run"), make("y/run")
    assert compare([one.root, other.root], as_json=False) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0].split() == ["x/run", "y/run"]
    assert "configuration: the same" in told


def test_a_run_that_cannot_be_read_does_not_end_the_others(
    make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, broken = make("good"), make("broken")
    broken.config.write_text('{"trainer": {"steps": "many"}}')
    file = tmp_path / "file"
    file.write_text("x")
    runs = [tmp_path / "nowhere", good.root, broken.root, file]
    assert compare(runs, as_json=False) == 1
    told = capsys.readouterr().out
    assert cells(told, "steps") == ["1"]
    refused = [line for line in told.splitlines() if line.startswith("not compared: ")]
    assert [Path(line.split(": ")[1]).name for line in refused] == ["nowhere", "broken", "file"]
    assert "trainer.steps" in refused[1]
    assert compare([tmp_path / "nowhere"], as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["runs"] == []


def test_damage_is_named_and_the_summary_of_the_end_counts(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = make("a"), make("b")
    other.metrics.write_bytes(b"\x00\n\x00\n")
    other.summary.unlink()
    other.log("up").parent.mkdir(exist_ok=True)
    other.log("up").touch()
    other.dropped.write_bytes(b"torn\n{}\n")
    assert compare([one.root, other.root], as_json=False) == 0
    told = capsys.readouterr().out
    assert "b: 2 lines of metrics.jsonl damaged, left out" in told
    assert "b: no summary: " in told
    assert "dropped.jsonl, line 1" in told
    assert cells(told, "steps") == ["1", "-"]


def test_the_damaged_lines_of_the_record_are_those_of_every_view(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind has fields of its own that may be wrong, and no view reads all of them."""
    one, other = make("a"), make("b")
    with other.metrics.open("ab") as record:
        record.write(
            b'{"t":1.0,"kind":"latency_sample","rows":7}\n{"t":1.0,"kind":"gpu_sample","uuid":4}\n'
            b'{"t":1.0,"kind":"engine_sample","busy":"x"}\n{"t":1.0,"kind":"unknown","worker_states":7}\n'
        )
    assert damaged_lines(other.metrics) == 3
    assert compare([one.root, other.root], as_json=False) == 0
    assert "b: 3 lines of metrics.jsonl damaged, left out" in capsys.readouterr().out


def test_runs_of_other_environments_are_told(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make("a"), make("b", env="math")
    assert compare([one.root, other.root], as_json=False) == 0
    told = capsys.readouterr().out
    assert "the runs train on other environments, so totals do not compare: a: sort3; b: math" in told
    assert cells(told, "  environment.math") == ["absent", "present"]


def test_a_run_that_goes_on_and_one_without_a_record(
    make: Make, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    ended, living = make("a"), RunLayout(run_dir)
    config = validate({"environment": {"sort3": {"entry": "a:B"}}, "run": {"dir": str(run_dir)}})
    write_json(living.config, config)
    with running_broker(config, living):
        assert compare([ended.root, run_dir], as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    first, second = told["runs"]
    assert (first["life"], first["ended"]) == ("ended", "the trainer is done")
    assert (second["life"], second["groups_accepted"]) == ("living", 0)
    assert second["notes"] == ["goes on: these are its figures so far", "nothing was recorded"]
    assert told["failed"] == []
