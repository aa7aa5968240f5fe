"""An orchestrator that is not heard is told, unless it ended in order or nobody would restart it."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import RunLayout, Supervision
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.services.monitor.status.orchestrator_view import SILENT_S, fields, problem, silence_s
from rolloutmq.services.process.identity import identify, started_at

ME = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
GONE = msgspec.structs.replace(ME, start_ticks=1)


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def known(
    silent_s: float, now: float, orchestrator: ProcessIdentity = ME, *, over: bool = False
) -> Supervision:
    return Supervision(orchestrator=orchestrator, at=now - silent_s, over=over)


def test_a_process_that_lives_and_says_nothing_is_silent(layout: RunLayout) -> None:
    now = time.monotonic()
    assert silence_s(layout, known(60.0, now), now) == 60.0
    assert problem(layout, known(SILENT_S, now), now, 0.0) == ""
    said = problem(layout, known(60.0, now), now, 0.0)
    assert said.startswith("not heard for 1:00, since ")
    told = {"pid": os.getpid(), "alive": True, "silent_s": 60.0, "problem": said}
    assert fields(layout, known(60.0, now), now, 0.0) == told
    assert fields(layout, None, now, 0.0) is None


def test_an_end_is_no_silence_unless_a_launcher_would_restart_it(layout: RunLayout) -> None:
    now = started_at(ME) + 1000.0
    assert silence_s(layout, None, now) is None
    assert silence_s(layout, known(60.0, now, over=True), now) is None
    assert silence_s(layout, known(60.0, now, GONE), now) is None
    write_json(layout.owner, identify("up", Role.LAUNCHER, os.getpid(), "t"))
    assert silence_s(layout, known(60.0, now, GONE), now) == 60.0
    assert "has ended" in problem(layout, known(60.0, now, GONE), now, 0.0)


def test_the_silence_of_an_earlier_life_does_not_count(layout: RunLayout) -> None:
    write_json(layout.owner, identify("up", Role.LAUNCHER, os.getpid(), "t"))
    now = started_at(ME) + 2.0
    assert silence_s(layout, known(3600.0, now, GONE), now) == pytest.approx(2.0)


def test_a_damaged_owner_is_nobody(layout: RunLayout) -> None:
    layout.owner.write_text("{")
    now = time.monotonic()
    assert silence_s(layout, known(60.0, now), now) == 60.0
