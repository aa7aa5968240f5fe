"""The status of a run as an object: of a live broker, of a run that has ended, and of none."""

import json
import time
from pathlib import Path

import pytest

from rolloutmq import run_status
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.monitor import liveness
from rolloutmq.services.monitor.status import status as command
from rolloutmq.services.monitor.status.run_status import LINES, RunStatus
from rolloutmq.services.monitor.status.status import status
from rolloutmq.testing import LocalBroker

LIMIT_S = 60.0


def test_a_live_run_says_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalBroker() as broker:
        deadline = time.monotonic() + LIMIT_S
        while (
            "journal" not in (found := run_status(broker.run_dir)).text
        ):  # the broker looks at it now and then
            assert time.monotonic() < deadline
        assert status(broker.run_dir, as_json=True) == 0
    assert found.life == "living"
    assert str(found) == found.text == repr(found)
    labels = [line.split()[0] for line in found.text.splitlines()]
    assert labels == ["run", "journal", "step", "queue", "flow", "why", "groups", "workers"]
    assert found.figures.keys() == json.loads(capsys.readouterr().out).keys()


def test_a_broker_whose_process_is_not_here_is_asked(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another container has a pid of its own; it was told as ended while it served."""
    monkeypatch.setattr(liveness, "_runs", lambda _pid: False)
    record = RunLayout(run_dir).endpoints
    with LocalBroker(run_dir=run_dir):
        found, endpoints = run_status(run_dir), record.read_bytes()
        assert status(run_dir, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["life"] == found.life == "living"
    assert "queue" in found.text
    monkeypatch.setattr(command, "PATIENCE_S", 0.1)
    record.write_bytes(endpoints)  # as a killed broker leaves them
    found = run_status(run_dir)
    assert found.life == "absent"
    assert "has ended, or is of another machine or container" in found.text


async def test_it_answers_in_the_cell_of_a_notebook_as_a_table() -> None:
    async with LocalBroker() as broker:
        shown = run_status(str(broker.run_dir))._repr_html_()
        title = f"Status of {broker.run_dir}"
    assert shown.startswith(f"<table><caption>{title}</caption><tbody><tr><td>run</td><td>")
    assert "<tr><td>step</td><td>0</td></tr>" in shown


def test_names_of_peers_are_escaped_and_lines_bounded(tmp_path: Path) -> None:
    hostile = RunStatus(tmp_path, "living", "lane     <img src=x>&\n" * 1000, {})
    shown = hostile._repr_html_()
    assert "<tr><td>lane</td><td>&lt;img src=x&gt;&amp;</td></tr>" in shown
    assert shown.count("<tr>") == LINES
    assert "<p>and 900 more</p>" in shown


def test_a_run_that_has_ended_says_how(run_dir: Path) -> None:
    write_json(RunLayout(run_dir).summary, {"ended": "the trainer is done"})
    found = run_status(run_dir)
    assert (found.life, found.figures["ended"]) == ("ended", "the trainer is done")
    assert "the trainer is done" in found.text
    assert found._repr_html_().count("<tr>") == len(found.text.splitlines()) > 1


def test_without_a_run_there_is_no_broker_and_without_a_directory_an_error(tmp_path: Path) -> None:
    assert run_status(tmp_path).life == "absent"
    with pytest.raises(MissingError, match="start a run with"):
        run_status(tmp_path / "none")
