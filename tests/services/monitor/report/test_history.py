"""A view that is attached later has the history of the run."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.schemas.wire.control import Pressure, StepDone
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.monitor.report import history
from rolloutmq.services.monitor.report.history import events, lives_at, ran_s, read_history
from rolloutmq.services.process.identity import boot_id
from rolloutmq.services.telemetry.recorder import line_of

MakeStep = Callable[..., StepDone]


def record(layout: RunLayout, *lines: tuple[float, Event]) -> None:
    layout.metrics.write_bytes(b"".join(line_of(topics.STEP, event, at) for at, event in lines))


def found(name: str, *, ended: bool = False) -> HealthFinding:
    return HealthFinding(env="e", at=0.0, finding=name, problem="" if ended else "found", ended=ended)


def test_events_of_training_are_read_as_they_were_told(
    layout: RunLayout, make_step: MakeStep, make_pressure: Callable[..., Pressure]
) -> None:
    step = make_step(3, extra={"kl": 0.5, "entropy": math.nan}, loss=math.nan)
    record(layout, (1.0, make_pressure()), (2.0, step), (3.0, found("collapse")))
    with layout.metrics.open("ab") as file:
        file.write(b'{"t":4.0,"topic":"step","kind":"step_done"}\n{"t":5.0,"kind":"step_done", torn')
    (told, finding) = events(layout.metrics)
    assert isinstance(told.event, StepDone)
    assert (told.at, told.event.step, told.event.extra) == (2.0, 3, {"kl": 0.5})
    assert math.isnan(told.event.loss)
    assert finding == (3.0, found("collapse"))


def run_on_broker(layout: RunLayout, pid: int) -> None:
    write_json(layout.endpoints, Endpoints(ingest="", serve="", events="", publish="", pid=pid, epoch=1))


def wrote(path: Path, at: float) -> None:
    path.write_text("{}\n")
    os.utime(path, (0.0, at))


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        child.wait()
    return child.pid


def test_the_time_of_a_run_is_that_of_its_lives(layout: RunLayout) -> None:
    assert ran_s(layout, 100.0) is None
    run_on_broker(layout, os.getpid())
    write_json(layout.lives, [Life(10.0, 30.0), Life(50.0)])
    assert ran_s(layout, 60.0) == 30.0


def test_a_run_whose_broker_was_killed_ran_until_its_last_word(layout: RunLayout, gone: int) -> None:
    run_on_broker(layout, gone)
    write_json(layout.lives, [Life(10.0, 30.0), Life(50.0)])
    assert ran_s(layout, 1000.0) == 20.0, "it wrote nothing since"
    wrote(layout.metrics, 62.0)
    wrote(layout.settled, 61.0)
    assert ran_s(layout, 1000.0) == ran_s(layout, 2000.0) == 32.0
    assert lives_at(layout, 2000.0) == [Life(10.0, 30.0), Life(50.0, 62.0)]


def test_a_run_whose_launcher_was_killed_ran_until_its_last_word(layout: RunLayout, gone: int) -> None:
    write_json(layout.lives, [Life(10.0)])
    write_json(
        layout.owner,
        ProcessIdentity(
            name="up", role=Role.LAUNCHER, pid=gone, start_ticks=1, boot_id=boot_id(), marker="t"
        ),
    )
    wrote(layout.metrics, 15.0)
    assert ran_s(layout, 1000.0) == 5.0
    run_on_broker(layout, os.getpid())
    assert ran_s(layout, 1000.0) == 990.0, "its broker goes on"


def test_without_lives_a_run_counts_from_its_address(layout: RunLayout, gone: int) -> None:
    run_on_broker(layout, os.getpid())
    began = layout.endpoints.stat().st_mtime
    assert ran_s(layout, began + 7.0) == pytest.approx(7.0)
    run_on_broker(layout, gone)
    began = layout.endpoints.stat().st_mtime
    wrote(layout.metrics, began + 3.0)
    assert ran_s(layout, began + 700.0) == pytest.approx(3.0)


def test_a_file_without_events_is_an_empty_history(layout: RunLayout) -> None:
    assert read_history(layout).events == ()
    lines: list[Any] = [{"t": "x", "kind": "step_done"}, {"kind": "step_done"}, 7]
    layout.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_history(layout).events == ()


@pytest.mark.parametrize(
    "line",
    [
        '{"t":1.0,"topic":"step","kind":"step_done","extra":[1]}',
        '{"t":1' + "0" * 400 + ',"topic":"step","kind":"step_done"}',
        '{"t":1.0,"topic":"step","kind":"step_done","extra":{"kl":1' + "0" * 400 + "}}",
        '{"t":1.0,"kind":"step_figures","run":"r","incarnation":0,"step":2,"at":1' + "0" * 400 + "}",
    ],
)
def test_a_damaged_line_is_passed_over(layout: RunLayout, make_step: MakeStep, line: str) -> None:
    record(layout, (1.0, make_step(1)))
    with layout.metrics.open("a") as file:
        file.write(line + "\n")
    (event,) = read_history(layout).events
    assert event.at == 1.0


def test_a_history_has_the_waits_of_each_life(
    layout: RunLayout, make_step: MakeStep, make_pressure: Callable[..., Pressure]
) -> None:
    first = [make_pressure(starved_s=at, trainer_waits_s={"no_batch": at}) for at in (1.0, 2.0)]
    second = make_pressure(epoch=2, starved_s=0.5, producer_waits_s={"stale_guard": 7.0})
    record(layout, (1.0, first[0]), (2.0, make_step(1)), (3.0, first[1]), (4.0, second))
    with layout.metrics.open("ab") as file:
        file.write(b'{"t":5.0,"topic":"pressure","kind":"pressure","epoch":3,"starved_s":"x"}\n')
    waits = read_history(layout).waits
    assert waits is not None
    assert waits.sum() == (2.5, {"no_batch": 2.0}, {"stale_guard": 7.0})


def test_a_history_keeps_the_last_events_of_each_kind(
    layout: RunLayout, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "KEPT", 3)
    steps = [(float(number), make_step(number)) for number in range(1, 9)]
    record(layout, (0.5, found("collapse")), *steps[:7], (7.5, found("drift")), steps[7])
    assert [at for at, _ in read_history(layout).events] == [0.5, 6.0, 7.0, 7.5, 8.0]
