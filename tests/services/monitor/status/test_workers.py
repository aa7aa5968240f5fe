"""`rolloutmq workers` shows all that is known, and says which side knows nothing."""

import json
import os
from collections.abc import Callable

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import RunLayout, Supervision, Target, WorkerRecord
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import WorkerStatus
from rolloutmq.services.monitor.status import workers as command
from rolloutmq.services.monitor.status.workers import workers
from rolloutmq.services.process.identity import identify

ME = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
KNOWN = Supervision(
    orchestrator=ME,
    targets=(Target(env="e", target=2, current=2, reason="hold: no news"),),
    workers=(
        WorkerRecord(worker="e-0", env="e", phase="running", since=0.0, pid=7, started=0.0),
        WorkerRecord(
            worker="e-1", env="e", phase="fatal", since=0.0, crashes=5, reason="crashed", last_lines=("why",)
        ),
    ),
)


@pytest.fixture
def heard(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, make_worker: Callable[..., WorkerStatus]
) -> RunLayout:
    """A run whose broker has heard of one worker."""
    answer = (make_worker("e-0", pid=7, produced=12),)
    monkeypatch.setattr(command, "_heard", lambda _: answer)
    return layout


def test_a_person_sees_each_worker_and_why_one_is_not_up(
    heard: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(heard.supervision, KNOWN)
    assert workers(heard.root, as_json=False) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "e: target 2, current 2; hold: no news"
    assert lines[1].split()[:4] == ["worker", "state", "host", "pid"]
    assert lines[2].split()[:2] == ["e-0", "ready"]
    assert lines[3].split() == ["e-1", "fatal", *["-"] * 8, "5"]
    assert lines[4:] == ["    fatal; crashed", "    | why"]


def test_json_has_the_same(heard: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(heard.supervision, KNOWN)
    assert workers(heard.root, as_json=True) == 0

    told = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in told["workers"]] == ["ready", "fatal"]
    assert told["workers"][0]["produced"] == 12
    assert told["targets"][0]["target"] == 2


def test_without_a_broker_the_orchestrator_is_enough(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(layout.supervision, KNOWN)
    assert workers(layout.root, as_json=False) == 0
    assert capsys.readouterr().out.startswith("the broker does not reply")


def test_what_a_gone_orchestrator_knew_is_called_old(
    heard: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = msgspec.structs.replace(ME, start_ticks=1)
    write_json(heard.supervision, msgspec.structs.replace(KNOWN, orchestrator=gone))
    assert workers(heard.root, as_json=False) == 0
    assert capsys.readouterr().out.startswith(
        f"the orchestrator, process {os.getpid()}, is gone; its last report:"
    )


def test_workers_of_others_need_no_orchestrator(heard: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    assert workers(heard.root, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no orchestrator; these workers were started by hand"
    assert lines[2].startswith("e-0")


def test_where_nothing_is_known_it_says_what_became_of_the_run(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workers(layout.root, as_json=True) == 1
    assert "no broker runs in" in capsys.readouterr().err
    assert workers(layout.root / "none", as_json=True) == 2


def test_of_a_run_that_has_ended_it_is_said_first(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(layout.supervision, KNOWN)
    layout.summary.write_text('{"ended": "environment.e: all workers failed"}')
    assert workers(layout.root, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("has ended: environment.e: all workers failed")


def test_nobody_is_said_to_be_there(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(layout.supervision, Supervision(orchestrator=ME))
    assert workers(layout.root, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no workers"


def test_dead_workers_of_an_ended_run_are_gone(layout: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    """Its processes were killed: the last report has them running."""
    dead = msgspec.structs.replace(KNOWN.workers[0], start_ticks=1)
    write_json(layout.supervision, msgspec.structs.replace(KNOWN, workers=(dead,)))
    layout.summary.write_text('{"ended": "interrupted by SIGINT"}')
    assert workers(layout.root, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["e-0", "gone", "-", "7"]
