"""Names are completed in each shell, from the files of a run, and nothing that cannot be read is an error."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch import cli
from rolloutmq.launch.declarations import completion
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.services.process.identity import identify


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An old run with an environment and workers, and a new one whose files are damaged."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("old", "new")):
        layout = RunLayout(Path("runs") / name)
        layout.logs.mkdir(parents=True)
        sections = {"environment": {"sort3": {"entry": "a:B"}, "sums": {"entry": "a:B"}}}
        write_json(layout.config, validate(sections))
        workers = [identify(worker, Role.WORKER, os.getpid(), "t") for worker in ("sort3-0", "sums-0")]
        write_json(layout.workers, workers)
        layout.log("broker").touch()
        if name == "new":
            layout.workers.write_text("{torn")
            layout.log("trainer").touch()
        os.utime(layout.config, (number, number))
    return tmp_path


def context(**params: Any) -> typer.Context:
    made = typer.Context(typer.main.get_command(cli.app))
    made.params = params
    return made


def test_runs_are_offered_the_newest_first(two_runs: Path) -> None:
    assert completion.runs("") == ["runs/new", "runs/old"]
    assert completion.runs("runs/o") == ["runs/old"]
    assert completion.runs(f"{two_runs}/runs/") == [f"{two_runs}/runs/new", f"{two_runs}/runs/old"]
    assert completion.runs("./runs/") == ["./runs/new", "./runs/old"]
    assert completion.runs("nowhere/") == []


@pytest.mark.usefixtures("two_runs")
def test_names_are_those_of_the_named_run_or_of_the_newest() -> None:
    old = Path("runs/old")
    assert completion.workers(context(run_dir=old), "so") == ["sort3-0"]
    assert completion.workers(context(), "") == [], "its file is damaged"
    assert completion.environments(context(run=old), "s") == ["sort3", "sums"]
    assert completion.environments(context(), "i") == ["inference"]
    assert completion.logs(context(), "") == ["broker", "trainer"]
    assert completion.logs(context(run_dir=old), "t") == []
    assert completion.environments(context(run_dir=Path("nowhere")), "s") == []


def test_topics_are_those_of_every_run_and_the_recorded_ones(two_runs: Path) -> None:
    layout = RunLayout(two_runs / "runs/new")
    assert completion.topics(context(), "p") == ["policy", "pressure"]
    lines = [{"topic": "telemetry.health.sort3"}, {"topic": "step"}, {"topic": 5}, [], {}]
    layout.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"torn')
    assert completion.topics(context(), "t") == ["telemetry", "telemetry.health.sort3"]
    assert completion.topics(context(run_dir=Path("runs/old")), "t") == ["telemetry"]


def test_groups_are_those_that_were_settled_or_dropped_last(
    two_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(two_runs / "runs/new")
    assert completion.groups(context(), "") == []
    lines = [{"trained": ["a1"]}, {"trained": ["a2"], "filtered": ["b3"]}, {"trained": 7}]
    layout.settled.write_text("torn\n" + "".join(f"{json.dumps(line)}\n" for line in lines))
    layout.dropped.write_text('{"group_id": "a4", "state": "expired"}\n')
    assert completion.groups(context(), "a") == ["a2", "a1", "a4"]
    assert completion.groups(context(), "b") == ["b3"]
    monkeypatch.setattr(completion, "TAIL_BYTES", 70)
    assert "a1" not in completion.groups(context(), "a"), "only the end is read"


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x85", "\u2028", "\ud800"])
def test_names_that_no_line_of_a_shell_can_have_are_not_offered(two_runs: Path, character: str) -> None:
    layout, name = RunLayout(two_runs / "runs/old"), f"b{character}c"
    layout.settled.write_text(json.dumps({"trained": [name, "b c"]}))
    layout.metrics.write_text(json.dumps({"topic": name}))
    layout.workers.write_text(json.dumps([{"name": name}]))
    layout.config.write_text(json.dumps({"environment": {name: {}}}))
    old = context(run_dir=Path("runs/old"))
    assert completion.groups(old, "b") == ["b c"]
    for names in (completion.topics, completion.workers, completion.environments, completion.configured):
        assert names(old, "b") == []


def test_environments_are_those_of_a_named_configuration(two_runs: Path) -> None:
    file = two_runs / "config.toml"
    assert completion.configured(context(config=file), "") == []
    file.write_text('[environment.one]\nentry = "a:B"\n[environment.two]\nentry = "a:B"\n')
    assert completion.configured(context(config=file), "") == ["one", "two"]
    assert completion.configured(context(config=file), "t") == ["two"]
    assert completion.configured(context(run=Path("runs/old")), "") == ["sort3", "sums"]
    file.write_text("environment = 3")
    assert completion.configured(context(config=file), "") == []


@pytest.mark.parametrize("text", ["[3]", '[{"name": 5}]', '[{"name": null}]', '{"name": "a"}', "[{}]"])
def test_workers_of_a_damaged_file_have_no_names(two_runs: Path, text: str) -> None:
    (two_runs / "runs/new/workers.json").write_text(text)
    assert completion.workers(context(), "") == []


def words_of(shell: str, line: str, cwd: Path) -> str:
    """Return what a shell offers for the last word of a line."""
    about = {
        "_ROLLOUTMQ_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    program = "import sys; sys.argv[0] = 'rolloutmq'; from rolloutmq.launch.cli import main; main()"
    told = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **about},
        cwd=cwd,
    )
    assert told.stdout, told.stderr
    return told.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_completes(two_runs: Path, shell: str) -> None:
    told = words_of(shell, "rolloutmq scale -r runs/old su", two_runs)
    assert "sums" in told
    assert "sort3" not in told


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("rolloutmq tail pre", "pressure"),
        ("rolloutmq explain -r runs/old a", "a1"),
        ("rolloutmq dead show -r runs/old a", "a1"),
        ("rolloutmq try config.toml on", "one"),
        ("rolloutmq doctor --config config.toml --rewards on", "one"),
    ],
)
def test_commands_complete_their_names(two_runs: Path, line: str, word: str) -> None:
    (two_runs / "config.toml").write_text('[environment.one]\nentry = "a:B"\n')
    RunLayout(two_runs / "runs/old").settled.write_text('{"trained": ["a1"]}\n')
    assert word in words_of("bash", line, two_runs)
